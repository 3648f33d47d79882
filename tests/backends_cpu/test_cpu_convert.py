"""Conversion between float16 and float32 against NumPy's: every value, every order of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gemmule.backends.cpu import jit
from gemmule.rungs import _cpu_convert as convert

EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
VIEWS = {
    "rows": EVERY,
    "columns": EVERY.T,
    "cut": EVERY[3:, :101],
    "stepped": EVERY[::2, ::3],
    "backwards": EVERY[::-1],
    "one row": EVERY[:1],
    "one column": EVERY[:, :1],
    "repeated": np.broadcast_to(EVERY[5], (7, 256)),
    "empty": EVERY[:0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_half_widens_and_comes_back(name: str) -> None:
    halves = VIEWS[name]
    wide = convert.widened(halves, np.dtype(np.float32))
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, halves.astype(np.float32))
    back = np.full((wide.shape[0] + 2, wide.shape[1] + 2), 7, np.float16)
    convert.narrowed(wide, back[1:-1, 1:-1])
    np.testing.assert_array_equal(back[1:-1, 1:-1], halves)
    assert (back[[0, -1]] == 7).all()
    assert (back[:, [0, -1]] == 7).all()


def test_rounds_to_nearest_even_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((300, 401)) * 10.0 ** rng.integers(-9, 6, (300, 401))
    wide = values.astype(np.float32)
    wide[0, :256] = EVERY[60].astype(np.float32) * np.float32(1 + 2.0**-11)  # halfway
    with np.errstate(over="ignore"):
        expected = wide.astype(np.float16)
    found = np.empty_like(expected)
    convert.narrowed(wide, found)
    np.testing.assert_array_equal(found, expected)


def test_other_dtypes_and_interpreters_without_numba_are_numpy_s(
    fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.arange(12, dtype=np.int8).reshape(3, 4)
    assert convert.widened(numbers, np.dtype(np.int8)) is numbers
    assert convert.widened(numbers, np.dtype(np.float64)).dtype == np.float64
    fault(jit, "unavailable", lambda sound: "none here")
    monkeypatch.setattr(convert, "rows_shares", None)
    wide = convert.widened(EVERY, np.dtype(np.float32))
    np.testing.assert_array_equal(wide, EVERY.astype(np.float32))
    back = np.empty_like(EVERY)
    convert.narrowed(wide, back)
    np.testing.assert_array_equal(back, EVERY)
