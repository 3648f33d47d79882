"""BLAS's matrix-vector and matrix products as jobs: NumPy's own OpenBLAS, called by address."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gemmule.backends.cpu import blas_threads, ir
from gemmule.backends.cpu.atomics import unpacked
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import llvm_type
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel, unavailable

_LETTERS = {"float32": "s", "float64": "d"}
_ROW_MAJOR, _COLUMN_MAJOR, _PLAIN, _TRANSPOSED = 101, 102, 111, 112


def _ahead(array: np.ndarray[Any, Any]) -> tuple[bool, int] | None:
    """Return whether a matrix lies by rows, and its leading dimension; None: BLAS has no such."""
    item = array.itemsize
    for by_rows, matrix in ((True, array), (False, array.T)):
        step, unit = matrix.strides
        if unit == item and step % item == 0 and step >= item * matrix.shape[1]:
            return by_rows, step // item
    return None


def _routine(name: str) -> int | None:
    """Return the address of a routine, where it is known and a kernel can call it."""
    return None if unavailable() is not None else blas_threads.routine(name)


def gemv(A: np.ndarray[Any, Any]) -> Job | None:
    """Return the product of matrices like A with a vector as it lies, or None: not by address."""
    letter, ahead = _LETTERS.get(A.dtype.name), _ahead(A)
    if letter is None or ahead is None or min(A.shape) < 2:
        return None
    address = _routine(f"cblas_{letter}gemv")
    if address is None:
        return None
    order = _ROW_MAJOR if ahead[0] else _COLUMN_MAJOR
    words = (address, order, _PLAIN, *A.shape, ahead[1])
    return Job(_gemv(A.dtype.name).address(4), words)


def gemm(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any]) -> Job | None:
    """Return the product of matrices like A and B, or None: not by address.

    A matrix with itself is undone: NumPy knows a transpose, and computes half of the product.
    """
    letter, ahead_a, ahead_b = _LETTERS.get(A.dtype.name), _ahead(A), _ahead(B)
    if letter is None or ahead_a is None or ahead_b is None or min(*A.shape, *B.shape) < 2:
        return None
    address = _routine(f"cblas_{letter}gemm")
    if address is None:
        return None
    ways = [_PLAIN if ahead[0] else _TRANSPOSED for ahead in (ahead_a, ahead_b)]
    sizes = A.shape[0], B.shape[1], A.shape[1]
    words = (address, *ways, *sizes, ahead_a[1], ahead_b[1], B.shape[1])
    return Job(_gemm(A.dtype.name).address(4), words)


@functools.cache
def _gemv(dtype: str) -> Kernel:
    load_words, call = unpacked(6), _calling(dtype, "wwwwfwwwwfww")

    @kernel
    def job(at: int, A: int, x: int, y: int) -> int:
        routine, order, way, m, n, ahead = load_words(at)
        call(routine, (order, way, m, n, A, ahead, x, 1, y, 1))
        return 0

    return job


@functools.cache
def _gemm(dtype: str) -> Kernel:
    load_words, call = unpacked(9), _calling(dtype, "wwwwwwfwwwwfww")
    by_rows = _ROW_MAJOR

    @kernel
    def job(at: int, A: int, B: int, C: int) -> int:
        routine, way_a, way_b, m, n, k, ahead_a, ahead_b, ahead = load_words(at)
        if A == B:
            return 1
        call(routine, (by_rows, way_a, way_b, m, n, k, A, ahead_a, B, ahead_b, C, ahead))
        return 0

    return job


@functools.cache
def _calling(dtype: str, kinds: str) -> Intrinsic:
    """Return ``f(routine, words)``: call a C function, with 1 and 0 for its two numbers.

    kinds: of its arguments, ``w`` a word and ``f`` a number of the dtype. A routine that takes
    narrower integers finds them in the lower half of each word.
    """

    def emit(builder: Any, routine: Any, words: Any) -> None:
        number = llvm_type(dtype)
        arguments, left, numbers = [], iter(words), iter((1.0, 0.0))
        for one in kinds:
            arguments.append(number(next(numbers)) if one == "f" else next(left))
        kind = ir.FunctionType(ir.VoidType(), [one.type for one in arguments])
        builder.call(builder.inttoptr(routine, kind.as_pointer()), arguments)

    return Intrinsic(emit, f"{__name__} {dtype} {kinds}")
