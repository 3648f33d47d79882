"""LLVM code of a block of 32 x 32 sums in four tile registers of AMX.

A *panel* is sixteen rows of A or sixteen columns of B, packed in tiles of 32 terms each; halves of
either kind are one or two bfloat16, so a term of float16 takes two tiles, the upper bits first. Two
panels of A and two of B make the four tiles of sums. `registers` is not used here: it is memory
that stands for the tile registers where a test runs the same kernels on another processor.
"""

from __future__ import annotations

import functools
from typing import Any

from gemmule.backends.cpu import amx, simd
from gemmule.backends.cpu.intrinsics import widen
from gemmule.backends.cpu.jit import Intrinsic, operation

# Tiles 0 to 3 hold sums, of rows 0 to 15 first; 4 and 5 are of A, 6 and 7 of B.
SHAPES = ((amx.TILE_ROWS, 64),) * 8
SUMS_BYTES = 4 * amx.TILE_BYTES
STEP_TERMS = 32

# Which pieces of A and of B are multiplied one after the other: only one of the two changes.
PRODUCTS = {1: ((0, 0),), 2: ((0, 0), (0, 1), (1, 1), (1, 0))}


@functools.cache
def start_sums() -> Intrinsic:
    """Return ``f(registers)``: four sums of zero."""

    def emit(builder: Any, registers: simd.Value) -> None:
        for tile in range(4):
            amx.zero_tile(builder, tile)

    return operation("amx start_sums", emit)


@functools.cache
def resume_sums() -> Intrinsic:
    """Return ``f(registers, sums)``: go on with four tiles of sums in memory."""

    def emit(builder: Any, registers: simd.Value, sums: simd.Value) -> None:
        for tile in range(4):
            amx.load_tile(builder, tile, sums, 64, amx.TILE_BYTES * tile)

    return operation("amx resume_sums", emit)


@functools.cache
def keep_sums() -> Intrinsic:
    """Return ``f(registers, sums)``: write the four tiles to memory."""

    def emit(builder: Any, registers: simd.Value, sums: simd.Value) -> None:
        for tile in range(4):
            amx.store_tile(builder, tile, sums, amx.TILE_BYTES * tile)

    return operation("amx keep_sums", emit)


@functools.cache
def add_products(pieces: int) -> Intrinsic:
    """Return ``f(registers, a, b, panel_bytes)``: add 32 terms to the four sums.

    a, b: addresses of the tiles of these terms in the first of two panels, panel_bytes apart.
    """

    def emit(
        builder: Any, registers: simd.Value, a: simd.Value, b: simd.Value, panel_bytes: simd.Value
    ) -> None:
        left = (a, builder.add(a, panel_bytes))
        right = (b, builder.add(b, panel_bytes))
        held: tuple[int, int] = (-1, -1)
        for pair in PRODUCTS[pieces]:
            for tiles, places, piece, before in (
                ((4, 5), left, pair[0], held[0]),
                ((6, 7), right, pair[1], held[1]),
            ):
                if piece != before:
                    for tile, place in zip(tiles, places, strict=True):
                        amx.load_tile(builder, tile, place, 64, amx.TILE_BYTES * piece)
            held = pair
            for total in range(4):
                amx.multiply_tiles(builder, "tdpbf16ps", total, 4 + total // 2, 6 + total % 2)

    return operation(f"amx add_products {pieces}", emit)


EXTREMES_BYTES = 2 * 64


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
