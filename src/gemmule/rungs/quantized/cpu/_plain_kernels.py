"""Kernels in plain loops, which take any group size, code width and float dtype.

All take addresses and a `Matrix`. Vector registers are the compiler's business here: the loops
are written so that it finds them (no index arithmetic that wraps, nibbles split by parity).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.intrinsics import enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import Pooled
from gemmule.rungs.quantized.cpu._operands import Stored, address, scale_dtype_of

_byte, _number = load("uint8", "int32"), load("int64", "int64")


class Matrix(NamedTuple):
    """Addresses and steps of a stored matrix; scale_step counts elements."""

    codes: int
    row_bytes: int
    m: int
    n: int
    scales: int
    zeros: int
    scale_step: int
    group: int


_matrix, _SIZE = unpacked_as(Matrix), len(Matrix._fields)


def matrix_of(parts: Stored) -> Matrix:
    """Return the matrix as plain kernels take it."""
    return Matrix(
        codes=address(parts.codes),
        row_bytes=parts.row_bytes,
        m=parts.m,
        n=parts.n,
        scales=address(parts.scales),
        zeros=parts.zeros_address,
        scale_step=parts.scale_step,
        group=parts.group,
    )


class Kind(NamedTuple):
    """What plain kernels are compiled for."""

    bits: int
    scale_dtype: str
    has_zeros: bool
    working: str


def kind_of(parts: Stored, working: str) -> Kind:
    """Return the kind of a matrix and of the floats it meets."""
    return Kind(parts.bits, scale_dtype_of(parts), parts.zeros is not None, working)


@functools.cache
def code_kernel(bits: int) -> Kernel:
    """Return ``f(codes, row_bytes, row, column) -> code``."""

    @kernel
    def byte_code(codes: int, row_bytes: int, row: int, column: int) -> Any:
        return _byte(codes + row * row_bytes, column)

    @kernel
    def nibble_code(codes: int, row_bytes: int, row: int, column: int) -> Any:
        pair = _byte(codes + row * row_bytes, column >> 1)
        return (pair >> (4 * (column & 1))) & 15

    return byte_code if bits == 8 else nibble_code


@functools.cache
def number_kernels(kind: Kind) -> tuple[Kernel, Kernel]:
    """Return ``scale(A, row, group)`` and ``zero(A, row, group)`` in the working dtype."""
    working = kind.working
    get = load(kind.scale_dtype, "float32")
    get_zero, to_working = load("float32", "float32"), cast_kernel(working)
    fixed = float(2 ** (kind.bits - 1))

    @kernel
    def scale(A: Matrix, row: int, group: int) -> Any:
        return to_working(get(A.scales, row * A.scale_step + group))

    @kernel
    def zero(A: Matrix, row: int, group: int) -> Any:
        return to_working(get_zero(A.zeros, row * A.scale_step + group))

    @kernel
    def fixed_zero(A: Matrix, row: int, group: int) -> Any:
        return to_working(fixed)

    return scale, zero if kind.has_zeros else fixed_zero


@functools.cache
def cast_kernel(working: str) -> Kernel:
    @kernel
    def to_float64(value: float) -> Any:
        return np.float64(value)

    @kernel
    def to_float32(value: float) -> Any:
        return np.float32(value)

    return to_float64 if working == "float64" else to_float32


@functools.cache
def loop_kernel(kind: Kind, transposed: bool) -> Kernel:
    """Return ``f(A, x, x_columns, y)``: one weight at a time, for every column of x.

    x: ``(n, x_columns)`` and y: ``(m, x_columns)`` for A as stored; the other way round if
    `transposed`. Both in the working dtype, contiguous.
    """
    code, (scale, zero) = code_kernel(kind.bits), number_kernels(kind)
    get, put, cast = (
        load(kind.working, kind.working),
        store(kind.working, kind.working),
        cast_kernel(kind.working),
    )

    @kernel
    def weight(A: Matrix, row: int, column: int) -> Any:
        group = column // A.group
        step = cast(code(A.codes, A.row_bytes, row, column)) - zero(A, row, group)
        return scale(A, row, group) * step

    @kernel
    def along(A: Matrix, x: int, x_columns: int, y: int) -> None:
        for row in range(A.m):
            for c in range(x_columns):
                total = cast(0)
                for column in range(A.n):
                    total += weight(A, row, column) * get(x, column * x_columns + c)
                put(y, row * x_columns + c, total)

    @kernel
    def across(A: Matrix, x: int, x_columns: int, y: int) -> None:
        for column in range(A.n):
            for c in range(x_columns):
                total = cast(0)
                for row in range(A.m):
                    total += weight(A, row, column) * get(x, row * x_columns + c)
                put(y, column * x_columns + c, total)

    return across if transposed else along


@functools.cache
def four_rows_kernel(kind: Kind) -> Kernel:
    """Return ``f(A, even, odd, y, first, end)`` for rows ``first .. end - 1`` of a product.

    Nibbles: even and odd hold x's even and odd columns. Bytes: even holds x, odd is not read.
    Four rows share each element of x; the last rows are done one at a time, four times over.
    """
    scale, zero = number_kernels(kind)
    segment, put, cast = (
        _segment(kind),
        store(kind.working, kind.working),
        cast_kernel(kind.working),
    )

    @kernel
    def four_rows(A: Matrix, even: int, odd: int, y: int, first: int, end: int) -> None:
        row = first
        while row < end:
            step = 1 if row + 4 <= end else 0
            r1, r2, r3 = row + step, row + 2 * step, row + 3 * step
            t0, t1, t2, t3 = cast(0), cast(0), cast(0), cast(0)
            for group, low in enumerate(range(0, A.n, A.group)):
                high = min(A.n, low + A.group)
                p0, p1, p2, p3 = segment(
                    A.codes + row * A.row_bytes,
                    step * A.row_bytes,
                    even,
                    odd,
                    low,
                    high,
                    zero(A, row, group),
                    zero(A, r1, group),
                    zero(A, r2, group),
                    zero(A, r3, group),
                )
                t0 += scale(A, row, group) * p0
                t1 += scale(A, r1, group) * p1
                t2 += scale(A, r2, group) * p2
                t3 += scale(A, r3, group) * p3
            put(y, row, t0)
            put(y, r1, t1)
            put(y, r2, t2)
            put(y, r3, t3)
            row += 4 if step == 1 else 1

    return four_rows


@functools.cache
def _segment(kind: Kind) -> Kernel:
    """Return the kernel that sums ``(code - zero) x`` over columns of one group in four rows."""
    return _segment_of_nibbles(kind) if kind.bits == 4 else _segment_of_bytes(kind)


def _segment_of_nibbles(kind: Kind) -> Kernel:
    get, cast = load(kind.working, kind.working), cast_kernel(kind.working)

    @kernel
    def nibbles(
        codes: int,
        step: int,
        even: int,
        odd: int,
        low: int,
        high: int,
        z0: float,
        z1: float,
        z2: float,
        z3: float,
    ) -> tuple[float, float, float, float]:
        c1, c2, c3 = codes + step, codes + 2 * step, codes + 3 * step
        p0, p1, p2, p3 = cast(0), cast(0), cast(0), cast(0)
        if low & 1:
            v = get(odd, low >> 1)
            p0 += (cast(_byte(codes, low >> 1) >> 4) - z0) * v
            p1 += (cast(_byte(c1, low >> 1) >> 4) - z1) * v
            p2 += (cast(_byte(c2, low >> 1) >> 4) - z2) * v
            p3 += (cast(_byte(c3, low >> 1) >> 4) - z3) * v
        for j in range((low + 1) >> 1, high >> 1):
            u, v = get(even, j), get(odd, j)
            b0, b1, b2, b3 = _byte(codes, j), _byte(c1, j), _byte(c2, j), _byte(c3, j)
            p0 += (cast(b0 & 15) - z0) * u + (cast(b0 >> 4) - z0) * v
            p1 += (cast(b1 & 15) - z1) * u + (cast(b1 >> 4) - z1) * v
            p2 += (cast(b2 & 15) - z2) * u + (cast(b2 >> 4) - z2) * v
            p3 += (cast(b3 & 15) - z3) * u + (cast(b3 >> 4) - z3) * v
        if high & 1:
            u = get(even, high >> 1)
            p0 += (cast(_byte(codes, high >> 1) & 15) - z0) * u
            p1 += (cast(_byte(c1, high >> 1) & 15) - z1) * u
            p2 += (cast(_byte(c2, high >> 1) & 15) - z2) * u
            p3 += (cast(_byte(c3, high >> 1) & 15) - z3) * u
        return p0, p1, p2, p3

    return nibbles


def _segment_of_bytes(kind: Kind) -> Kernel:
    get, cast = load(kind.working, kind.working), cast_kernel(kind.working)

    @kernel
    def bytes_(
        codes: int,
        step: int,
        even: int,
        odd: int,
        low: int,
        high: int,
        z0: float,
        z1: float,
        z2: float,
        z3: float,
    ) -> tuple[float, float, float, float]:
        c1, c2, c3 = codes + step, codes + 2 * step, codes + 3 * step
        p0, p1, p2, p3 = cast(0), cast(0), cast(0), cast(0)
        for j in range(low, high):
            v = get(even, j)
            p0 += (cast(_byte(codes, j)) - z0) * v
            p1 += (cast(_byte(c1, j)) - z1) * v
            p2 += (cast(_byte(c2, j)) - z2) * v
            p3 += (cast(_byte(c3, j)) - z3) * v
        return p0, p1, p2, p3

    return bytes_


@functools.cache
def four_rows_tasks(kind: Kind) -> Pooled:
    """Return `four_rows_kernel` in tasks: ``f(count, *A, even, odd, y, rows_per_task)``."""
    rows = four_rows_kernel(kind)
    return Pooled(_four_rows_task, lambda: rows.entry(Matrix, *[int] * 5))


@kernel
def _four_rows_task(at: int, number: int) -> None:
    A, rows_per_task, rows = _matrix(at), _number(at, _SIZE + 3), _number(at, _SIZE + 4)
    even, odd, y = _number(at, _SIZE), _number(at, _SIZE + 1), _number(at, _SIZE + 2)
    low = number * rows_per_task
    enter(rows, (A, even, odd, y, low, min(A.m, low + rows_per_task)))
