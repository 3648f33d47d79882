"""Operands and exact results for the tests of the public functions.

Elements are small integers, so that every partial sum is exact in every dtype, bfloat16 included,
and results are compared bit for bit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.core import memory
from gemmule.core.problem import numpy_dtype

Array = np.ndarray[Any, Any]

OURS: dict[str, Callable[..., Any]] = {op: getattr(gm, op) for op in ("matvec", "vecmat", "matmul")}
THEIRS: dict[str, Callable[..., Any]] = {  # the same by operators, of whatever library
    "matvec": lambda A, x: (A @ x[..., None])[..., 0],
    "vecmat": lambda x, A: (x[..., None, :] @ A)[..., 0, :],
    "matmul": lambda A, B: A @ B,
}
MAX_REDUCTION = 60  # 60 * 2 * 2 = 240 < 256, the largest run of integers in bfloat16


def small(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float64") -> Array:
    """Return integers of magnitude at most 2 (complex: in both parts 1), C-ordered."""
    low = 0 if dtype.startswith("uint") else -2
    values = rng.integers(low, 3, shape)
    if dtype.startswith("complex"):
        return (np.sign(values) + 1j * rng.integers(-1, 2, shape)).astype(dtype)
    return values.astype(numpy_dtype(dtype))


def wide(a: Array) -> Array:
    """Return the values of `a` in a type in which NumPy computes small products exactly."""
    if a.dtype.kind in "iuc":
        return a.astype(np.complex128 if a.dtype.kind == "c" else np.int64)
    return a.astype(np.float64)


def exact(op: str, a: Array, b: Array) -> Array:
    """Return ``op(a, b)`` by einsum over wide copies: no BLAS, no shared code with the package."""
    a, b = wide(a), wide(b)
    if op == "matmul":
        left = "k" if a.ndim == 1 else "...mk"
        right = "k" if b.ndim == 1 else "...kn"
        result = "..." + ("" if a.ndim == 1 else "m") + ("" if b.ndim == 1 else "n")
        return np.einsum(f"{left},{right}->{result}", a, b)
    spec = "...mn,...n->...m" if op == "matvec" else "...m,...mn->...n"
    return np.einsum(spec, a, b)


def assert_same(result: Any, truth: Array, dtype: str) -> None:
    """Assert dtype, shape and every bit (a NaN fails)."""
    assert isinstance(result, np.ndarray)
    assert result.dtype == numpy_dtype(dtype)
    assert result.shape == truth.shape
    np.testing.assert_array_equal(wide(result), truth)


def misaligned(a: Array) -> Array:
    """Return a copy of `a` one byte off its natural alignment."""
    buffer = np.zeros(a.nbytes + 1, np.uint8)
    view = buffer[1:].view(a.dtype) if a.dtype.itemsize == 1 else _offset(buffer, a)
    view = view.reshape(a.shape)
    view[...] = a
    return view


def _offset(buffer: Array, a: Array) -> Array:
    return np.ndarray(a.shape, a.dtype, buffer, offset=1)


def _reversed(a: Array) -> Array:
    both = (slice(None, None, -1),) * a.ndim
    return np.ascontiguousarray(a[both])[both]


def _step_two(a: Array) -> Array:
    spread = np.full([2 * size for size in a.shape], 7, a.dtype)
    view = spread[(slice(None, None, 2),) * a.ndim]
    view[...] = a
    return view


def _sliced(a: Array) -> Array:
    around = np.full([size + 3 for size in a.shape], 7, a.dtype)
    view = around[tuple(slice(1, 1 + size) for size in a.shape)]
    view[...] = a
    return view


def _read_only(a: Array) -> Array:
    copy = a.copy()
    copy.flags.writeable = False
    return copy


def _zero_stride(a: Array) -> Array:
    """Return an array of the shape of `a` whose last axis repeats one element."""
    return np.broadcast_to(a[..., :1].copy(), a.shape)


def _swapped_bytes(a: Array) -> Array:
    return a.astype(a.dtype.newbyteorder(">"))


# How an array may lie in memory; all but zero_stride keep its values.
ARRANGEMENTS: dict[str, Callable[[Array], Array]] = {
    "row": np.ascontiguousarray,
    "col": np.asfortranarray,
    "sliced": _sliced,
    "col_sliced": lambda a: _sliced(a.T.copy()).T,
    "reversed": _reversed,
    "rows_reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "step_two": _step_two,
    "misaligned": misaligned,
    "swapped_bytes": _swapped_bytes,
    "read_only": _read_only,
    "zero_stride": _zero_stride,
}


def shortening(path: Path, size: int, at: int) -> Callable[[Any], None]:
    """Return `check_map`, before whose at-th question a file is cut to so many bytes."""
    asked = itertools.count(1)

    def asking(array: Any) -> None:
        if next(asked) == at:
            os.truncate(path, size)
        memory.check_map(array)

    return asking
