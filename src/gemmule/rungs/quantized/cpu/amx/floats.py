"""Products of 48 rows with float activations in tile registers: the loops around `bfloat16`.

Tiles take subnormal numbers for zeros, and a sum of large products may overflow before it meets a
small scale. So x is multiplied by a power of two first, such that no piece of it is subnormal and
no sum overflows; sums are multiplied by its inverse.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.amx import TILE_BYTES, TILE_ROWS, configured, released
from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Kernel, apart, kernel
from gemmule.backends.cpu.pool import in_pool, share_count
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, block_columns
from gemmule.rungs._cpu import address
from gemmule.rungs.quantized.cpu._operands import SERIAL_BYTES, Stored, scale_dtype_of
from gemmule.rungs.quantized.cpu._product import Make, Product, Rows, Way, product_of
from gemmule.rungs.quantized.cpu.amx import bfloat16 as ops
from gemmule.rungs.quantized.cpu.amx.bfloat16 import BLOCK_ROWS, BLOCKS, TABLE_BYTES
from gemmule.rungs.quantized.cpu.amx.int8 import put_rows
from gemmule.rungs.quantized.cpu.blocks.halves import tiles_of

_get, _put = load("float32", "float32"), store("float32", "float32")
_put_long, _put_word = store("int64", "int64"), store("int32", "int64")
_get_word = load("int32", "int32")

# Lines are asked for with float activations: of short rows those of the next 48 rows, of others, in
# bytes, so far ahead in each of the 48 in work. Two cores of a Xeon in a slow hour, November 2026,
# ms: rows of 2 KiB 1.26, not 1.75 ahead in the rows or 1.23 to 1.8 if not asked for; 8192 x 8192 of
# 8-bit codes 6.0, not 10 for the next rows or 7.2 if not asked for, of 4-bit codes 4.8, not 5.0.
# 128 and 512 bytes, and the order of memory, were no better.
LONG_ROW_BYTES = 4096
LINE_AHEAD = 256

# By the power of two by which decoded codes are smaller than they are: powers of two to try for x,
# and the least and the largest power that x may then have. Nothing is to be subnormal, and the last
# of three pieces is a multiple of 2^-23 of its element at worst, a product 2^-112 of that; the sums
# of a chunk, 128 products with codes below 2^8, are to stay below 2^128.
_POWERS = {0: ((46, 0), -103, 110), 112: ((60, 110, 10), 9, 126)}

_CODES, _ROW_STEP, _LAST, _BYTES, _TABLE = ops.CODES, ops.ROW_STEP, ops.LAST, ops.BYTES, ops.TABLE
_NEXT, _WEIGHTS, _X, _SUMS, _PENDING = ops.NEXT, ops.WEIGHTS, ops.X, ops.SUMS, ops.PENDING
_SCALED, _SUMS_OF_X, _TOTALS, _FACTOR = ops.SCALED, ops.SUMS_OF_X, ops.TOTALS, ops.FACTOR
_LINES = ops.LINES
_WHOLE, _SCALES, _RESTS, _MAGIC = ops.WHOLE, ops.SCALES, ops.RESTS, ops.MAGIC_BITS

# Tables are filled for some groups at a time and there are twice as many, as of two chunks one may
# be decoded with a later group while another is scaled with an earlier one.
_SOME = 16
_TABLES_STEP = BLOCKS * TABLE_BYTES
_TABLES_BYTES = 2 * _SOME * _TABLES_STEP

# Sections of a task's memory: two times sums, the frame, tables, two times weights, then totals, of
# which the first take what comes before the first chunk.
_SUMS_BYTES = ops.SUMS_BYTES
_FRAME_AT = 2 * _SUMS_BYTES
_TABLES_AT = _FRAME_AT + ops.FRAME_BYTES
_WEIGHTS_AT = _TABLES_AT + _TABLES_BYTES
TOTALS_BYTES = BLOCKS * TILE_BYTES


def work_bytes(bits: int) -> int:
    """Return the size of a task's memory, but for its totals."""
    return _WEIGHTS_AT + 2 * ops.weights_bytes(bits) + TOTALS_BYTES


@functools.cache
def _tables_kernel(bits: int, scale_dtype: str, has_zeros: bool) -> Kernel:
    """Return ``f(job, tables, row, last, group)``: what 48 rows have in `_SOME` groups.

    A zero point becomes the nearest code and the rest, so that neither term of
    ``(code - whole) + (whole - zero)`` is more than twice as large as their sum.
    """
    scale, by_look_up = load(scale_dtype, "float32"), bits == 4
    highest = np.float32(2**bits - 1)

    @kernel
    def fill(job: Product, tables: int, row: int, last: int, group: int) -> None:
        start_at = tables + group % (2 * _SOME) * _TABLES_STEP
        for i in range(BLOCK_ROWS):
            start = (row + min(i, last)) * job.scale_step + group
            at, lane = start_at + i // TILE_ROWS * TABLE_BYTES, i % TILE_ROWS
            for k in range(min(_SOME, max(job.scale_step, 1) - group)):
                table = at + k * _TABLES_STEP
                _put(table + _SCALES, lane, scale(job.scales, start + k))
                if has_zeros:
                    zero = _get(job.zeros, start + k)
                    within = min(max(zero, np.float32(0)), highest)
                    whole = np.floor(within + np.float32(0.5))
                    _put(table + _RESTS, lane, whole - zero)
                    if by_look_up:
                        _put_long(table + _WHOLE, lane, job.lanes + 2 * (15 - int(whole)))
                    else:  # two float16
                        _put_word(table + _WHOLE, lane, 65537 * (_MAGIC + int(whole)))

    return fill


@functools.cache
def _prepare_kernel(bits: int, scale_dtype: str, has_zeros: bool) -> Kernel:
    """Return ``f(job, work, row, last, chunk, per_group)``: name a chunk to decode in the frame.

    per_group: chunks from one change of scales to the next. Fills tables where groups begin that
    have none. Returns whether all of the chunk is there.
    """
    fill, weights = _tables_kernel(bits, scale_dtype, has_zeros), ops.weights_bytes(bits)

    @kernel
    def prepare(job: Product, work: int, row: int, last: int, chunk: int, per_group: int) -> bool:
        frame, count = work + _FRAME_AT, job.row_bytes - 64 * chunk
        group = chunk // per_group
        if group % _SOME == 0 and chunk % per_group == 0:
            fill(job, work + _TABLES_AT, row, last, group)
        start = job.codes + row * job.row_bytes
        _put_long(frame, _CODES, start + 64 * chunk)
        _put_long(frame, _LAST, last)
        _put_long(frame, _BYTES, count)
        table = work + _TABLES_AT + group % (2 * _SOME) * _TABLES_STEP
        _put_long(frame, _TABLE, table)
        _put_long(frame, _NEXT, work + _WEIGHTS_AT + chunk % 2 * weights)
        ahead = BLOCK_ROWS * job.row_bytes if job.row_bytes < LONG_ROW_BYTES else LINE_AHEAD
        _put_long(frame, _LINES, start + ahead + 64 * chunk)
        return last == BLOCK_ROWS - 1 and count >= 64

    return prepare


@functools.cache
def _multiply_kernel(bits: int, pieces: int, has_zeros: bool, decoding: bool) -> Kernel:
    """Return `ops.multiply_chunk` as a function of its own."""
    emitted = ops.multiply_chunk(bits, pieces, has_zeros, decoding)

    @apart
    def multiply(frame: int) -> None:
        emitted(frame)

    return multiply


@functools.cache
def rows_kernel(bits: int, pieces: int, scale_dtype: str, has_zeros: bool) -> Kernel:
    """Return ``f(job, work, row, last, totals)``: add to the totals of 48 rows, panel by panel."""
    decode_row, scale_row = ops.decode_row(bits, has_zeros), ops.scale_row(bits, has_zeros)
    chunk_words = ops.chunk_words
    multiply, multiply_decode = (
        _multiply_kernel(bits, pieces, has_zeros, decoding) for decoding in (False, True)
    )
    prepare, weights = _prepare_kernel(bits, scale_dtype, has_zeros), ops.weights_bytes(bits)
    chunk_bytes_of_x, unused_at = ops.x_bytes(bits, pieces), _WEIGHTS_AT + 2 * weights
    width = block_columns(bits)

    @apart
    def decode_edge(frame: int, last: int) -> None:
        words = chunk_words(frame)
        for i in range(last + 1):  # behind them stands what rows before left: nobody takes its sums
            decode_row(words, i)

    @kernel
    def add_rows(job: Product, work: int, row: int, last: int, totals: int) -> None:
        frame, turn = work + _FRAME_AT, 0
        chunks, panels = (job.row_bytes + 63) // 64, (job.columns + LANES - 1) // LANES
        per_group = chunks if job.group >= job.n else max(job.group // width, 1)
        _put_long(frame, _ROW_STEP, job.row_bytes)
        _put_long(frame, _FACTOR, job.factor)
        prepare(job, work, row, last, 0, per_group)
        decode_edge(frame, last)
        _put_long(frame, _PENDING, work)
        _put_long(frame, _SCALED, work + _TABLES_AT)
        _put_long(frame, _SUMS_OF_X, job.x + chunk_bytes_of_x - 64)
        _put_long(frame, _TOTALS, work + unused_at)
        for chunk in range(chunks):
            table = work + _TABLES_AT + chunk // per_group % (2 * _SOME) * _TABLES_STEP
            fused = False
            if chunk + 1 < chunks:
                fused = prepare(job, work, row, last, chunk + 1, per_group)
                if not fused:
                    decode_edge(frame, last)
            _put_long(frame, _WEIGHTS, work + _WEIGHTS_AT + chunk % 2 * weights)
            for panel in range(panels):
                x = job.x + chunk * chunk_bytes_of_x + panel * job.x_step
                sums = work + turn % 2 * _SUMS_BYTES
                _put_long(frame, _X, x)
                _put_long(frame, _SUMS, sums)
                if fused and panel == 0:
                    multiply_decode(frame)
                else:
                    multiply(frame)
                _put_long(frame, _PENDING, sums)
                _put_long(frame, _SCALED, table)
                _put_long(frame, _SUMS_OF_X, x + chunk_bytes_of_x - 64)
                _put_long(frame, _TOTALS, totals + panel * TOTALS_BYTES)
                turn += 1
        for i in range(BLOCK_ROWS):
            scale_row(frame, i)

    return add_rows


@functools.cache
def float_rows(bits: int, pieces: int, scale_dtype: str, has_zeros: bool) -> Rows:
    """Return the micro-kernel for one kind of matrix and of activations."""
    configure, release, put = configured(*ops.SHAPES), released(), put_rows
    add_rows, nbytes = rows_kernel(bits, pieces, scale_dtype, has_zeros), work_bytes(bits)

    @kernel
    def tiles(job: Product, first: int, end: int) -> None:
        panels = (job.columns + LANES - 1) // LANES
        memory = np.zeros(nbytes + panels * TOTALS_BYTES + 64, np.uint8)
        work = (memory.ctypes.data + 63) // 64 * 64
        totals = work + nbytes
        configure()
        for row in range(first, end, BLOCK_ROWS):
            last = min(BLOCK_ROWS, end - row) - 1
            for i in range(panels * TOTALS_BYTES // 4):
                _put(totals, i, np.float32(0))
            add_rows(job, work, row, last, totals)
            for panel in range(panels):
                put(job, totals + panel * TOTALS_BYTES, row, last, panel)
        release()

    return Rows(tiles)


@functools.cache
def pack_kernel(bits: int, pieces: int) -> Kernel:
    """Return ``f(number, shares, x, n, columns, exponent, out, panel_bytes)``: some chunks of x.

    x: (n, columns) float32. exponent: biased, of the power of two to multiply by.
    """
    pack, width, tiles = ops.pack_pair(pieces), block_columns(bits), tiles_of(bits)
    chunk_bytes = ops.x_bytes(bits, pieces)
    per_pair, between, per_tile = ops.pair_of(bits)

    @kernel
    def packed(
        number: int,
        shares: int,
        x: int,
        n: int,
        columns: int,
        exponent: int,
        out: int,
        panel_bytes: int,
    ) -> None:
        chunks = (n + width - 1) // width
        every = (columns + LANES - 1) // LANES * chunks
        for i in range(every * number // shares, every * (number + 1) // shares):
            panel, chunk = i // chunks, i % chunks
            some = min(LANES, columns - LANES * panel)
            place = out + panel * panel_bytes + chunk * chunk_bytes
            sums = place + chunk_bytes - 64
            for lane in range(LANES):
                _put(sums, lane, np.float32(0))
            for tile in range(tiles):
                for j in range(TILE_ROWS):
                    a = chunk * width + per_pair * j + per_tile * tile
                    b = a + between
                    counts = (some if a < n else 0) + 256 * (some if b < n else 0)
                    at = x + 4 * LANES * panel
                    pack(
                        at + 4 * columns * a,
                        at + 4 * columns * b,
                        counts + 65536 * exponent,
                        place + tile * pieces * TILE_BYTES + 64 * j,
                        sums,
                    )

    return packed


_MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 without its sign


@kernel
def magnitudes(number: int, shares: int, x: int, count: int, found: int) -> None:
    """Write the bits of the largest and of the smallest element but 0 of a share, signs off."""
    largest, smallest, first = 0, _MAGNITUDE, count * number // shares
    part = x + 4 * first
    for i in range(count * (number + 1) // shares - first):
        size = _get_word(part, i) & _MAGNITUDE
        largest = max(largest, size)
        smallest = min(smallest, (size - 1) & _MAGNITUDE)  # of 0 the most
    _put_long(found, 2 * number, largest)
    _put_long(found, 2 * number + 1, smallest + 1)


_pooled = functools.cache(in_pool)


def _in_shares(share: Kernel, count: int, *words: int) -> None:
    """Run ``share(number, count, *words)`` for each number, one alone without the pool."""
    if count == 1:
        share(0, 1, *words)
    else:
        _pooled(share, 1 + len(words))(count, count, *words)


def window() -> NDArray[np.uint16]:
    """Return what `Product.lanes` points to."""
    return np.array(ops.window(), np.uint16)


@functools.cache
def bfloat16_tiles(pieces: int) -> Make:
    """Return how matrices are multiplied by columns as sums of so many bfloat16.

    Not where an x holds NaN or infinity, or spans too many powers of two.
    """

    def make(parts: Stored, columns: int) -> Way:
        bits, shrunk, width = parts.bits, ops.shrunk_by(parts.bits), block_columns(parts.bits)
        panel_bytes = -(-parts.row_bytes // BLOCK_BYTES) * ops.x_bytes(bits, pieces)
        codes = window()

        def prepare(x: NDArray[Any], place: int, size: int) -> int | None:
            shares = share_count(x.nbytes, -(-x.shape[1] // LANES) * -(-x.shape[0] // width), 1)
            found = np.empty((shares, 2), np.int64)
            _in_shares(magnitudes, shares, address(x), x.size, address(found))
            largest, smallest = found[0] if shares == 1 else (found[:, 0].max(), found[:, 1].min())
            power = _power_for(int(largest), int(smallest), shrunk)
            if power is None:
                return None
            pack = pack_kernel(bits, pieces)
            _in_shares(pack, shares, address(x), *x.shape, 127 + power, place, size)
            return (127 + shrunk - power) << 23

        return Way(
            rows=float_rows(bits, pieces, scale_dtype_of(parts), parts.zeros is not None),
            product=product_of(parts, x_step=panel_bytes, lanes=address(codes)),
            kept=codes,
            unit=BLOCK_ROWS,
            panel=LANES,
            panel_bytes=panel_bytes,
            prepare=prepare,
            cleared=False,
            alone_below=LANES * SERIAL_BYTES,
        )

    return make


def _power_for(largest: int, smallest: int, shrunk: int) -> int | None:
    """Return the power of two to multiply x by, or None, from bits of its extreme magnitudes.

    shrunk: the power of two by which decoded codes are smaller than they are.
    """
    powers, low, high = _POWERS[shrunk]
    for power in powers:
        if largest < (127 + high - power) << 23 and smallest >= max(1, (127 + low - power) << 23):
            return power
    return None
