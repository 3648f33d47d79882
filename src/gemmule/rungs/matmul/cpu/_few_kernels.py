"""Kernels of products with few columns: the columns made ready, shares of rows, results stored.

The few lie in B or, seen transposed, in A: here the large matrix is A and the few are columns of x.
"""

from __future__ import annotations

import functools

import numpy as np

from gemmule.backends.cpu.intrinsics import enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.rungs.matmul.cpu._few_tiles import (
    LINE_BYTES,
    STEP,
    lanes,
    tile_across,
    tile_along,
    tile_rows,
    tile_vectors,
)

AHEAD_BYTES = 2048
LINES = 16  # lines of A that meet sums in memory between a load and a store of those
PANEL_BYTES = 64 << 10  # of sums across rows, which stay in the second-level cache


@functools.cache
def ready_kernel(x: str, columns: int, along: bool, pairs: bool) -> Kernel:
    """Return ``ready(x, x_k, x_j, out, n, k, first, last)``: some steps of all columns as float32.

    x_k, x_j: bytes between terms and between columns. Of each group of `columns`, step by step,
    STEP terms of a column and then of the next, or all columns of a term where not `along`; what
    is not there is 0. pairs: even terms come before odd ones, as bfloat16 are widened.
    """
    read, write = load(x, "float32"), store("float32", "float32")
    width, term, column = lanes(), 1 if along else columns, STEP if along else 1

    @kernel
    def ready(x: int, x_k: int, x_j: int, out: int, n: int, k: int, first: int, last: int) -> None:
        blocks = (k + STEP - 1) // STEP
        for group in range((n + columns - 1) // columns):
            some = min(columns, n - columns * group)
            for block in range(first, last):
                to = out + (group * blocks + block) * (4 * STEP * columns)
                at = x + columns * group * x_j + STEP * block * x_k
                terms = min(STEP, k - STEP * block)
                whole = terms == STEP and some == columns
                for i in range(STEP):
                    place = i
                    if pairs:
                        place = i // (2 * width) * 2 * width + i % 2 * width + i % (2 * width) // 2
                    put_at, here = to + 4 * place * term, at + i * x_k
                    if whole:  # a number of columns known when this is compiled
                        for j in range(columns):
                            write(put_at, j * column, read(here + j * x_j, 0))
                        continue
                    for j in range(columns):
                        value = np.float32(0)
                        if i < terms and j < some:
                            value = read(here + j * x_j, 0)
                        write(put_at, j * column, value)

    return ready


@functools.cache
def put_kernel(out: str) -> Kernel:
    """Return ``put(sums, row, column, C, C_row, C_col, rows, columns)``: store sums in dtype `out`.

    row, column: numbers between sums; C_row, C_col: bytes between elements.
    """
    read, write = load("float32", "float32"), store(out, "float32")

    @kernel
    def put(
        sums: int, row: int, column: int, C: int, C_row: int, C_col: int, rows: int, columns: int
    ) -> None:
        for j in range(columns):
            for i in range(rows):
                write(C + i * C_row + j * C_col, 0, read(sums, i * row + j * column))

    return put


@functools.cache
def along_kernel(a: str, columns: int) -> Kernel:
    """Return ``along(A, step, x, C, C_row, C_col, put, n, k, first, last, 0, k)``: rows of C.

    Rows of a tile lie a part of the share apart, so that each is of a stretch read in order.
    """
    rows = tile_rows(columns)
    tile, room = tile_along(a, rows, columns), -(-rows * columns // lanes()) * lanes()

    @kernel
    def along(
        A: int,
        step: int,
        x: int,
        C: int,
        C_row: int,
        C_col: int,
        put: int,
        n: int,
        k: int,
        first: int,
        last: int,
        begin: int,
        end: int,
    ) -> None:
        held = np.empty(room, np.float32)
        sums = held.ctypes.data
        steps, tail, row_bytes = k // STEP, k % STEP, max(2 * k, 1)
        group_bytes = (k + STEP - 1) // STEP * (4 * STEP * columns)
        ahead, turn = AHEAD_BYTES, steps - AHEAD_BYTES // 64
        jump = ahead + step - row_bytes
        if row_bytes < AHEAD_BYTES:  # whole rows ahead
            ahead = jump = (AHEAD_BYTES // row_bytes + 1) * step
        stretch = (last - first) // rows
        left = last - first - stretch * rows
        turns = stretch + (min(left, 1) if stretch > 0 else left)
        for i in range(turns):
            row, apart = first + i, stretch
            if i >= stretch:  # what no stretch holds: the last rows once more, or one by one
                row, apart = (last - rows, 1) if stretch > 0 else (row, 0)
            for group in range((n + columns - 1) // columns):
                near = 0 if group == 0 else 1
                tile(
                    A + row * step,
                    apart * step,
                    x + group * group_bytes,
                    steps,
                    tail,
                    0 if near else ahead,
                    turn,
                    0 if near else jump,
                    sums,
                )
                corner = C + row * C_row + columns * group * C_col
                some = min(columns, n - columns * group)
                enter(put, (sums, columns, 1, corner, apart * C_row, C_col, rows, some))

    return along


@functools.cache
def across_kernel(a: str, columns: int) -> Kernel:
    """Return ``across(A, step, x, C, C_row, C_col, put, n, k, first, last, begin, end)``.

    Rows of C by the terms ``begin:end``. step: bytes between lines of A, in which its rows lie
    side by side, a tile's at least: the last tile of what is not whole tiles meets some once more.
    """
    vectors, width = tile_vectors(columns), lanes()
    unit, pairs, tile = vectors * width, a == "bfloat16", tile_across(a, vectors, columns)

    @kernel
    def across(
        A: int,
        step: int,
        x: int,
        C: int,
        C_row: int,
        C_col: int,
        put: int,
        n: int,
        k: int,
        first: int,
        last: int,
        begin: int,
        end: int,
    ) -> None:
        groups, terms = (n + columns - 1) // columns, (k + STEP - 1) // STEP * STEP
        panel = max(PANEL_BYTES // (4 * columns * groups) // unit, 1) * unit
        held = np.empty((panel + unit) * columns * groups, np.float32)
        place, tile_bytes = held.ctypes.data, 4 * unit * columns
        sums = -place % LINE_BYTES + place
        for low in range(first, last, panel):
            size = min(panel, last - low)
            held[:] = np.float32(0)
            tiles = (size + unit - 1) // unit
            for p in range(begin, end, LINES):
                count = min(LINES, end - p)
                for t in range(tiles):
                    at = A + 2 * (low + min(t * unit, size - unit)) + p * step
                    for group in range(groups):
                        ahead = LINES * step if group == 0 and p + LINES < end else 0
                        factors = x + (group * terms + p) * columns * 4
                        tile(
                            at,
                            step,
                            factors,
                            count,
                            ahead,
                            sums + (t * groups + group) * tile_bytes,
                        )
            for t in range(tiles):
                row = low + min(t * unit, size - unit)
                for group in range(groups):
                    some, here = min(columns, n - columns * group), t * groups + group
                    here = sums + here * tile_bytes
                    corner = C + row * C_row + columns * group * C_col
                    if not pairs:
                        enter(put, (here, 1, unit, corner, C_row, C_col, unit, some))
                        continue
                    for i in range(vectors):  # the even ones of two registers, then the odd ones
                        place = corner + (i // 2 * 2 * width + i % 2) * C_row
                        part = (here + 4 * width * i, 1, unit, place, 2 * C_row, C_col, width, some)
                        enter(put, part)

    return across
