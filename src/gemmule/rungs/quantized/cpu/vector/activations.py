"""Activations made ready for the products along stored rows: put in order, or rounded to 8 bits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gemmule.backends.cpu import simd
from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel
from gemmule.rungs.quantized.cpu.vector.integers import (
    ACTIVATION_GROUP,
    planes,
    quantise_block,
    record_bytes,
)
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
_put_byte = store("int8", "int32")
_put_word = store("int32", "int32")


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
def _whole_block(bits: int, words: bool) -> Intrinsic:
    """Return ``f(x, out)``: a block's columns in the lanes' order, four lanes at a time."""
    place_of = place_kernel(bits, words).function
    width = 16 // bits if words else simd.codes_per_lane(bits)

    def emit(builder: Any, x: simd.Value, out: simd.Value) -> None:
        for low in range(0, simd.block_columns(bits), 4 * width):
            some = simd.load_vector(builder, x, "float32", 4 * low, 4 * width)
            for part in range(width):
                lanes = range(part, 4 * width, width)
                four = simd.shuffled(builder, some, some, lanes)
                simd.store_vector(builder, four, out, 4 * place_of(low + part))

    return simd.operation(f"whole_block {bits} {words}", simd.void, "ii", emit)


@functools.cache
def arrange_vector_kernel(bits: int, words: bool) -> Kernel:
    """Return ``f(x, n, out) -> 0``: one column's activations as `place_kernel` says."""
    place_of, whole_block = place_kernel(bits, words), _whole_block(bits, words)
    columns = simd.block_columns(bits)

    @kernel
    def arrange_vector(x: int, n: int, out: int) -> int:
        whole = n // columns * columns
        for low in range(0, whole, columns):
            whole_block(x + 4 * low, out + 4 * low)
        for column in range(n - whole):
            _put(out + 4 * whole, place_of(column), _get(x, whole + column))
        return 0

    return arrange_vector


@functools.cache
def arrange_kernel(bits: int, columns: int) -> Kernel:
    """Return ``f(x, n, x_columns, out, panel_bytes) -> 0``: activations in the lanes' order.

    x: ``(n, x_columns)`` float32, contiguous. out: zero-filled, ``(panels, blocks, codes of a lane,
    columns, 16)``, where panel p holds columns ``p * columns`` and following ones.
    """
    width = simd.codes_per_lane(bits)

    @kernel
    def arrange(x: int, n: int, x_columns: int, out: int, panel_bytes: int) -> int:
        for column in range(x_columns):
            panel, c = column // columns, column % columns
            for block in range((n + 16 * width - 1) // (16 * width)):
                base = out + panel * panel_bytes + 64 * (block * width * columns + c)
                for k in range(width):
                    j = 16 * width * block + k
                    for lane in range(min(16, (n - j + width - 1) // width)):
                        value = _get(x, (j + width * lane) * x_columns + column)
                        _put(base, 16 * columns * k + lane, value)
        return 0

    return arrange


@functools.cache
def quantise_vector_kernel(bits: int) -> Kernel:
    """Return ``f(x, n, out) -> int``: `quantise_kernel` for one column, in vector registers.

    Writes every byte of the records, so out need not be zero-filled.
    """
    round_block = quantise_block(bits)
    columns, record = simd.block_columns(bits), record_bytes(bits)

    @kernel
    def quantise_vector(x: int, n: int, out: int) -> int:
        flag = np.zeros(1, np.int32)
        for block in range((n + columns - 1) // columns):
            low = block * columns
            round_block(x + 4 * low, n - low, out + block * record, flag.ctypes.data)
        return int(flag[0])

    return quantise_vector


@functools.cache
def quantise_quads_kernel(vectors: int) -> Kernel:
    """Return ``f(x, n, out) -> int``: like `quantise_vector_kernel`, as records of quads."""
    round_group, add_up = quantise_group(vectors), add_up_quad(vectors)
    record_size, first = quad_record_bytes(vectors), scales_at(vectors)

    @kernel
    def quantise_quads(x: int, n: int, out: int) -> int:
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


@functools.cache
def quantise_kernel(bits: int, columns: int) -> Kernel:
    """Return ``f(x, n, x_columns, out, panel_bytes)``: activations as records of 8-bit codes.

    Like `arrange_kernel`, but out is a zero-filled byte array ``(panels, blocks, columns, record)``
    (see `integers`). Each 32 columns share a scale, max|x| / 127. Returns how many values are NaN
    or infinite; the records are of no use if any is.
    """
    width = simd.codes_per_lane(bits)
    sides, record = planes(bits), record_bytes(bits)

    @kernel
    def quantise(x: int, n: int, x_columns: int, out: int, panel_bytes: int) -> int:
        bad = 0
        for column in range(x_columns):
            panel, c = column // columns, column % columns
            for low in range(0, n, ACTIVATION_GROUP):
                high = min(n, low + ACTIVATION_GROUP)
                largest = abs(_get(x, low * x_columns + column))
                for j in range(low, high):
                    value = abs(_get(x, j * x_columns + column))
                    bad += 0 if value <= 3.4028234663852886e38 else 1
                    largest = max(largest, value)
                scale = np.float32(largest / np.float32(127))
                block, lane = low // (16 * width), low // width % 16
                place = out + panel * panel_bytes + (block * columns + c) * record
                for lane_low in range(low, high, width):
                    total = 0
                    for j in range(lane_low, min(high, lane_low + width)):
                        value = _get(x, j * x_columns + column)
                        ratio = value / scale if scale > 0 else np.float32(0)
                        code = int(
                            np.rint(min(127, max(-127, ratio)))
                        )  # subnormal scales are rough
                        total += code
                        side, byte = j % sides, 4 * lane + j % width // sides
                        _put_byte(place + 64 * side, byte, code)
                    _put_word(place + 64 * sides, lane, total)
                    _put(place + 64 * (sides + 1), lane, scale)
                    lane += 1
        return bad

    return quantise
