"""Plain kernels that decode rows to floats, or spread them over the results."""

from __future__ import annotations

import functools

from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Kernel, kernel, prange
from gemmule.rungs.quantized.cpu._plain_kernels import Kind, Matrix, cast_kernel, number_kernels

_byte = load("uint8", "int32")


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
def decode_threaded_kernel(kind: Kind) -> Kernel:
    """Return ``f(A, first, end, out, row_size)``: like `decode_kernel`, rows on all threads."""
    serial = decode_kernel(kind)

    @kernel(parallel=True)
    def threaded(A: Matrix, first: int, end: int, out: int, row_size: int) -> None:
        tasks = (end - first + 7) // 8
        for task in prange(tasks):
            low = first + 8 * task
            serial(A, low, min(end, low + 8), out + (low - first) * row_size)

    return threaded


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


@functools.cache
def panel_threaded_kernel(kind: Kind) -> Kernel:
    """Return ``f(A, x, even, odd, part_size, parts)``: rows in `parts` shares, one y for each."""
    serial = panel_kernel(kind)

    @kernel(parallel=True)
    def threaded(A: Matrix, x: int, even: int, odd: int, part_size: int, parts: int) -> None:
        for part in prange(parts):
            low, high = A.m * part // parts, A.m * (part + 1) // parts
            serial(A, x, even + part * part_size, odd + part * part_size, low, high)

    return threaded
