"""A sample of the campaign of corners: dtypes in pairs, options together, sequences, columns."""

from __future__ import annotations

import numpy as np
import pytest

import corners_campaign as corners
import gemmule as gm
from gemmule.backends.cpu.jit import unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs Numba")
CASES, SEED = {"pairs": 600, "options": 25, "sequences": 25, "columns": 30}, 16


@pytest.mark.parametrize("axis", corners.AXES)
def test_corners_are_right(axis: str) -> None:
    assert corners.found_wrong(axis, CASES[axis], SEED) == []


def test_a_matrix_in_the_order_of_a_gpu_says_how_it_is_multiplied_on_the_host() -> None:
    Q = gm.quantize(np.eye(8, dtype=np.float32), bits=4).to(layout="mma16")
    with pytest.raises(TypeError, match=r"layout mma16: multiply by Q.to\(layout='row'\)"):
        Q @ np.ones(8, np.float32)
    assert (Q.to(layout="row") @ np.ones(8, np.float32)).shape == (8,)
