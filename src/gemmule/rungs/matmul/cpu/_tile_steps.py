"""LLVM code of a block of 32 x 32 sums in four tile registers of AMX.

A *panel* is sixteen rows of A or sixteen columns of B, packed in tiles of 32 terms each; halves of
either kind are one or two bfloat16, so a term of float16 takes two tiles, the upper bits first. Two
panels of A and two of B make the four tiles of sums. `registers` is not used here: it is memory
that stands for the tile registers where a test runs the same kernels on another processor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from gemmule.backends.cpu import amx, ir, simd
from gemmule.backends.cpu.intrinsics import widen
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.rungs._cpu_vectors import transposed

# Tiles 0 to 3 hold sums, of rows 0 to 15 first; 4 and 5 are of A, 6 and 7 of B.
SHAPES = ((amx.TILE_ROWS, 64),) * 8
SUMS_BYTES = 4 * amx.TILE_BYTES
STEP_TERMS = 32

# By how many pieces A and B have: which are multiplied one after the other. Mostly one of the two
# changes. Of three the products below 2^-24 of the whole are left out.
PRODUCTS = {
    (1, 1): ((0, 0),),
    (2, 2): ((0, 0), (0, 1), (1, 1), (1, 0)),
    (2, 1): ((1, 0), (0, 0)),
    (2, 3): ((0, 2), (0, 1), (1, 1), (1, 0), (0, 0)),
    (3, 1): ((2, 0), (1, 0), (0, 0)),
    (3, 2): ((2, 0), (1, 0), (1, 1), (0, 1), (0, 0)),
    (3, 3): ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0), (0, 0)),
}


@functools.cache
def start_sums() -> Intrinsic:
    """Return ``f(registers)``: four sums of zero."""

    def emit(builder: Any, registers: simd.Value) -> None:
        for tile in range(4):
            amx.zero_tile(builder, tile)

    return operation("amx start_sums", emit)


SUMS_PITCH = 2 * amx.TILE_ROWS  # numbers from row to row of sums: results are stored in whole lines


def _place(tile: int) -> int:
    """Return where the first row of a tile of sums lies behind that of the first, in bytes."""
    return 4 * amx.TILE_ROWS * (tile // 2 * SUMS_PITCH + tile % 2)


@functools.cache
def resume_rows() -> Intrinsic:
    """Return ``f(registers, sums)``: go on with 32 rows of 32 sums in memory."""

    def emit(builder: Any, registers: simd.Value, sums: simd.Value) -> None:
        for tile in range(4):
            amx.load_tile(builder, tile, sums, 4 * SUMS_PITCH, _place(tile))

    return operation("amx resume_rows", emit)


@functools.cache
def keep_rows() -> Intrinsic:
    """Return ``f(registers, sums)``: write the sums to memory, as 32 rows of 32."""

    def emit(builder: Any, registers: simd.Value, sums: simd.Value) -> None:
        for tile in range(4):
            amx.store_tile(builder, tile, sums, _place(tile), 4 * SUMS_PITCH)

    return operation("amx keep_rows", emit)


@functools.cache
def add_products(pieces: tuple[int, int], streamed: str = "") -> Intrinsic:
    """Return ``f(registers, a, b, panel_a, panel_b)``: add 32 terms to the four sums.

    a, b: addresses of the tiles of these terms in the first of two panels, so many bytes apart for
    each of the pieces that A or B has. streamed: ``"a"`` or ``"b"`` where that passes while the
    other stays in the first cache.
    """

    def emit(builder: Any, registers: simd.Value, *given: simd.Value) -> None:
        apart = [builder.mul(by, by.type(n)) for by, n in zip(given[2:], pieces, strict=True)]
        left, right = ((at, builder.add(at, by)) for at, by in zip(given[:2], apart, strict=True))
        held: tuple[int, int] = (-1, -1)
        for pair in PRODUCTS[pieces]:
            for name, tiles, places, piece, before in (
                ("a", (4, 5), left, pair[0], held[0]),
                ("b", (6, 7), right, pair[1], held[1]),
            ):
                if piece != before:
                    load = amx.stream_tile if name == streamed else amx.load_tile
                    for tile, place in zip(tiles, places, strict=True):
                        load(builder, tile, place, 64, amx.TILE_BYTES * piece)
            held = pair
            for total in range(4):
                amx.multiply_tiles(builder, "tdpbf16ps", total, 4 + total // 2, 6 + total % 2)

    return operation(f"amx add_products {pieces} {streamed}", emit)


@functools.cache
def add_dots(dtype: str) -> Intrinsic:
    """Return ``f(sums, a, b, count, before)``: what tiles do, for one of the four, in vectors.

    Adds `count` steps of 32 terms of a panel of A and one of B to 16 x 16 sums in memory, rows
    `SUMS_PITCH` numbers apart, which are read where `before` is not 0. Each row's sums stay in a
    register, and two terms of the row meet sixteen columns in one instruction, which takes them
    from memory: bfloat16 by VDPBF16PS;
    float16 by VFMADDPH, 32 terms of a sum in float16 before they are added in float32.
    """

    def emit(builder: Any, *arguments: simd.Value) -> None:
        sums, a, b, count, before = arguments
        vector, rows, pitch = simd.vector_type("float32"), range(amx.TILE_ROWS), 4 * SUMS_PITCH
        fresh = builder.icmp_signed("==", before, before.type(0))
        kept = [simd.load_vector(builder, sums, "float32", pitch * row) for row in rows]
        kept = [builder.select(fresh, simd.constant(0.0), one) for one in kept]
        start, loop = builder.block, builder.append_basic_block("dots")
        after = builder.append_basic_block("summed")
        builder.branch(loop)
        builder.position_at_end(loop)
        step, totals = builder.phi(count.type), [builder.phi(vector) for _ in kept]
        step.add_incoming(count.type(0), start)
        offset = builder.mul(step, count.type(amx.TILE_BYTES))
        left, right, grown = builder.add(a, offset), builder.add(b, offset), list(totals)
        if dtype == "float16":
            halves = ir.VectorType(ir.HalfType(), STEP_TERMS)
            grown = [halves([0.0] * STEP_TERMS)] * len(kept)
        for pair in range(STEP_TERMS // 2):
            columns = simd.load_vector(builder, right, "int32", 64 * pair)
            for row in rows:
                terms = simd.spread(builder, left, 64 * row + 4 * pair, "int32")
                grown[row] = _two_terms(builder, dtype, grown[row], columns, terms)
        if dtype == "float16":
            grown = [
                builder.fadd(t, _widened(builder, g)) for t, g in zip(totals, grown, strict=True)
            ]
        following = builder.add(step, count.type(1))
        step.add_incoming(following, loop)
        for total, one, new in zip(totals, kept, grown, strict=True):
            total.add_incoming(one, start)
            total.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
        builder.position_at_end(after)
        for row, new in enumerate(grown):
            simd.store_vector(builder, new, sums, pitch * row)

    return operation(f"add_dots {dtype}", emit)


def _two_terms(builder: Any, dtype: str, total: Any, columns: simd.Value, terms: simd.Value) -> Any:
    """Emit ``total + columns . terms``; of float16 both products have a sum of their own."""
    if dtype == "float16":
        parts = (builder.bitcast(one, total.type) for one in (terms, columns))
        return simd.called(builder, "llvm.fma.v32f16", total.type, *parts, total)
    kind = simd.bfloat16_vector()
    columns, terms = builder.bitcast(columns, kind), builder.bitcast(terms, kind)
    return simd.called(
        builder, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, columns, terms
    )


def _widened(builder: Any, pairs: simd.Value) -> Any:
    """Emit the sums of each two float16 that stand beside each other, as float32."""
    order = range(0, STEP_TERMS, 2)
    even = simd.shuffled(builder, pairs, pairs, list(order))
    odd = simd.shuffled(builder, pairs, pairs, [one + 1 for one in order])
    return builder.fpext(builder.fadd(even, odd), simd.vector_type("float32"))


@functools.cache
def place_tile(paired: bool, along_lines: bool) -> Intrinsic:
    """Return ``f(source, step, tile)``: place a whole tile, as `_tile_blocks.place_kernel` does.

    step: bytes from line to line, or along lines from term to term.
    """

    def emit(builder: Any, source: simd.Value, step: simd.Value, tile: simd.Value) -> None:
        if along_lines:
            _place_across(builder, source, step, [tile], paired)
            return
        rows = simd.row_addresses(builder, source, step, amx.TILE_ROWS)
        _write_tile(
            builder, [simd.load_vector(builder, row, "int32") for row in rows], tile, paired
        )

    return operation(f"place_tile {paired} {along_lines}", emit)


@functools.cache
def place_two(paired: bool) -> Intrinsic:
    """Return ``f(source, step, tile, other)``: what `place_tile` does along 32 lines, in two tiles.

    Rows of memory are read whole: where they lie a power of two apart, no cache keeps the half of
    each that another tile would want later.
    """

    def emit(builder: Any, source: simd.Value, step: simd.Value, *tiles: simd.Value) -> None:
        _place_across(builder, source, step, tiles, paired)

    return operation(f"place_two {paired}", emit)


def _place_across(
    builder: Any, source: simd.Value, step: simd.Value, tiles: Sequence[simd.Value], paired: bool
) -> None:
    width = amx.TILE_ROWS * len(tiles)
    rows = simd.row_addresses(builder, source, step, STEP_TERMS)
    halves = [simd.load_vector(builder, row, "uint16", 0, width) for row in rows]
    for number, tile in enumerate(tiles):
        order = [amx.TILE_ROWS * number + i // 2 + width * (i % 2) for i in range(STEP_TERMS)]
        twos = zip(halves[::2], halves[1::2], strict=True)
        pairs = [simd.shuffled(builder, one, other, order) for one, other in twos]
        lines = [builder.bitcast(one, simd.vector_type("int32")) for one in pairs]
        _write_tile(builder, lines, tile, not paired)


def _write_tile(builder: Any, lines: list[simd.Value], tile: simd.Value, turned: bool) -> None:
    for number, line in enumerate(transposed(builder, lines) if turned else lines):
        simd.store_vector(builder, line, tile, 64 * number)


EXTREMES_BYTES = 2 * 64


def _least_and_most(builder: Any, extremes: simd.Value) -> list[simd.Value]:
    found = []
    for name, at in (("umin", 0), ("umax", 64)):
        vector = simd.load_vector(builder, extremes, "int16", at, 32)
        reduce = f"llvm.vector.reduce.{name}.v32i16"
        one = simd.called(builder, reduce, vector.type.element, vector)
        found.append(builder.zext(one, ir.IntType(64)))
    return found


least_and_most = operation("least_and_most", _least_and_most)
"""``f(extremes)``: the least and the largest of a panel's, see `note_extremes`."""


@functools.cache
def note_extremes() -> Intrinsic:
    """Return ``f(tile, extremes)``: take the magnitudes of a tile of 16-bit floats into account.

    extremes: 32 least magnitudes that are not zero, less one, and 32 largest, as bits.
    """

    def emit(builder: Any, tile: simd.Value, extremes: simd.Value) -> None:
        least, most = (simd.load_vector(builder, extremes, "int16", at, 32) for at in (0, 64))
        for row in range(amx.TILE_ROWS):
            bits = simd.load_vector(builder, tile, "int16", 64 * row, 32)
            magnitude = builder.and_(bits, bits.type([0x7FFF] * 32))
            less = builder.sub(magnitude, bits.type([1] * 32))  # zeros become the largest
            least = simd.called(builder, "llvm.umin.v32i16", bits.type, least, less)
            most = simd.called(builder, "llvm.umax.v32i16", bits.type, most, magnitude)
        simd.store_vector(builder, least, extremes, 0)
        simd.store_vector(builder, most, extremes, 64)

    return operation("amx note_extremes", emit)


@functools.cache
def split_halves() -> Intrinsic:
    """Return ``f(tile)``: make two tiles of one of finite float16.

    Each is the sum of two bfloat16: its upper bits, and what these lack, in the tile behind.
    """

    def emit(builder: Any, tile: simd.Value) -> None:
        wide, upper_half = simd.vector_type("int32"), simd.constant(0xFFFF0000, "int32")
        for at in range(0, amx.TILE_BYTES, 2 * simd.LANES):
            halves = simd.load_vector(builder, tile, "float16", at)
            value = widen(builder, halves, "float16", "float32")
            upper = builder.and_(builder.bitcast(value, wide), upper_half)
            rest = builder.fsub(value, builder.bitcast(upper, value.type))
            for piece, target in ((upper, at), (builder.bitcast(rest, wide), amx.TILE_BYTES + at)):
                shifted = builder.lshr(piece, simd.constant(16, "int32"))
                simd.store_vector(builder, builder.trunc(shifted, halves.type), tile, target)

    return operation("amx split_halves", emit)
