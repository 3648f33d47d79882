"""float8 as element type of the streamed rungs and of tiles: every code is widened exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from gemmule.core.problem import FLOAT8, numpy_dtype

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


def values_of(dtype: str) -> Any:
    """Return the 256 codes of a dtype, and the numbers that they are."""
    codes = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype))
    return codes, codes.astype(np.float32)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("other", ["float32", "float16", *FLOAT8])
def test_every_code(dtype: str, other: str) -> None:
    """Each meets a one, in vectors of 16 and alone, from either side; NaN and Inf stay there."""
    codes, numbers = values_of(dtype)
    for width in (32, 3):
        matrix = np.zeros((256, width), codes.dtype)
        matrix[:, 1] = codes
        x = np.zeros(width, numpy_dtype(other))
        x[1] = 1.0
        ones = np.ones((width, 16), numpy_dtype(other))
        with emulated():
            a, b, c = (gm.asarray(one, device="cuda") for one in (matrix, x, ones))
            got = gm.matvec(a, b, out_dtype="float32", rung="streamed_rows").to_host()
            turned = gm.asarray(np.ascontiguousarray(matrix.T), device="cuda")
            across = gm.vecmat(b, turned, out_dtype="float32", rung="split_columns").to_host()
            tiled = gm.matmul(a, c, out_dtype="float32", rung="register_tile").to_host()
            del a, b, c, turned
        for found in (got, across, *tiled.T[:2]):
            np.testing.assert_array_equal(found, numbers)
