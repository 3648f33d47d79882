"""LLVM code of float products in tile registers: codes as bfloat16, activations as a sum of them.

A bfloat16 has 8 bits of significand, so ``code - zero`` with an integer zero point is one exactly,
and a float32 is the sum of three, a float16 of two. Products of two are exact in float32, in which
tiles add. What a zero point has beyond a whole number is taken off the sums (`scale_sums`).

A *chunk* is 64 bytes of each of sixteen rows, and becomes 4 (4 bits) or 2 tiles of 32 columns each.
Which columns stand in a tile is as decoding has it: `pair_of` tells.

Decoding, scaling and the products of tiles use different parts of the processor, so they are mixed:
while one chunk is multiplied the next is decoded, and the sums of the one before are scaled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gemmule.backends.cpu import amx, ir, simd
from gemmule.backends.cpu.intrinsics import emit_prefetch
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import LANES, Value
from gemmule.rungs._cpu_vectors import SECOND_CACHE
from gemmule.rungs.quantized.cpu.blocks.halves import tiles_of
from gemmule.rungs.quantized.cpu.tiles.ops import row_of_codes

# Sixteen rows each; activations are loaded once for all of them, and the sums of three are as many
# as an addition needs that waits 52 cycles for the one before it.
BLOCKS = 3
BLOCK_ROWS = BLOCKS * amx.TILE_ROWS

# Tiles 0 to 2 hold sums, 3 to 5 weights, 6 and 7 activations.
SHAPES = ((amx.TILE_ROWS, 64),) * 8

# A task's memory holds for each group of the matrix and each sixteen rows a table: their whole zero
# points (4 bits: addresses of look-up tables), scales, what the zero points lack of whole ones.
WHOLE, SCALES, RESTS, TABLE_BYTES = 0, 128, 192, 256

# What a chunk of 48 rows becomes, and its sums; there are two of each, one in use and one in the
# making.
SUMS_BYTES = BLOCKS * amx.TILE_BYTES

# A float16 from 1024 on has its units in the lowest bits. Its exponent has a bias of 15, that of a
# bfloat16 127, so a small whole number moved from one to the other comes out smaller by 2^112.
MAGIC_BITS = 0x6400
_BIAS_BETWEEN = 112


def weights_bytes(bits: int) -> int:
    """Return the size of a decoded chunk of 48 rows."""
    return BLOCKS * tiles_of(bits) * amx.TILE_BYTES


def shrunk_by(bits: int) -> int:
    """Return the power of two by which decoded codes are smaller than they are."""
    return _BIAS_BETWEEN if bits == 8 else 0


def pair_of(bits: int) -> tuple[int, int, int]:
    """Return how the columns of a chunk stand in tiles, as three steps.

    From one pair of columns in a tile to the next, from its first column to its second, and from
    one tile to the next.
    """
    return (8, 4, 1) if bits == 4 else (4, 2, 1)


def x_bytes(bits: int, pieces: int) -> int:
    """Return the size of a chunk's activations: a tile for each piece, and the sums of x."""
    return tiles_of(bits) * pieces * amx.TILE_BYTES + 64


# Places in a task's frame, which tells the operations what to work on; an int64 each. Of the chunk
# to decode: CODES, LAST, BYTES (see `row_of_codes`), TABLE, and NEXT, where its weights go. Of the
# one to multiply: WEIGHTS, X, SUMS. Of the one to scale: PENDING sums, SCALED, its table,
# SUMS_OF_X, TOTALS. LINES: what lines to prefetch, a row apart. FACTOR: bits of a float32.
CODES, ROW_STEP, LAST, BYTES, TABLE, NEXT, WEIGHTS, X = range(8)
SUMS, PENDING, SCALED, SUMS_OF_X, TOTALS, FACTOR, LINES = range(8, 15)
FRAME_BYTES = 128


def _word(builder: Any, frame: Value, index: int) -> Value:
    """Emit a load of a word of the frame."""
    return simd.load_number(builder, frame, "int64", 8 * index)


def _nth(builder: Any, base: Value, i: Value | int, nbytes: int) -> Value:
    """Emit the address of the i-th of things of so many bytes; i is known, or a value."""
    if isinstance(i, int):
        return builder.add(base, base.type(nbytes * i))
    return builder.add(base, builder.mul(i, i.type(nbytes)))


def _in_block(builder: Any, i: Value | int) -> tuple[Value | int, Value | int]:
    """Emit the sixteen rows that the i-th of 48 belongs to, and its number there."""
    if isinstance(i, int):
        return divmod(i, amx.TILE_ROWS)
    rows = i.type(amx.TILE_ROWS)
    return builder.udiv(i, rows), builder.urem(i, rows)


def _chunk_words(builder: Any, frame: Value) -> list[Value]:
    return [_word(builder, frame, i) for i in (CODES, ROW_STEP, TABLE, NEXT, LAST, BYTES)]


chunk_words = operation("amx chunk_words", _chunk_words)
"""``f(frame)``: what `decode_row` takes of it, read once for all rows."""


@functools.cache
def decode_row(bits: int, has_zeros: bool) -> Intrinsic:
    """Return ``f(words, i)``: the i-th row of a chunk, or what there is of it, as weights."""

    def emit(builder: Any, words: list[Value], i: Value) -> None:
        _decoding(builder, words, bits, has_zeros)(i)

    return operation(f"amx decode_row {bits} {has_zeros}", emit)


@functools.cache
def scale_row(bits: int, has_zeros: bool) -> Intrinsic:
    """Return ``f(frame, i)``: add the pending sums of the i-th row to the totals."""

    def emit(builder: Any, frame: Value, i: Value) -> None:
        _scaling(builder, frame, bits, has_zeros)(i)

    return operation(f"amx scale_row {bits} {has_zeros}", emit)


@functools.cache
def multiply_chunk(bits: int, pieces: int, has_zeros: bool, decoding: bool) -> Intrinsic:
    """Return ``f(frame)``: sums of a chunk's products for 48 rows and 16 columns.

    Between the products it adds the pending sums to the totals, prefetches 48 lines, and where
    `decoding` is set decodes the next chunk, of which all rows and bytes must be there.
    """
    turns = tiles_of(bits) * pieces * BLOCKS

    def emit(builder: Any, frame: Value) -> None:
        weights, x, sums, ahead, apart = (
            _word(builder, frame, i) for i in (WEIGHTS, X, SUMS, LINES, ROW_STEP)
        )
        steps = [_scaling(builder, frame, bits, has_zeros)]
        if decoding:
            words = _chunk_words(builder, frame)
            steps.append(_decoding(builder, words[:4], bits, has_zeros))

            def prefetch(i: int) -> None:
                place = builder.add(ahead, builder.mul(apart, apart.type(i)))
                emit_prefetch(builder, place, SECOND_CACHE)

            steps.append(prefetch)
        for turn in range(turns):
            i, b = divmod(turn, BLOCKS)
            left, right = BLOCKS + b, 2 * BLOCKS + i % 2
            if b == 0:
                amx.load_tile(builder, right, x, 64, amx.TILE_BYTES * i)
            if i == 0:
                amx.zero_tile(builder, b)
            if i % pieces == 0:
                place = amx.TILE_BYTES * (tiles_of(bits) * b + i // pieces)
                amx.load_tile(builder, left, weights, 64, place)
            amx.multiply_tiles(builder, "tdpbf16ps", b, left, right)
            for row in range(BLOCK_ROWS * turn // turns, BLOCK_ROWS * (turn + 1) // turns):
                for step in steps:
                    step(row)
        for b in range(BLOCKS):
            amx.store_tile(builder, b, sums, amx.TILE_BYTES * b)

    name = f"amx multiply_chunk {bits} {pieces} {has_zeros} {decoding}"
    return operation(name, emit)


def _decoding(
    builder: Any, words: list[Value], bits: int, has_zeros: bool
) -> Callable[[Value | int], None]:
    """Return what emits the decoding of the i-th row; words: `chunk_words`.

    Without the last two of them all rows and bytes are there.
    """
    codes, step, table, out, *edge = words
    limits = (edge[0], edge[1]) if edge else None
    decode, tiles = _nibbles if bits == 4 else _bytes, tiles_of(bits)

    def emit(i: Value | int) -> None:
        block, lane = _in_block(builder, i)
        row = row_of_codes(builder, codes, step, i, limits)
        zero = _nth(builder, _nth(builder, table, block, TABLE_BYTES), lane, 32 // bits)
        to = _nth(builder, _nth(builder, out, block, tiles * amx.TILE_BYTES), lane, 64)
        for tile, weights in enumerate(decode(builder, row, zero, has_zeros)):
            simd.store_vector(builder, weights, to, amx.TILE_BYTES * tile)

    return emit


def _scaling(
    builder: Any, frame: Value, bits: int, has_zeros: bool
) -> Callable[[Value | int], None]:
    """Return what emits the scaling of the i-th row.

    ``totals += (sums + rest of zero point * sum of x) * factor * scale``.
    """
    sums, table, of_x, factor, totals = (
        _word(builder, frame, i) for i in (PENDING, SCALED, SUMS_OF_X, FACTOR, TOTALS)
    )
    number = builder.bitcast(builder.trunc(factor, ir.IntType(32)), ir.FloatType())
    factors, activations = simd.splat(builder, number), simd.load_vector(builder, of_x, "float32")
    if shrunk_by(bits):  # as the sums are
        activations = builder.fmul(activations, simd.constant(2.0 ** -shrunk_by(bits)))

    def emit(i: Value | int) -> None:
        block, lane = _in_block(builder, i)
        numbers = _nth(builder, _nth(builder, table, block, TABLE_BYTES), lane, 4)
        to = _nth(builder, totals, i, 64)
        part = simd.load_vector(builder, _nth(builder, sums, i, 64), "float32")
        if has_zeros:
            part = simd.fused(builder, simd.spread(builder, numbers, RESTS), activations, part)
        part = builder.fmul(part, factors)
        total = simd.load_vector(builder, to, "float32")
        total = simd.fused(builder, part, simd.spread(builder, numbers, SCALES), total)
        simd.store_vector(builder, total, to, 0)

    return emit


def window() -> list[int]:
    """Return the bfloat16 bits of -15 to 15: sixteen from 15 - zero on are ``code - zero``."""
    import numpy as np

    return [int(v) >> 16 for v in np.arange(-15, 16).astype(np.float32).view(np.uint32)]


def _nibbles(builder: Any, row: Value, zero: Value, has_zeros: bool) -> list[Value]:
    """Emit a look-up for nibble k of every 16 bits; the index ends in 5 bits, so tables repeat."""
    words = simd.vector_type("int16", 32)
    if has_zeros:
        at = simd.load_number(builder, zero, "int64", WHOLE)
        few = simd.load_vector(builder, at, "int16", 0, 16)
        table = simd.shuffled(builder, few, few, [lane % 16 for lane in range(32)])
    else:
        table = words(window()[7:23] * 2)
    name = "llvm.x86.avx512.permvar.hi.512"
    codes = builder.bitcast(row, words)
    shifted = [codes] + [builder.lshr(codes, words([4 * k] * 32)) for k in (1, 2, 3)]
    return [simd.called(builder, name, words, table, index) for index in shifted]


def _bytes(builder: Any, row: Value, zero: Value, has_zeros: bool) -> list[Value]:
    """Emit ``code - zero`` as float16 of whole numbers, then as bfloat16, shrunk (`shrunk_by`).

    Moved down by the three bits that its significand is longer, copies of the sign cleared. Half
    the instructions of the way through float32.
    """
    words, halves = simd.vector_type("int16", 32), ir.VectorType(ir.HalfType(), 32)
    codes, magic = builder.bitcast(row, words), words([MAGIC_BITS] * 32)
    taken = words([MAGIC_BITS + 128] * 32)
    if has_zeros:  # a pair of them
        pair = builder.bitcast(simd.spread(builder, zero, WHOLE), simd.vector_type("int32"))
        taken = builder.bitcast(pair, words)
    less, weights = builder.bitcast(taken, halves), []
    for code in (builder.and_(codes, words([255] * 32)), builder.lshr(codes, words([8] * 32))):
        large = builder.bitcast(builder.or_(code, magic), halves)
        exact = builder.bitcast(builder.fsub(large, less), words)
        moved = builder.ashr(exact, words([3] * 32))
        weights.append(builder.and_(moved, words([0x8FFF] * 32)))
    return weights


def _joined(builder: Any, first: Value, second: Value) -> Value:
    """Emit the upper halves of two word vectors as pairs, the first one's below."""
    low = builder.lshr(first, simd.constant(16, "int32"))
    return builder.or_(low, builder.and_(second, simd.constant(0xFFFF0000, "int32")))


@functools.cache
def pack_pair(pieces: int) -> Intrinsic:
    """Return ``f(row_a, row_b, counts, out, sums)``: sixteen columns of two rows of x as pieces.

    Of both rows, `counts` modulo 256 and above elements exist, others count as zeros. counts also
    holds, from bit 16 on, the biased exponent of the power of two that x is multiplied by. Pieces
    go to tiles that lie one behind the other; `sums` adds up their values.
    """

    def emit(builder: Any, a: Value, b: Value, counts: Value, out: Value, sums: Value) -> None:
        exponent = builder.shl(builder.lshr(counts, counts.type(16)), counts.type(23))
        power = builder.bitcast(builder.trunc(exponent, ir.IntType(32)), ir.FloatType())
        total, split = simd.load_vector(builder, sums, "float32"), []
        for address, shift in ((a, 0), (b, 8)):
            count = builder.and_(builder.lshr(counts, counts.type(shift)), counts.type(255))
            raw = simd.masked_load(builder, address, ir.IntType(32), LANES, count)
            value = builder.bitcast(raw, simd.vector_type("float32"))
            value = builder.fmul(value, simd.splat(builder, power))
            parts, value = _pieces(builder, value, pieces)
            total = builder.fadd(total, value)
            split.append(parts)
        simd.store_vector(builder, total, sums, 0)
        for piece in range(pieces):
            joined = _joined(builder, split[0][piece], split[1][piece])
            simd.store_vector(builder, joined, out, amx.TILE_BYTES * piece)

    return operation(f"amx pack_pair {pieces}", emit)


def _pieces(builder: Any, value: Value, pieces: int) -> tuple[list[Value], Value]:
    """Emit words whose upper halves are bfloat16 with the sum `value`, and what they sum to.

    A single piece is rounded to nearest even; of several each is cut off, which cannot overflow,
    and the last one has no more than 8 bits left.
    """
    words, upper = simd.vector_type("int32"), simd.constant(0xFFFF0000, "int32")
    if pieces == 1:
        bits = builder.bitcast(value, words)
        odd = builder.and_(
            builder.lshr(bits, simd.constant(16, "int32")), simd.constant(1, "int32")
        )
        carry = builder.add(odd, simd.constant(0x7FFF, "int32"))
        rounded = builder.and_(builder.add(bits, carry), upper)
        return [rounded], builder.bitcast(rounded, value.type)
    parts, rest = [], value
    for _ in range(pieces):
        bits = builder.and_(builder.bitcast(rest, words), upper)
        parts.append(bits)
        rest = builder.fsub(rest, builder.bitcast(bits, value.type))
    return parts, value
