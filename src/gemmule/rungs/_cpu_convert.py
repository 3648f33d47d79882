"""Matrices of halves as float32, and back: in vector registers, on all threads.

NumPy converts float16 number by number. Where no kernel can be compiled, or neither axis of a
matrix is contiguous, NumPy's conversion stays.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gemmule.backends.cpu import jit
from gemmule.backends.cpu.copies import laid
from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import kernel
from gemmule.backends.cpu.pool import Pooled, in_pool, share_count

Array = np.ndarray[Any, Any]
SHARES_PER_THREAD = 4
LEAST = 1 << 12  # numbers: fewer are converted by NumPy sooner than a kernel is called


def widened(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return a matrix in `dtype`, in its own order; itself where it is so already."""
    few = array.ndim != 2 or array.size < LEAST
    if few or array.dtype != np.float16 or dtype != np.float32:
        same: Array = array.astype(dtype, copy=False)
        return same
    by_rows = _rows_of(array) is array
    result: Array = np.empty(array.shape, np.float32, order="C" if by_rows else "F")
    if not _converted(array, result):
        np.copyto(result, array)
    return result


def narrowed(array: Array, target: Array) -> None:
    """Write a matrix to one of another dtype, each number rounded to nearest even."""
    few = array.ndim != 2 or array.size < LEAST
    halves = (array.dtype, target.dtype) == (np.float32, np.float16)
    if few or not halves or not _converted(array, target):
        laid(array, target)


def _rows_of(array: Array) -> Array | None:
    """Return the matrix or its transpose, whichever has contiguous rows, in ascending order."""
    for view in (array, array.T):
        if view.strides[1] == view.itemsize and view.strides[0] >= 0:
            return view
    return None


def _converted(source: Array, target: Array) -> bool:
    """Convert in a kernel, and say whether there is one for these operands."""
    rows, places = _rows_of(source), target
    if rows is None or jit.unavailable() is not None:
        return False
    if rows is not source:
        places = target.T
    if places.strides[1] != places.itemsize:
        return False
    height, width = rows.shape
    shares = share_count(rows.nbytes + places.nbytes, height, SHARES_PER_THREAD)
    words = (rows.ctypes.data, rows.strides[0], places.ctypes.data, places.strides[0])
    rows_shares(source.dtype.name, target.dtype.name)(shares, *words, height, width, shares)
    return True


@functools.cache
def rows_shares(stored: str, wanted: str) -> Pooled:
    """Return ``convert(shares, source, step, target, step, rows, columns, shares)``; bytes."""
    get, put = load(stored, "float32"), store(wanted, "float32")

    @kernel
    def share(
        number: int,
        source: int,
        source_step: int,
        target: int,
        target_step: int,
        rows: int,
        columns: int,
        shares: int,
    ) -> None:
        for row in range(number * rows // shares, (number + 1) * rows // shares):
            at, to = source + row * source_step, target + row * target_step
            for column in range(columns):
                put(to, column, get(at, column))

    return in_pool(share, 7)
