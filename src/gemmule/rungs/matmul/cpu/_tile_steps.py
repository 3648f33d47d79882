"""LLVM code of a block of 32 x 32 sums in four tile registers of AMX.

A *panel* is sixteen rows of A or sixteen columns of B, packed in tiles of 32 terms each; halves of
either kind are one or two bfloat16, so a term of float16 takes two tiles, the upper bits first. Two
panels of A and two of B make the four tiles of sums. `registers` is not used here: it is memory
that stands for the tile registers where a test runs the same kernels on another processor.
"""

from __future__ import annotations

import functools
from typing import Any

from gemmule.backends.cpu.amx import (
    TILE_BYTES,
    TILE_ROWS,
    load_tile,
    multiply_tiles,
    store_tile,
    zero_tile,
)
from gemmule.backends.cpu.jit import Intrinsic
from gemmule.backends.cpu.simd import Value, operation, void

# Tiles 0 to 3 hold sums, of rows 0 to 15 first; 4 and 5 are of A, 6 and 7 of B.
SHAPES = ((TILE_ROWS, 64),) * 8
SUMS_BYTES = 4 * TILE_BYTES
STEP_TERMS = 32

# Which pieces of A and of B are multiplied one after the other: only one of the two changes.
PRODUCTS = {1: ((0, 0),), 2: ((0, 0), (0, 1), (1, 1), (1, 0))}


@functools.cache
def start_sums() -> Intrinsic:
    """Return ``f(registers)``: four sums of zero."""

    def emit(builder: Any, registers: Value) -> None:
        for tile in range(4):
            zero_tile(builder, tile)

    return operation("amx start_sums", void, "i", emit)


@functools.cache
def resume_sums() -> Intrinsic:
    """Return ``f(registers, sums)``: go on with four tiles of sums in memory."""

    def emit(builder: Any, registers: Value, sums: Value) -> None:
        for tile in range(4):
            load_tile(builder, tile, sums, 64, TILE_BYTES * tile)

    return operation("amx resume_sums", void, "ii", emit)


@functools.cache
def keep_sums() -> Intrinsic:
    """Return ``f(registers, sums)``: write the four tiles to memory."""

    def emit(builder: Any, registers: Value, sums: Value) -> None:
        for tile in range(4):
            store_tile(builder, tile, sums, TILE_BYTES * tile)

    return operation("amx keep_sums", void, "ii", emit)


@functools.cache
def add_products(pieces: int) -> Intrinsic:
    """Return ``f(registers, a, b, panel_bytes)``: add 32 terms to the four sums.

    a, b: addresses of the tiles of these terms in the first of two panels, panel_bytes apart.
    """

    def emit(builder: Any, registers: Value, a: Value, b: Value, panel_bytes: Value) -> None:
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
                        load_tile(builder, tile, place, 64, TILE_BYTES * piece)
            held = pair
            for total in range(4):
                multiply_tiles(builder, "tdpbf16ps", total, 4 + total // 2, 6 + total % 2)

    return operation(f"amx add_products {pieces}", void, "iiii", emit)
