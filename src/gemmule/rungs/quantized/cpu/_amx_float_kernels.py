"""Products of 48 rows with float activations in tile registers: the loops around `_amx_bfloat16`.

Tiles take subnormal numbers for zeros, and a sum of large products may overflow before it meets a
small scale. So x is multiplied by a power of two first, such that no piece of it is subnormal and
no sum overflows; sums are multiplied by its inverse.
"""

from __future__ import annotations

import functools

import numpy as np

from gemmule.backends.intrinsics import load, store
from gemmule.backends.jit import Kernel, kernel
from gemmule.rungs.quantized.cpu import _amx_bfloat16 as ops
from gemmule.rungs.quantized.cpu._amx import (
    TILE_BYTES,
    TILE_ROWS,
    AmxJob,
    configured,
    put_rows,
    released,
)
from gemmule.rungs.quantized.cpu._amx_bfloat16 import BLOCK_ROWS, BLOCKS, TABLE_BYTES
from gemmule.rungs.quantized.cpu._simd import LANES
from gemmule.rungs.quantized.cpu._tile_kernels import TileKernels, in_tasks
from gemmule.rungs.quantized.cpu._tile_ops import chunk_columns

_get = load("float32", "float32")
_put = store("float32", "float32")
_put_long = store("int64", "int64")
_get_word = load("int32", "int32")

# Numba takes names of this module only.
_CODES, _ROW_STEP, _TABLE, _LAST, _BYTES = ops.CODES, ops.ROW_STEP, ops.TABLE, ops.LAST, ops.BYTES
_WEIGHTS, _X, _LINES, _LINE_STEP = ops.WEIGHTS, ops.X, ops.LINES, ops.LINE_STEP
_SUMS, _SUMS_OF_X, _FACTOR, _TOTALS = ops.SUMS, ops.SUMS_OF_X, ops.FACTOR, ops.TOTALS
_WHOLE, _SCALES, _RESTS = ops.WHOLE, ops.SCALES, ops.RESTS

# Sections of a task's memory: weights and sums of a chunk, frame, totals; then come the tables.
_SUMS_AT = ops.WEIGHTS_BYTES
_FRAME_AT = _SUMS_AT + ops.SUMS_BYTES
_TOTALS_AT = _FRAME_AT + ops.FRAME_BYTES
_TOTALS_BYTES = BLOCKS * TILE_BYTES
_TABLES_STEP = BLOCKS * TABLE_BYTES


@functools.cache
def _tables_kernel(bits: int, scale_dtype: str, has_zeros: bool) -> Kernel:
    """Return ``f(job, tables, row, last)``: scales and zero points of 48 rows, group by group.

    A zero point becomes the nearest code and the rest, so that neither term of
    ``(code - whole) + (whole - zero)`` is more than twice as large as their sum.
    """
    scale, by_look_up = load(scale_dtype, "float32"), bits == 4
    highest = np.float32(2**bits - 1)

    @kernel
    def fill(job: AmxJob, tables: int, row: int, last: int) -> None:
        for i in range(BLOCK_ROWS):
            start = (row + min(i, last)) * job.scale_step
            at, lane = tables + i // TILE_ROWS * TABLE_BYTES, i % TILE_ROWS
            for group in range(job.groups):
                table = at + group * _TABLES_STEP
                _put(table + _SCALES, lane, scale(job.scales, start + group))
                if has_zeros:
                    zero = _get(job.zeros, start + group)
                    within = min(max(zero, np.float32(0)), highest)
                    whole = np.floor(within + np.float32(0.5))
                    _put(table + _RESTS, lane, whole - zero)
                    if by_look_up:
                        _put_long(table + _WHOLE, lane, job.window + 2 * (15 - int(whole)))
                    else:
                        _put(table + _WHOLE, lane, whole)

    return fill


@functools.cache
def float_register_kernels(
    bits: int, pieces: int, scale_dtype: str, has_zeros: bool
) -> TileKernels:
    """Return the kernels for one kind of matrix and of activations."""
    configure, release, put = configured(*ops.SHAPES), released(), put_rows
    decode, decode_edge = (ops.decode_chunk(bits, has_zeros, whole) for whole in (True, False))
    multiply, scale_up = ops.multiply_chunk(bits, pieces), ops.scale_sums(has_zeros)
    fill = _tables_kernel(bits, scale_dtype, has_zeros)
    chunk_bytes_of_x = ops.x_bytes(bits, pieces)

    @kernel
    def add_chunk(job: AmxJob, work: int, tables: int, row: int, last: int, chunk: int) -> None:
        frame, count = work + _FRAME_AT, job.row_bytes - 64 * chunk
        _put_long(frame, _CODES, job.codes + row * job.row_bytes + 64 * chunk)
        _put_long(frame, _BYTES, count)
        _put_long(frame, _TABLE, tables + chunk // job.chunks_per_group * _TABLES_STEP)
        below = job.codes + (row + BLOCK_ROWS) * job.row_bytes
        _put_long(frame, _LINES, below + chunk * job.line_on)
        if last == BLOCK_ROWS - 1 and count >= 64:
            decode(frame)
        else:
            decode_edge(frame)
        for panel in range((job.columns + LANES - 1) // LANES):
            x = job.x + chunk * chunk_bytes_of_x + panel * job.panel_bytes
            _put_long(frame, _X, x)
            _put_long(frame, _SUMS_OF_X, x + chunk_bytes_of_x - 64)
            _put_long(frame, _TOTALS, work + _TOTALS_AT + panel * _TOTALS_BYTES)
            multiply(frame)
            scale_up(frame)

    @kernel
    def tiles(job: AmxJob, first: int, end: int) -> None:
        panels = (job.columns + LANES - 1) // LANES
        size = _TOTALS_AT + panels * _TOTALS_BYTES
        memory = np.empty(size + job.groups * _TABLES_STEP + 64, np.uint8)
        work = (memory.ctypes.data + 63) // 64 * 64
        frame, totals = work + _FRAME_AT, work + _TOTALS_AT
        configure()
        _put_long(frame, _ROW_STEP, job.row_bytes)
        _put_long(frame, _FACTOR, job.factor)
        _put_long(frame, _LINE_STEP, job.line_step)
        _put_long(frame, _WEIGHTS, work)
        _put_long(frame, _SUMS, work + _SUMS_AT)
        for row in range(first, end, BLOCK_ROWS):
            last = min(BLOCK_ROWS, end - row) - 1
            _put_long(frame, _LAST, last)
            for i in range(panels * _TOTALS_BYTES // 4):
                _put(totals, i, np.float32(0))
            fill(job, work + size, row, last)
            for chunk in range((job.row_bytes + 63) // 64):
                add_chunk(job, work, work + size, row, last, chunk)
            for panel in range(panels):
                put(job, totals + panel * _TOTALS_BYTES, row, last, panel)
        release()
        memory[0] = 0  # Numba frees it behind the place that names it last

    return in_tasks(tiles)


@functools.cache
def pack_kernel(bits: int, pieces: int) -> Kernel:
    """Return ``f(x, n, columns, exponent, out, panel_bytes)``: all of x, (n, columns) float32.

    exponent: biased, of the power of two to multiply by. out: zero-filled.
    """
    pack, width, tiles = ops.pack_pair(pieces), chunk_columns(bits), ops.tiles_of(bits)
    chunk_bytes = ops.x_bytes(bits, pieces)
    per_pair, between, per_tile = ops.pair_of(bits)

    @kernel
    def packed(x: int, n: int, columns: int, exponent: int, out: int, panel_bytes: int) -> None:
        for panel in range((columns + LANES - 1) // LANES):
            some = min(LANES, columns - LANES * panel)
            for chunk in range((n + width - 1) // width):
                place = out + panel * panel_bytes + chunk * chunk_bytes
                for tile in range(tiles):
                    for j in range(TILE_ROWS):
                        a = chunk * width + per_pair * j + per_tile * tile
                        b = a + between
                        counts = (some if a < n else 0) + 256 * (some if b < n else 0)
                        at = x + 4 * LANES * panel
                        pack(
                            at + 4 * columns * a, at + 4 * columns * b, counts + 65536 * exponent,
                            place + tile * pieces * TILE_BYTES + 64 * j, place + chunk_bytes - 64,
                        )  # fmt: skip

    return packed


@kernel
def magnitudes(x: int, count: int) -> tuple[int, int]:
    """Return the bits of the largest and of the smallest element but 0, signs off."""
    largest, smallest = np.uint32(0), np.uint32(0xFFFFFFFF)
    for i in range(count):
        size = np.uint32(_get_word(x, i)) & np.uint32(0x7FFFFFFF)
        largest = max(largest, size)
        smallest = min(smallest, np.uint32(size - np.uint32(1)))
    return int(largest), int(smallest) + 1
