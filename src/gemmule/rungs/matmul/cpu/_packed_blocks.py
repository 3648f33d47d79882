"""The blocks of a packed product: what is packed of A and B meets in the register tile.

A block takes stretches of the depth one after the other, its float sums kept in between; a chunk of
rows whose sums are complete is stored at once, while those are in the second-level cache.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.intrinsics import call_c, enter
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.core.problem import ITEMSIZE
from gemmule.rungs._cpu_workspace import claimed, release
from gemmule.rungs.matmul.cpu._packed_operands import DEPTH, PITCH
from gemmule.rungs.matmul.cpu._tile import Tile, register_tile, tile_product

CHUNK = 120  # rows of A at a time: 120 x 272 float32 are a quarter of a 512 KiB second-level cache
_GAP = 16  # numbers between rows of sums: without it their lines meet in few sets of a cache
_LOW_SUMS = 8  # registers of a lower tile, the fewest that hide the additions' latency


@functools.cache
def chunk_kernel(working: str, narrow: bool, whole_rows: bool) -> Kernel:
    """Return ``f(a, b, c, height, breadth, depth, columns, first)``: packed rows of A by packed B.

    `block_shares` calls it, and so it is the same for all dtypes in memory.

    a, b, c: addresses; columns: numbers between rows of c; first: not 0 where c holds no sums yet.
    Both sizes are rounded up: to columns of the tile, and to rows of it or of a lower one.
    """
    tile = register_tile(working, narrow)
    low = Tile(_LOW_SUMS // tile.vectors, tile.vectors, tile.lanes)
    tile_rows, low_rows, tile_columns = tile.rows, low.rows, tile.columns
    pitch = PITCH if whole_rows else 0
    multiply = tile_product(working, tile, pitch)
    multiply_low = tile_product(working, low, pitch, tile.rows)
    number_bytes = ITEMSIZE[working]
    row_bytes = (pitch or 1) * number_bytes

    @kernel
    def multiply_chunk(
        a: int, b: int, c: int, height: int, breadth: int, depth: int, columns: int, first: int
    ) -> None:
        full = height // tile_rows * tile_rows
        if (height - full + low_rows - 1) // low_rows * low_rows >= tile_rows:
            full += tile_rows
        for j in range(0, breadth, tile_columns):
            sliver_b = b + j * depth * number_bytes
            for i in range(0, full, tile_rows):
                corner = c + (i * columns + j) * number_bytes
                sliver_a = a + i * (pitch or depth) * number_bytes
                multiply(sliver_a, sliver_b, depth, corner, columns, first)
            sliver_a = a + full * (pitch or depth) * number_bytes
            for i in range(0, height - full, low_rows):
                corner = c + ((full + i) * columns + j) * number_bytes
                multiply_low(sliver_a + i * row_bytes, sliver_b, depth, corner, columns, first)

    return multiply_chunk


class Blocks(NamedTuple):
    """A product in blocks of C, numbered row by row.

    multiply, number_bytes: the entry of `chunk_kernel`, the bytes of a number of its working dtype;
    pack_a, pack_b, unpack: addresses of kernels, which alone know the dtypes in memory; steps are
    in bytes; a block has `rows` x `columns` elements, multiples of the tile. workspace: its parts
    hold what is packed, and the sums where they take more than one stretch of the depth.

    Where pack_a or pack_b is 0 that operand was packed before (`_packed_operands`): A or B is where
    that begins, A_row or B_row how many lines it has.
    """

    multiply: int
    number_bytes: int
    pack_a: int
    pack_b: int
    unpack: int
    A: int
    A_row: int
    A_col: int
    B: int
    B_row: int
    B_col: int
    C: int
    C_row: int
    C_item: int
    m: int
    n: int
    k: int
    rows: int
    columns: int
    workspace: int


def workspace_bytes(job: Blocks) -> int:
    """Return what a block needs to work in."""
    packed_a = CHUNK * PITCH if job.pack_a else 0
    packed_b = job.columns * DEPTH if job.pack_b else 0
    sums = (job.rows if job.k > DEPTH else CHUNK) * (job.columns + _GAP)
    return (packed_a + packed_b + sums) * job.number_bytes


@kernel
def multiply_block(job: Blocks, number: int) -> None:
    """Compute one block of C."""
    part, size, deep = claimed(job.workspace), job.number_bytes, job.k > DEPTH
    pitch = job.columns + _GAP
    a = part
    b = a + (CHUNK * PITCH * size if job.pack_a != 0 else 0)
    c = b + (job.columns * DEPTH * size if job.pack_b != 0 else 0)
    across = (job.n + job.columns - 1) // job.columns
    i, j = number // across * job.rows, number % across * job.columns
    height, breadth = min(job.rows, job.m - i), min(job.columns, job.n - j)
    for p in range(0, job.k, DEPTH):
        depth = min(DEPTH, job.k - p)
        if job.pack_b != 0:
            source = job.B + p * job.B_row + j * job.B_col
            call_c(job.pack_b, (source, job.B_col, job.B_row, breadth, depth, b))
        else:
            b = job.B + (p * job.B_row + j * depth) * size
        for top in range(0, height, CHUNK):
            some = min(CHUNK, height - top)
            if job.pack_a != 0:
                source = job.A + (i + top) * job.A_row + p * job.A_col
                call_c(job.pack_a, (source, job.A_row, job.A_col, some, depth, a))
            else:
                a = job.A + (p // DEPTH * job.A_row + i + top) * PITCH * size
            sums = c + (top * pitch * size if deep else 0)
            enter(job.multiply, (a, b, sums, some, breadth, depth, pitch, int(p == 0)))
            if p + depth == job.k:
                target = job.C + (i + top) * job.C_row + j * job.C_item
                call_c(job.unpack, (sums, pitch, target, job.C_row, some, breadth))
    release(job.workspace, part)


_load = unpacked_as(Blocks)


@kernel
def block_share(at: int, number: int) -> None:
    """Compute one block of the product whose words lie at an address."""
    multiply_block(_load(at), number)
