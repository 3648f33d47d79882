"""float32 by a narrow matrix in halves: numbers that halves hold badly, under the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import emulated

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
M, N, K = 140, 36, 196  # ragged tiles, columns and steps
MOST = 20 * 2.0**-24  # of the sizes of a sum's terms: what it may be off by


def spread(rng: Any, shape: tuple[int, int], binades: int) -> Any:
    """Return normal numbers times powers of two as far apart as that."""
    return rng.standard_normal(shape) * 2.0 ** rng.integers(-binades // 2, binades // 2, shape)


def beside_large(rng: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Return a matrix with elements 2^-33 of those beside them, and one that meets only these."""
    a, b = rng.standard_normal(shape) * 2.0**-33, rng.standard_normal((shape[1], N))
    a[:, ::7], b[::7] = 1.5, 0.0
    return a, b


def operands(kind: str, rng: Any) -> tuple[Any, Any]:
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    if kind == "far apart":
        return spread(rng, (M, K), 40), spread(rng, (K, N), 40)
    if kind == "lost in A":
        return beside_large(rng, (M, K))
    if kind == "lost in B":
        b, a = (one.T for one in beside_large(rng, (N, K)))
        return rng.standard_normal((M, K)) * (abs(b).max(axis=1) < 1), b
    if kind == "rows and columns apart":
        return a * 2.0 ** rng.integers(-50, 50, (M, 1)), b * 2.0 ** rng.integers(-50, 50, (1, N))
    if kind == "small":
        return a * 2.0**-118, b
    a[3, 5], a[77, 0], b[9, 4] = np.nan, np.inf, -np.inf
    return a, b


KINDS = ["far apart", "lost in A", "lost in B", "rows and columns apart", "small", "not finite"]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_halves_hold_badly(kind: str) -> None:
    with emulated():
        for turn, (columns, parts) in enumerate(((64, 4), (128, 1), (32, 2), (128, 16))):
            a, b = (one.astype(np.float32) for one in operands(kind, np.random.default_rng(turn)))
            with np.errstate(invalid="ignore"):
                exact, size = a.astype(np.float64) @ b, abs(a.astype(np.float64)) @ abs(b)
            if turn % 2:  # B is the wide matrix
                a, b = np.ascontiguousarray(b.T), np.asfortranarray(a.T)
                exact, size = exact.T, size.T
            given = [gm.asarray(one, device="cuda:1") for one in (a, b)]
            way = {"columns": columns, "parts": parts}
            found = gm.matmul(*given, rung="wgmma_3xfp16_narrow", params=way).to_host()
            finite = np.isfinite(exact)
            np.testing.assert_array_equal(found[~finite], exact[~finite].astype(np.float32))
            assert (abs(found[finite] - exact[finite]) <= MOST * size[finite]).all()
            del given
