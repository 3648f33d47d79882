"""Micro-kernels in plain loops, which take any group size, code width and float dtype.

Vector registers are the compiler's business here: the loops are written so that it finds them (no
index arithmetic that wraps, nibbles split by parity).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.core.problem import FLOAT4, ITEMSIZE
from gemmule.rungs.quantized.cpu._operands import Stored, scale_dtype_of
from gemmule.rungs.quantized.cpu._product import Product, Rows

_byte = load("uint8", "int32")
_TWICE = 0xC8643210  # the doubles of 4-bit floats, without their signs, as its eight nibbles


class Kind(NamedTuple):
    """What plain kernels are compiled for: `working` is the dtype of x, y and all sums."""

    bits: int
    scale_dtype: str
    has_zeros: bool
    working: str


def kind_of(parts: Stored, working: str) -> Kind:
    """Return the kind of a matrix and of the floats it meets."""
    return Kind(parts.bits, scale_dtype_of(parts), parts.zeros is not None, working)


@functools.cache
def number_kernels(kind: Kind) -> tuple[Kernel, Kernel]:
    """Return ``scale(A, row, group)`` and ``zero(A, row, group)`` in the working dtype."""
    get, get_zero = load(kind.scale_dtype, "float32"), load("float32", "float32")
    cast, fixed = cast_kernel(kind.working), float(2 ** (kind.bits - 1))

    @kernel
    def scale(A: Product, row: int, group: int) -> Any:
        return cast(get(A.scales, row * A.scale_step + group))

    @kernel
    def zero(A: Product, row: int, group: int) -> Any:
        return cast(get_zero(A.zeros, row * A.scale_step + group))

    @kernel
    def fixed_zero(A: Product, row: int, group: int) -> Any:
        return cast(fixed)

    return scale, zero if kind.has_zeros else fixed_zero


@functools.cache
def value_kernel(kind: Kind) -> Kernel:
    """Return ``f(code, zero)``: code less zero point; of codes that are floats, what they mean."""
    cast = cast_kernel(kind.working)

    @kernel
    def of_integer(code: int, zero: float) -> Any:
        return cast(code) - zero

    @kernel
    def of_float(code: int, zero: float) -> Any:
        twice = _TWICE >> 4 * (code & 7) & 15
        return cast(twice * (1 - (code >> 3) * 2)) * cast(0.5)

    return of_float if kind.scale_dtype in FLOAT4 else of_integer


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
    """Return a micro-kernel that takes one weight at a time, for every column of x.

    x: ``(n, columns)`` and y: ``(m, columns)`` for A as stored; the other way round, and `first`
    and `end` columns, if `transposed`. Both in the working dtype, contiguous.
    """
    scale, zero = number_kernels(kind)
    get, put = load(kind.working, kind.working), store(kind.working, kind.working)
    cast, value, nibbles = cast_kernel(kind.working), value_kernel(kind), kind.bits == 4

    @kernel
    def weight(A: Product, row: int, column: int) -> Any:
        group, codes = column // A.group, A.codes + row * A.row_bytes
        if nibbles:
            code = (_byte(codes, column >> 1) >> (4 * (column & 1))) & 15
        else:
            code = _byte(codes, column)
        return scale(A, row, group) * value(code, zero(A, row, group))

    @kernel
    def loop(A: Product, first: int, end: int) -> None:
        inner = A.m if transposed else A.n
        for i in range(first, end):
            for c in range(A.columns):
                total = cast(0)
                for j in range(inner):
                    w = weight(A, j, i) if transposed else weight(A, i, j)
                    total += w * get(A.x, j * A.columns + c)
                put(A.y, i * A.columns + c, total)

    return loop


@functools.cache
def four_rows_kernel(kind: Kind) -> Kernel:
    """Return the micro-kernel of one vector whose rows share each element of x, four at a time.

    Nibbles: x holds its even columns and, x_step bytes on, its odd ones. Bytes: x as it is. The
    last rows are done one at a time, four times over.
    """
    scale, zero = number_kernels(kind)
    segment, put = _segment(kind), store(kind.working, kind.working)
    cast = cast_kernel(kind.working)

    @kernel
    def four_rows(A: Product, first: int, end: int) -> None:
        row = first
        while row < end:
            step = 1 if row + 4 <= end else 0
            r1, r2, r3 = row + step, row + 2 * step, row + 3 * step
            codes, code_step = A.codes + row * A.row_bytes, step * A.row_bytes
            t0, t1, t2, t3 = cast(0), cast(0), cast(0), cast(0)
            for group, low in enumerate(range(0, A.n, A.group)):
                high = min(A.n, low + A.group)
                z0, z1 = zero(A, row, group), zero(A, r1, group)
                zeros = z0, z1, zero(A, r2, group), zero(A, r3, group)
                p0, p1, p2, p3 = segment(codes, code_step, A.x, A.x + A.x_step, low, high, zeros)
                t0 += scale(A, row, group) * p0
                t1 += scale(A, r1, group) * p1
                t2 += scale(A, r2, group) * p2
                t3 += scale(A, r3, group) * p3
            put(A.y, row, t0)
            put(A.y, r1, t1)
            put(A.y, r2, t2)
            put(A.y, r3, t3)
            row += 4 if step == 1 else 1

    return four_rows


def _segment(kind: Kind) -> Kernel:
    """Return what sums ``(code - zero) x`` over columns ``low .. high - 1`` of a group, by rows."""
    get, cast, value = (
        load(kind.working, kind.working),
        cast_kernel(kind.working),
        value_kernel(kind),
    )
    nibbles, sides = kind.bits == 4, 8 // kind.bits

    @kernel
    def of_pair(byte: int, zero: float, u: float, v: float) -> Any:
        return value(byte & 15, zero) * u + value(byte >> 4, zero) * v

    @kernel
    def of_byte(byte: int, zero: float, u: float, v: float) -> Any:
        return value(byte, zero) * u

    products = of_pair if nibbles else of_byte

    @kernel
    def segment(
        codes: int, step: int, even: int, odd: int, low: int, high: int, zeros: Any
    ) -> tuple[float, float, float, float]:
        c1, c2, c3 = codes + step, codes + 2 * step, codes + 3 * step
        z0, z1, z2, z3 = zeros
        p0, p1, p2, p3 = cast(0), cast(0), cast(0), cast(0)
        if nibbles and low & 1:
            j, v = low >> 1, get(odd, low >> 1)
            p0 += value(_byte(codes, j) >> 4, z0) * v
            p1 += value(_byte(c1, j) >> 4, z1) * v
            p2 += value(_byte(c2, j) >> 4, z2) * v
            p3 += value(_byte(c3, j) >> 4, z3) * v
        for j in range((low + sides - 1) // sides, high // sides):
            u, v = get(even, j), get(odd, j)
            p0 += products(_byte(codes, j), z0, u, v)
            p1 += products(_byte(c1, j), z1, u, v)
            p2 += products(_byte(c2, j), z2, u, v)
            p3 += products(_byte(c3, j), z3, u, v)
        if nibbles and high & 1:
            j, u = high >> 1, get(even, high >> 1)
            p0 += value(_byte(codes, j) & 15, z0) * u
            p1 += value(_byte(c1, j) & 15, z1) * u
            p2 += value(_byte(c2, j) & 15, z2) * u
            p3 += value(_byte(c3, j) & 15, z3) * u
        return p0, p1, p2, p3

    return segment


def _weights(kind: Kind, *, add: bool) -> Kernel:
    """Return ``f(codes, low, high, s, z, to, odd)``: columns of one group, ``s * (code - z)``.

    They are written to `to` in their order; or added to what is there, of nibbles even columns side
    by side, and odd ones at `odd`.
    """
    get, put = load(kind.working, kind.working), store(kind.working, kind.working)
    value, nibbles = value_kernel(kind), kind.bits == 4

    @kernel
    def put_even(to: int, j: int, weight: float) -> None:
        if add:
            put(to, j, get(to, j) + weight)
        else:
            put(to, 2 * j if nibbles else j, weight)

    @kernel
    def put_odd(to: int, odd: int, j: int, weight: float) -> None:
        if add:
            put(odd, j, get(odd, j) + weight)
        else:
            put(to, 2 * j + 1, weight)

    @kernel
    def weights(codes: int, low: int, high: int, s: float, z: float, to: int, odd: int) -> None:
        if nibbles:
            if low & 1:
                put_odd(to, odd, low >> 1, s * value(_byte(codes, low >> 1) >> 4, z))
            for j in range((low + 1) >> 1, high >> 1):
                pair = _byte(codes, j)
                put_even(to, j, s * value(pair & 15, z))
                put_odd(to, odd, j, s * value(pair >> 4, z))
            if high & 1:
                put_even(to, high >> 1, s * value(_byte(codes, high >> 1) & 15, z))
        else:
            for j in range(low, high):
                put_even(to, j, s * value(_byte(codes, j), z))

    return weights


@functools.cache
def decode_rows(kind: Kind) -> Rows:
    """Return the micro-kernel that writes rows as weights, contiguous, to y."""
    (scale, zero), weights = number_kernels(kind), _weights(kind, add=False)
    item = ITEMSIZE[kind.working]

    @kernel
    def decode(A: Product, first: int, end: int) -> None:
        for row in range(first, end):
            codes, to = A.codes + row * A.row_bytes, A.y + row * A.n * item
            for group, low in enumerate(range(0, A.n, A.group)):
                s, z = scale(A, row, group), zero(A, row, group)
                weights(codes, low, min(A.n, low + A.group), s, z, to, 0)

    return Rows(decode)


@functools.cache
def panels_kernel(kind: Kind) -> Kernel:
    """Return the micro-kernel across the rows: a block of results stays in L1 as rows are added.

    Of nibbles a block's even results come before its odd ones.
    """
    (scale, zero), weights = number_kernels(kind), _weights(kind, add=True)
    get, item, sides = load(kind.working, kind.working), ITEMSIZE[kind.working], 8 // kind.bits

    @kernel
    def panels(A: Product, first: int, end: int, sums: int, left: int, right: int) -> None:
        width = A.x_step // item
        for block in range(left, right):
            start, stop = block * width, min(A.n, (block + 1) * width)
            even = sums + block * A.x_step - start // sides * item
            odd = even + A.x_step // 2
            for row in range(first, end):
                v, low = get(A.x, row), start
                while low < stop:
                    group = low // A.group
                    high = min(stop, (group + 1) * A.group)
                    s, z = scale(A, row, group) * v, zero(A, row, group)
                    weights(A.codes + row * A.row_bytes, low, high, s, z, even, odd)
                    low = high

    return panels


@functools.cache
def results_in_order(kind: Kind) -> Kernel:
    """Return ``f(sums, count, step, y)``: write `count` results of a block of `step` bytes to y."""
    get, put = load(kind.working, kind.working), store(kind.working, kind.working)
    item, sides = ITEMSIZE[kind.working], 8 // kind.bits

    @kernel
    def in_order(sums: int, count: int, step: int, y: int) -> None:
        for side in range(sides):
            apart, to = sums + side * step // 2, y + side * item
            for i in range((count - side + sides - 1) // sides):
                put(to, i * sides, get(apart, i))

    return in_order
