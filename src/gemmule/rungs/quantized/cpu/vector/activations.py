"""Activations made ready for the products along stored rows: put in order, or rounded to 8 bits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gemmule.backends.cpu import simd
from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel, operation
from gemmule.core.rung import ACTIVATION_GROUP
from gemmule.rungs.quantized.cpu.vector.integers import quantise_block, record_bytes
from gemmule.rungs.quantized.cpu.vector.quads import (
    QUAD_COLUMNS,
    add_up_quad,
    mark_sizes,
    no_sizes,
    quad_record_bytes,
    quantise_group,
    scales_at,
)

_get = load("float32", "float32")
_put = store("float32", "float32")


@functools.cache
def place_kernel(bits: int, words: bool) -> Kernel:
    """Return ``f(column) -> int``: where the lanes' order holds a column of a block, in elements.

    words: codes of a lane come from the 16-bit words of 16 bytes, first the lower four of them.
    """
    width = 16 // bits if words else simd.codes_per_lane(bits)

    @kernel
    def place_in_words(column: int) -> int:
        word, part = column // width, column % width
        return 16 * (word // 4 % 2 * width + part) + 4 * (word // 8) + word % 4

    @kernel
    def place_in_lanes(column: int) -> int:
        return 16 * (column % width) + column // width

    return place_in_words if words else place_in_lanes


@functools.cache
def _whole_block(bits: int, words: bool, columns: int) -> Intrinsic:
    """Return ``f(x, out)``: a block's columns in the lanes' order, four lanes at a time."""
    place_of = place_kernel(bits, words).function
    width = 16 // bits if words else simd.codes_per_lane(bits)

    def emit(builder: Any, x: simd.Value, out: simd.Value) -> None:
        for low in range(0, simd.block_columns(bits), 4 * width):
            some = simd.load_vector(builder, x, "float32", 4 * low, 4 * width)
            for part in range(width):
                step, lane = divmod(place_of(low + part), 16)
                four = simd.shuffled(builder, some, some, range(part, 4 * width, width))
                simd.store_vector(builder, four, out, 64 * columns * step + 4 * lane)

    return operation(f"whole_block {bits} {words} {columns}", emit)


@functools.cache
def arrange_kernel(bits: int, columns: int = 1, *, words: bool = False) -> Kernel:
    """Return ``f(x, n, x_columns, out, panel_bytes) -> 0``: activations as `place_kernel` says.

    x: ``(x_columns, n)`` float32. out: ``(panels, blocks, codes of a lane, columns, 16)``, where
    panel p holds columns ``p * columns`` and following ones; those that do not exist are left out.
    """
    place_of, whole_block = place_kernel(bits, words), _whole_block(bits, words, columns)
    width = simd.block_columns(bits)

    @kernel
    def arrange(x: int, n: int, x_columns: int, out: int, panel_bytes: int) -> int:
        whole = n // width
        for column in range(x_columns):
            start = x + 4 * n * column
            to = out + column // columns * panel_bytes + 64 * (column % columns)
            for block in range(whole):
                whole_block(start + 4 * width * block, to + 4 * width * columns * block)
            start, to = start + 4 * width * whole, to + 4 * width * columns * whole
            left = n - width * whole
            for i in range(width if left > 0 else 0):
                _put(to, 16 * columns * (i // 16) + i % 16, np.float32(0))
            for i in range(left):
                place = place_of(i)
                _put(to, 16 * columns * (place // 16) + place % 16, _get(start, i))
        return 0

    return arrange


@functools.cache
def quantise_kernel(bits: int, columns: int = 1) -> Kernel:
    """Return ``f(x, n, x_columns, out, panel_bytes)``: activations as records of 8-bit codes.

    Like `arrange_kernel`, but out is bytes ``(panels, blocks, columns, record)`` (see `integers`)
    and need not be zero-filled. Each 32 columns share a scale, max|x| / 127. Returns not 0 where
    a value is NaN or infinite; the records are of no use then.
    """
    round_block = quantise_block(bits)
    width, record = simd.block_columns(bits), record_bytes(bits)

    @kernel
    def quantise(x: int, n: int, x_columns: int, out: int, panel_bytes: int) -> int:
        flag = np.zeros(1, np.int32)
        for column in range(x_columns):
            to = out + column // columns * panel_bytes + column % columns * record
            for block in range((n + width - 1) // width):
                low = block * width
                at = to + block * columns * record
                round_block(x + 4 * (n * column + low), n - low, at, flag.ctypes.data)
        return int(flag[0])

    return quantise


@functools.cache
def quantise_quads_kernel(vectors: int, zero: int) -> Kernel:
    """Return what `quantise_kernel` does for one column, as records of quads of a zero point."""
    round_group, add_up = quantise_group(vectors), add_up_quad(vectors, zero)
    record_size, first = quad_record_bytes(vectors), scales_at(vectors)

    @kernel
    def quantise_quads(x: int, n: int, columns: int, out: int, panel_bytes: int) -> int:
        flag, sizes = np.zeros(1, np.int32), no_sizes()
        quads = (n + QUAD_COLUMNS - 1) // QUAD_COLUMNS
        for quad in range(quads):
            record = out + quad * record_size
            for group in range(QUAD_COLUMNS // ACTIVATION_GROUP):
                column = quad * QUAD_COLUMNS + group * ACTIVATION_GROUP
                block, q = group // 4, group % 4
                planes, place = record + 128 * block + 16 * q, block * vectors
                scales = record + first + 64 * (place // 4) + 4 * (4 * q + place % 4)
                sizes = round_group(sizes, x + 4 * column, n - column, planes, scales)
        # Behind all rounding, or loads would wait for the stores of their parts.
        for quad in range(quads):
            add_up(out + quad * record_size)
        mark_sizes(sizes, flag.ctypes.data)
        return int(flag[0])

    return quantise_quads
