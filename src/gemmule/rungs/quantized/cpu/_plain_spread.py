"""Plain kernels that decode rows to floats, or spread them over the results."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import packed, unpacked_as
from gemmule.backends.cpu.intrinsics import enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import Pooled
from gemmule.backends.cpu.shares import run_shares
from gemmule.core.problem import ITEMSIZE
from gemmule.rungs.quantized.cpu._plain_kernels import Kind, Matrix, cast_kernel, number_kernels

_byte, _number = load("uint8", "int32"), load("int64", "int64")
_put = store("float32", "float32")
_matrix, _SIZE = unpacked_as(Matrix), len(Matrix._fields)
# Columns whose results one share joins, and columns of all parts that the caller joins alone.
JOIN_COLUMNS = 2048
JOIN_ALONE = 65536


@functools.cache
def decode_kernel(kind: Kind) -> Kernel:
    """Return ``f(A, first, end, out)``: rows ``first .. end - 1`` as weights, contiguous."""
    scale, zero = number_kernels(kind)
    put, cast, is_nibbles = (
        store(kind.working, kind.working),
        cast_kernel(kind.working),
        kind.bits == 4,
    )

    @kernel
    def decode(A: Matrix, first: int, end: int, out: int) -> None:
        for row in range(first, end):
            codes, to = A.codes + row * A.row_bytes, (row - first) * A.n
            for group, low in enumerate(range(0, A.n, A.group)):
                high = min(A.n, low + A.group)
                s, z = scale(A, row, group), zero(A, row, group)
                if is_nibbles:
                    if low & 1:
                        put(out, to + low, s * (cast(_byte(codes, low >> 1) >> 4) - z))
                    for j in range((low + 1) >> 1, high >> 1):
                        pair = _byte(codes, j)
                        put(out, to + 2 * j, s * (cast(pair & 15) - z))
                        put(out, to + 2 * j + 1, s * (cast(pair >> 4) - z))
                    if high & 1:
                        put(out, to + high - 1, s * (cast(_byte(codes, high >> 1) & 15) - z))
                else:
                    for j in range(low, high):
                        put(out, to + j, s * (cast(_byte(codes, j)) - z))

    return decode


@functools.cache
def decode_tasks(kind: Kind) -> Pooled:
    """Return `decode_kernel` in tasks of 8 rows: ``f(count, *A, first, end, out, row_size)``."""
    decode = decode_kernel(kind)
    return Pooled(_decode_task, lambda: decode.entry(Matrix, int, int, int))


@kernel
def _decode_task(at: int, number: int) -> None:
    A, first, end = _matrix(at), _number(at, _SIZE), _number(at, _SIZE + 1)
    out, row_size, decode = _number(at, _SIZE + 2), _number(at, _SIZE + 3), _number(at, _SIZE + 4)
    low = first + 8 * number
    enter(decode, (A, low, min(end, low + 8), out + (low - first) * row_size))


@functools.cache
def panel_kernel(kind: Kind) -> Kernel:
    """Return ``f(A, x, even, odd, first, end)``: add rows ``first .. end - 1`` times x to y.

    y in working dtype: even and odd results apart for nibbles, all in `even` for bytes. Panels of
    columns small enough for L1 are swept row by row, so y is read and written there.
    """
    scale, zero = number_kernels(kind)
    get, put, cast = (
        load(kind.working, kind.working),
        store(kind.working, kind.working),
        cast_kernel(kind.working),
    )
    is_nibbles, width = kind.bits == 4, 4096

    @kernel
    def spread(A: Matrix, row: int, low: int, high: int, v: float, even: int, odd: int) -> None:
        codes = A.codes + row * A.row_bytes
        s, z = scale(A, row, low // A.group) * v, zero(A, row, low // A.group)
        if is_nibbles:
            if low & 1:
                b = cast(_byte(codes, low >> 1) >> 4)
                put(odd, low >> 1, get(odd, low >> 1) + s * (b - z))
            for j in range((low + 1) >> 1, high >> 1):
                pair = _byte(codes, j)
                put(even, j, get(even, j) + s * (cast(pair & 15) - z))
                put(odd, j, get(odd, j) + s * (cast(pair >> 4) - z))
            if high & 1:
                b = cast(_byte(codes, high >> 1) & 15)
                put(even, high >> 1, get(even, high >> 1) + s * (b - z))
        else:
            for j in range(low, high):
                put(even, j, get(even, j) + s * (cast(_byte(codes, j)) - z))

    @kernel
    def panels(A: Matrix, x: int, even: int, odd: int, first: int, end: int) -> None:
        for start in range(0, A.n, width):
            stop = min(A.n, start + width)
            for row in range(first, end):
                low = start
                while low < stop:
                    high = min(stop, (low // A.group + 1) * A.group)
                    spread(A, row, low, high, get(x, row), even, odd)
                    low = high

    return panels


class Spread(NamedTuple):
    """The product across the rows, and the addresses of its two steps in shares.

    product: (pool, helpers, share, join, *A, x, y, room, parts, *own); room: for the parts'
    results, each with its even columns before its odd ones, in whole columns; own: what the share
    is told of the kind.
    """

    product: Kernel
    share: int
    join: int
    own: tuple[int, int, int]


@functools.cache
def spread_kernels(kind: Kind) -> Spread:
    """Return the product of one kind of matrix, in one call from Python."""
    load_matrix, size = _matrix, _SIZE
    get, put = load(kind.working, kind.working), store(kind.working, kind.working)
    item, sides = ITEMSIZE[kind.working], 8 // kind.bits

    @kernel
    def join(at: int, number: int) -> None:
        A, y = load_matrix(at), _number(at, size + 1)
        room, parts = _number(at, size + 2), _number(at, size + 3)
        half = (A.n + sides - 1) // sides
        low, high = number * JOIN_COLUMNS, min((number + 1) * JOIN_COLUMNS, half)
        for side in range(sides):
            sums = room + side * half * item
            for part in range(1, parts):
                more = sums + part * sides * half * item
                for i in range(low, high):
                    put(sums, i, get(sums, i) + get(more, i))
            to = y + side * item
            for i in range(low, min(high, (A.n - side + sides - 1) // sides)):
                put(to, i * sides, get(sums, i))

    @kernel
    def product(pool: int, helpers: int, share_at: int, join_at: int, *words: int) -> None:
        at = packed(words)
        A, parts = load_matrix(at), _number(at, size + 3)
        run_shares(pool, helpers, share_at, at, parts)
        half = (A.n + sides - 1) // sides
        joins = (half + JOIN_COLUMNS - 1) // JOIN_COLUMNS
        run_shares(pool, helpers if parts * A.n > JOIN_ALONE else 0, join_at, at, joins)

    panels = panel_kernel(kind).entry(Matrix, *[int] * 5)
    return Spread(product, _share.address(2), join.address(2), (panels, sides, item))


@kernel
def _share(at: int, part: int) -> None:
    A, x = _matrix(at), _number(at, _SIZE)
    room, parts = _number(at, _SIZE + 2), _number(at, _SIZE + 3)
    panels, sides, item = _number(at, _SIZE + 4), _number(at, _SIZE + 5), _number(at, _SIZE + 6)
    half = (A.n + sides - 1) // sides
    sums = room + part * sides * half * item
    for i in range(sides * half * (item // 4)):
        _put(sums, i, np.float32(0))
    low, high = A.m * part // parts, A.m * (part + 1) // parts
    enter(panels, (A, x, sums, sums + half * item if sides == 2 else sums, low, high))
