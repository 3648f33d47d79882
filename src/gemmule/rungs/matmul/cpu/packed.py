"""Packed blocks and a register tile: each block of A and B is laid out for reading in order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.intrinsics import load, store
from gemmule.backends.jit import Kernel, kernel, unavailable
from gemmule.problem import ITEMSIZE, Problem
from gemmule.rung import Machine, Params, Rung, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matmul.cpu._tile import pack_kernel, register_tile, tile_product, unit_axis

ROWS = 480  # rows of A in a block: 480 x 256 float32 are half of a 1 MiB second-level cache
DEPTH = 256  # a sliver of B, 32 x 256 float32, is most of a 48 KiB first-level cache


@functools.cache
def block_kernel(a: str, b: str, c: str, working: str, unit_a: str, unit_b: str) -> Kernel:
    """Return the kernel that computes the blocks ``first:last`` of C, numbered row by row.

    ``blocks(A, A_row, A_col, B, B_row, B_col, C, C_row, m, n, k, rows, columns, first, last)``;
    the steps are in bytes; a block has `rows` x `columns` elements, both multiples of the tile.
    """
    tile = register_tile(working)
    tile_rows, tile_columns = tile.rows, tile.columns
    multiply = tile_product(working, tile)
    pack_a = pack_kernel(a, working, tile_rows, unit_a)
    pack_b = pack_kernel(b, working, tile_columns, unit_b)
    read, write = load(working, working), store(c, working)
    number, number_bytes = np.dtype(working).type, ITEMSIZE[working]

    @kernel
    def blocks(
        A: int, A_row: int, A_col: int, B: int, B_row: int, B_col: int, C: int, C_row: int,
        m: int, n: int, k: int, rows: int, columns: int, first: int, last: int,
    ) -> None:  # fmt: skip
        sums = np.empty(rows * columns, number)
        packed_a = np.empty(rows * DEPTH, number)
        packed_b = np.empty(columns * DEPTH, number)
        a, b, c = packed_a.ctypes.data, packed_b.ctypes.data, sums.ctypes.data
        across = (n + columns - 1) // columns
        for block in range(first, last):
            i, j = block // across * rows, block % across * columns
            height, breadth = min(rows, m - i), min(columns, n - j)
            sums[:] = number(0)
            for p in range(0, k, DEPTH):
                depth = min(DEPTH, k - p)
                pack_a(A + i * A_row + p * A_col, A_row, A_col, height, depth, a)
                pack_b(B + p * B_row + j * B_col, B_col, B_row, breadth, depth, b)
                for jj in range(0, breadth, tile_columns):
                    for ii in range(0, height, tile_rows):
                        corner = c + (ii * columns + jj) * number_bytes
                        sliver_a = a + ii * depth * number_bytes
                        sliver_b = b + jj * depth * number_bytes
                        multiply(sliver_a, sliver_b, depth, corner, columns)
            for ii in range(height):
                for jj in range(breadth):
                    value = read(c + ii * columns * number_bytes, jj)
                    write(C + (i + ii) * C_row, j + jj, value)

    return blocks


def block_size(m: int, n: int, working: str, columns: int, threads: int) -> tuple[int, int]:
    """Return rows and columns of a block: multiples of the tile, of even size, shared evenly.

    Blocks hold at most ROWS x `columns` elements; the columns are cut further until every thread
    gets the same number of blocks, where the tile allows it.
    """
    tile = register_tile(working)
    down, across = max(-(-m // ROWS), 1), max(-(-n // columns), 1)
    most = max(-(-n // tile.columns), 1)
    if down * across < 4 * threads:
        even = range(across, min(most, across + threads) + 1)
        across = next((c for c in even if down * c % threads == 0), across)
    if down * across < threads:  # few columns: cut the rows instead
        down = min(threads, max(-(-m // tile.rows), 1))
    rows = _round_up(-(-m // down), tile.rows)
    return rows, _round_up(-(-n // across), tile.columns)


def _round_up(size: int, multiple: int) -> int:
    return max(-(-size // multiple), 1) * multiple


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, B, C)``."""
    working = _cpu.problem_working_dtype(problem)
    units = (unit_axis(problem.layout_a, 0), unit_axis(problem.layout_b, 1))
    blocks = block_kernel(problem.a, problem.b, problem.out, working, *units)
    m, n, k = problem.m, problem.n, problem.k
    rows, columns = block_size(m, n, working, params["columns"], threads=1)
    count = -(-m // rows) * -(-n // columns)

    def run(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> None:
        blocks(
            _cpu.address(A), *A.strides, _cpu.address(B), *B.strides, _cpu.address(C), C.strides[0],
            m, n, k, rows, columns, 0, count,
        )  # fmt: skip

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the measured rate of one core (EPYC Zen 5, 2026-11)."""
    rate = _cpu.packed_rate(problem)
    return Suggestion({}, _cpu.SERIAL_CALL_S + problem.flops / rate + 2 * _cpu.copy_s(problem))


RUNG = Rung(
    title="Packed blocks",
    idea="Blocks are copied into the order the tile reads; the tile of C lives in registers.",
    source="Goto and van de Geijn 2008; BLIS, Van Zee and van de Geijn 2015",
    op="matmul",
    signatures=(*_cpu.SIGNATURES, *_cpu.FLOAT8_SIGNATURES),
    layouts=("row", "col", "strided"),
    layouts_b=("row", "col", "strided"),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="cache_blocks",
    params={"columns": (1024, 512, 2048)},
    suggest=suggest,
    bind=bind,
    available=unavailable,
)
