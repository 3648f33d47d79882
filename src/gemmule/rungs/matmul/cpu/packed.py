"""Packed blocks and a register tile: each block of A and B is laid out for reading in order.

A tile of 12 rows by two vectors reads them in that order and keeps its 24 sums in registers: two
loads and twelve broadcasts feed 24 multiply-adds. Packing converts halves, float8 and integers to
the working dtype, so one kernel serves all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.intrinsics import call, enter
from gemmule.backends.cpu.jit import Kernel, kernel, unavailable
from gemmule.core.packing import HostPacking
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matmul.cpu._packed_operands import DEPTH, PITCH, pack, padded_lines
from gemmule.rungs.matmul.cpu._tile import (
    LINE_BYTES,
    is_narrow,
    pack_kernel,
    pack_rows_kernel,
    register_tile,
    tile_product,
    unit_axis,
    unpack_kernel,
)

Sides = tuple[bool, bool]  # of A, of B
NEITHER: Sides = (False, False)
ROWS = 480  # rows of A that meet what is packed of B
CHUNK = 120  # of them at a time: 120 x 272 float32 are a quarter of a 512 KiB second-level cache


@functools.cache
def chunk_kernel(working: str, narrow: bool, whole_rows: bool) -> Kernel:
    """Return ``f(a, b, c, height, breadth, depth, columns)``: packed rows of A by packed B.

    `blocks` calls it, and so it is the same for all dtypes in memory.

    a, b, c: addresses; columns: numbers between rows of c. Both sizes are rounded up to the tile.
    """
    tile = register_tile(working, narrow)
    tile_rows, tile_columns = tile.rows, tile.columns
    pitch = PITCH if whole_rows else 0
    multiply, number_bytes = tile_product(working, tile, pitch), ITEMSIZE[working]

    @kernel
    def multiply_chunk(
        a: int, b: int, c: int, height: int, breadth: int, depth: int, columns: int
    ) -> None:
        for j in range(0, breadth, tile_columns):
            for i in range(0, height, tile_rows):
                corner = c + (i * columns + j) * number_bytes
                sliver_a = a + i * (pitch or depth) * number_bytes
                multiply(sliver_a, b + j * depth * number_bytes, depth, corner, columns)

    return multiply_chunk


@kernel
def blocks(
    multiply: int,
    number_bytes: int,
    pack_a: int,
    pack_b: int,
    unpack: int,
    A: int,
    A_row: int,
    A_col: int,
    B: int,
    B_row: int,
    B_col: int,
    C: int,
    C_row: int,
    m: int,
    n: int,
    k: int,
    rows: int,
    columns: int,
    first: int,
    last: int,
    c_item: int,
) -> None:
    """Compute the blocks ``first:last`` of C, numbered row by row.

    multiply, number_bytes: the entry of `chunk_kernel`, the bytes of a number of its working dtype;
    pack_a, pack_b, unpack: addresses of kernels, which alone know the dtypes in memory; steps are
    in bytes; a block has `rows` x `columns` elements, multiples of the tile.

    Where pack_a or pack_b is 0 that operand was packed before (`_packed_operands`): A or B is where
    that begins, A_row or B_row how many lines it has.
    """
    sums = np.empty(rows * columns * number_bytes + LINE_BYTES, np.uint8)
    room_a = min(rows, CHUNK) * PITCH * number_bytes if pack_a != 0 else 0
    room_b = columns * DEPTH * number_bytes if pack_b != 0 else 0
    packed_a = np.empty(room_a + LINE_BYTES, np.uint8)
    packed_b = np.empty(room_b + LINE_BYTES, np.uint8)
    a, b, c = packed_a.ctypes.data, packed_b.ctypes.data, sums.ctypes.data
    # Every vector of a sliver on one line, and so those of a row of sums.
    a, b, c = -a % LINE_BYTES + a, -b % LINE_BYTES + b, -c % LINE_BYTES + c
    across = (n + columns - 1) // columns
    for block in range(first, last):
        i, j = block // across * rows, block % across * columns
        height, breadth = min(rows, m - i), min(columns, n - j)
        sums[:] = np.uint8(0)
        for p in range(0, k, DEPTH):
            depth = min(DEPTH, k - p)
            if pack_b != 0:
                call(pack_b, B + p * B_row + j * B_col, B_col, B_row, breadth, depth, b)
            else:
                b = B + (p * B_row + j * depth) * number_bytes
            for top in range(i, i + height, CHUNK):
                some = min(CHUNK, i + height - top)
                if pack_a != 0:
                    call(pack_a, A + top * A_row + p * A_col, A_row, A_col, some, depth, a)
                else:
                    a = A + (p // DEPTH * A_row + top) * PITCH * number_bytes
                at = c + (top - i) * columns * number_bytes
                enter(multiply, (a, b, at, some, breadth, depth, columns))
        call(unpack, c, columns, C + i * C_row + j * c_item, C_row, height, breadth)
    # Numba frees an array behind the place that names it last, whoever holds its address.
    sums[0] = packed_a[0] = packed_b[0] = np.uint8(0)


def chunk_entry(problem: Problem, ready: Sides = NEITHER) -> tuple[int, int]:
    """Return the first arguments of `blocks` for a problem."""
    working, narrow, whole_rows = chunk_kernel_names(problem, ready)
    return chunk_kernel(working, narrow, whole_rows).entry(*[int] * 7), ITEMSIZE[working]


def chunk_kernel_names(problem: Problem, ready: Sides = NEITHER) -> tuple[str, bool, bool]:
    """Return the arguments of `chunk_kernel` for a problem.

    The last tells whether the packing leaves rows of A whole (`pack_rows_kernel`).
    """
    working = _cpu.problem_working_dtype(problem)
    whole_rows = ready[0] or unit_axis(problem.layout_a, 0) == "depth"
    return working, is_narrow(problem.n, working), whole_rows


def pack_addresses(problem: Problem, ready: Sides = NEITHER) -> tuple[int, int, int]:
    """Return the addresses of the kernels that pack A, pack B and store C; 0 of what is packed."""
    working, narrow, whole_rows = chunk_kernel_names(problem, ready)
    tile, (pack_a, pack_b) = register_tile(working, narrow), (0, 0)
    if whole_rows and not ready[0]:
        pack_a = pack_rows_kernel(problem.a, working, tile.rows, PITCH).address(6)
    elif not ready[0]:
        unit = unit_axis(problem.layout_a, 0)
        pack_a = pack_kernel(problem.a, working, tile.rows, unit).address(6)
    if not ready[1]:
        unit = unit_axis(problem.layout_b, 1)
        pack_b = pack_kernel(problem.b, working, tile.columns, unit).address(6)
    return pack_a, pack_b, unpack_kernel(problem.out, working).address(6)


def operand_words(problem: Problem, ready: Sides) -> Callable[[Any, Any], tuple[int, ...]]:
    """Return what tells the kernel where A and B lie: address and steps, or lines, of each."""
    lines = padded_lines(problem, "a"), padded_lines(problem, "b")

    def words(A: Any, B: Any) -> tuple[int, ...]:
        of_a = (A.at, lines[0], 0) if ready[0] else (_cpu.address(A), *A.strides)
        of_b = (B.at, lines[1], 0) if ready[1] else (_cpu.address(B), *B.strides)
        return *of_a, *of_b

    return words


def block_size(m: int, n: int, working: str, columns: int, threads: int) -> tuple[int, int]:
    """Return rows and columns of a block: multiples of the tile, of even size, shared evenly.

    Blocks hold at most ROWS x `columns` elements; the columns are cut further until every thread
    gets the same number of blocks, where the tile allows it.
    """
    tile = register_tile(working, is_narrow(n, working))
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


def bind(problem: Problem, params: Params, ready: Sides = NEITHER) -> Callable[..., None]:
    """Return ``run(A, B, C)``; `ready` operands come packed."""
    working = chunk_kernel_names(problem, ready)[0]
    kernels = *chunk_entry(problem, ready), *pack_addresses(problem, ready)
    words = operand_words(problem, ready)
    m, n, k = problem.m, problem.n, problem.k
    rows, columns = block_size(m, n, working, params["columns"], threads=1)
    count = -(-m // rows) * -(-n // columns)

    def run(A: Any, B: Any, C: np.ndarray[Any, Any]) -> None:
        blocks(
            *kernels,
            *words(A, B),
            _cpu.address(C),
            C.strides[0],
            m,
            n,
            k,
            rows,
            columns,
            0,
            count,
            C.itemsize,
        )

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the rate of one core."""
    calls = problem.batch * machine.rates.call
    return Suggestion({}, calls + _cpu.packed_s(problem, machine, 1))


RUNG = CpuRung(
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
    packing=HostPacking(pack, bind),
)
