"""Products of codes by many columns of bfloat16, their weights rounded to it, on all threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gemmule.backends.cpu import amx
from gemmule.backends.cpu.amx import TILE_BYTES, TILE_ROWS, missing_tiles
from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.intrinsics import call_c, enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.simd import block_columns
from gemmule.backends.cpu.steps import A, Place, Step, Steps, X, Y, buffer, per_team
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Params
from gemmule.rungs._cpu import address
from gemmule.rungs._cpu_workspace import claimed, release, workspace
from gemmule.rungs.matmul.cpu import _tile_steps
from gemmule.rungs.matmul.cpu._tile import unpack_kernel
from gemmule.rungs.matmul.cpu._tile_blocks import GROUP, LEAST_EXPONENTS
from gemmule.rungs.matmul.cpu._tile_steps import (
    EXTREMES_BYTES,
    SHAPES,
    STEP_TERMS,
    SUMS_BYTES,
    SUMS_PITCH,
)
from gemmule.rungs.quantized.cpu._operands import Run, Stored
from gemmule.rungs.quantized.cpu.blocks import products
from gemmule.rungs.quantized.cpu.blocks.columns import turn_kernel
from gemmule.rungs.quantized.cpu.blocks.halves import pack_kernel
from gemmule.rungs.quantized.cpu.blocks.products import Kept, kept_of

# Terms at a time: two panels of x, 32 KiB, stay in the first-level cache. Columns at a time: with
# tiles and sums of the rows of a share they stay in the second-level one.
DEPTH, MOST_COLUMNS = 512, 512
_SHARES_PER_THREAD = 2
_LARGEST = 2.0**127  # below it a weight is no infinity in bfloat16


class Job(NamedTuple):
    """A product by many columns: kernels' addresses, operands, steps in bytes, sizes.

    decode, multiply, pack, unpack: of `decode_kernel`, `groups_kernel`, `pack_kernel` and of what
    stores sums. product: of a `Product`. x is packed to `packed` stretch by stretch, a panel of
    sixteen columns after the other, what is least in each noted at `noted`. refused: where a 1 is
    written if tiles would lose something of this x. exponent: the least of weights.
    """

    decode: int
    multiply: int
    pack: int
    unpack: int
    product: int
    B: int | Place
    B_row: int
    B_column: int
    packed: int | Place
    noted: int | Place
    refused: int | Place
    C: int | Place
    C_row: int
    C_column: int
    C_step: int
    m: int
    n: int
    k: int
    block: int
    padded: int
    rows: int
    exponent: int
    workspace: int


_load, _note = unpacked_as(Job), _tile_steps.note_extremes()
_put, _get = store("int64", "int64"), load("int64", "int64")
_magnitude = load("uint16", "int32")


@kernel
def pack_share(at: int, number: int) -> None:
    """Pack one panel of one stretch of x, and note its least element but 0."""
    job = _load(at)
    panels = job.padded // TILE_ROWS
    low, panel = number // panels * DEPTH, number % panels
    terms, first, noted = (
        min(DEPTH, job.k - low),
        TILE_ROWS * panel,
        job.noted + EXTREMES_BYTES * number,
    )
    nbytes = (terms + job.block - 1) // job.block * job.block * 2 * TILE_ROWS
    source = job.B + low * job.B_row + first * job.B_column
    to = job.packed + 2 * low * job.padded + panel * nbytes
    columns = max(0, min(TILE_ROWS, job.n - first))
    call_c(job.pack, (source, job.B_column, job.B_row, columns, terms, to))
    for i in range(EXTREMES_BYTES // 8):
        _put(noted, i, -1 if i < EXTREMES_BYTES // 16 else 0)
    for tile in range(nbytes // TILE_BYTES):
        _note(to + tile * TILE_BYTES, noted)
    least = _magnitude(noted, 0)
    for i in range(1, EXTREMES_BYTES // 4):
        least = min(least, _magnitude(noted, i))
    _put(noted, 0, least)


@kernel
def check_share(at: int, number: int) -> None:
    """Refuse an x that tiles would lose something of: they take subnormal numbers for zeros."""
    job = _load(at)
    stretches, least = (job.k + DEPTH - 1) // DEPTH, 1 << 16
    for i in range(stretches * job.padded // TILE_ROWS):
        least = min(least, _get(job.noted + EXTREMES_BYTES * i, 0))
    exponent = (least + 1) >> 7
    if exponent == 0 or exponent + job.exponent < LEAST_EXPONENTS:
        _put(job.refused, 0, 1)


@functools.cache
def groups_kernel() -> Kernel:
    """Return what multiplies 32 rows by all columns in a stretch, and stores them behind the last.

    ``f(registers, a, b, panel, count, width, sums, sums_step, first, C, C_column, C_step, m, n,
    unpack)``: `count` tiles of 32 terms from `a` and `b` on, panels `panel` bytes apart; sums of
    `width` groups of 32 columns lie `sums_step` bytes apart and begin at zero in the `first`
    stretch. C: m x n elements from there on; unpack: address of what stores a group, else 0.
    """
    start, resume, keep = (
        _tile_steps.start_sums(),
        _tile_steps.resume_rows(),
        _tile_steps.keep_rows(),
    )
    add = _tile_steps.add_products(1)

    @kernel
    def add_groups(
        registers: int,
        a: int,
        b: int,
        panel: int,
        count: int,
        width: int,
        sums: int,
        sums_step: int,
        first: bool,
        C: int,
        C_column: int,
        C_step: int,
        m: int,
        n: int,
        unpack: int,
    ) -> None:
        for j in range(width):
            place, right, left = sums + j * sums_step, b + 2 * j * panel, n - GROUP * j
            if first:
                start(registers)
            else:
                resume(registers, place)
            for step in range(count):
                add(registers, a + step * TILE_BYTES, right + step * TILE_BYTES, panel)
            keep(registers, place)
            if unpack != 0:
                target = C + GROUP * j * C_column
                call_c(unpack, (place, SUMS_PITCH, target, C_step, m, min(GROUP, left)))

    return add_groups


@functools.cache
def rows_kernel() -> Kernel:
    """Return ``f(words, number)``: the results of some rows in all columns."""
    configure, forget = amx.configured(*SHAPES), amx.released()

    @kernel
    def rows_share(at: int, number: int) -> None:
        job = _load(at)
        if _get(job.refused, 0) != 0:
            return
        part, begin, width = claimed(job.workspace), number * job.rows, job.padded // GROUP
        count, sums = min(job.rows, job.m - begin), part + SUMS_BYTES + 2 * GROUP * DEPTH
        apart = SUMS_BYTES if job.k > DEPTH else 0
        configure()
        for low in range(0, job.k, DEPTH):
            blocks = (min(DEPTH, job.k - low) + job.block - 1) // job.block
            terms, unpack = blocks * job.block, job.unpack if low + DEPTH >= job.k else 0
            right, panel = job.packed + 2 * low * job.padded, 2 * TILE_ROWS * terms
            for top in range(0, count, GROUP):
                row, some = begin + top, min(GROUP, count - top)
                left, place = part + SUMS_BYTES, sums + top // GROUP * width * apart
                asked = (job.product, row, some, GROUP, low // job.block, blocks, left)
                enter(job.decode, asked)
                operands = (part, left, right, panel, terms // STEP_TERMS, width)
                result = (job.C_column, job.C_step, some, job.n, unpack)
                C = job.C + row * job.C_row
                enter(job.multiply, (*operands, place, apart, int(low == 0), C, *result))
        forget()
        release(job.workspace, part)

    return rows_share


def least_exponent(parts: Stored) -> int:
    """Return the biased exponent of the least weight but 0, or less; 0 where tiles cannot serve.

    For that a weight would be subnormal, or no number, in bfloat16.
    """
    scales = np.abs(parts.scales.astype(np.float64))
    top, middle = 2**parts.bits - 1, 2.0 ** (parts.bits - 1)
    zeros = np.full(1, middle) if parts.zeros is None else parts.zeros.astype(np.float64)
    with np.errstate(all="ignore"):
        apart = np.abs(zeros - np.clip(np.rint(zeros), 0, top))
        most = np.abs(scales).max(initial=0) * np.maximum(np.abs(zeros), np.abs(top - zeros)).max()
    if not most < _LARGEST:
        return 0
    least = scales[scales > 0].min(initial=1.0) * apart[apart > 0].min(initial=1.0)
    return max(0, 126 + int(np.frexp(least)[1]))


def _products(parts: Stored) -> Callable[..., Steps]:
    """Return what makes the products of a matrix, the last ones kept."""
    exponent = least_exponent(parts)
    return per_team(functools.partial(_steps, parts.m, kept_of(parts, 0), exponent))


def _steps(
    m: int,
    ready: Kept,
    exponent: int,
    dtypes: tuple[str, str],
    sizes: tuple[int, int],
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    unit: str,
    rows: int,
) -> Steps:
    """Return the product with n columns; see `products`."""
    (k, n), (of_B, of_C), block = sizes, strides, block_columns(ready.bits)
    padded, threads = -(-n // GROUP) * GROUP, thread_count()
    wanted = -(-m // (_SHARES_PER_THREAD * threads)) if threads > 1 else m
    rows = min(rows, -(-wanted // GROUP) * GROUP)
    turned = n > 1 and of_C[1] != ITEMSIZE[dtypes[1]]
    unpack = turn_kernel(dtypes[1]) if turned else unpack_kernel(dtypes[1], "float32")
    packed_bytes = 2 * padded * -(-k // block) * block
    slots = -(-k // DEPTH) * (padded // TILE_ROWS)
    groups = rows // GROUP * (padded // GROUP) if k > DEPTH else 1
    words = Job(
        decode=ready.decode,
        multiply=groups_kernel().entry(*[int] * 15),
        pack=pack_kernel(ready.bits, unit).address(6),
        unpack=unpack.address(6),
        product=address(ready.product),
        B=X,
        B_row=of_B[0],
        B_column=of_B[1],
        packed=buffer(),
        noted=buffer(packed_bytes),
        refused=A,
        C=Y,
        C_row=of_C[0],
        C_column=of_C[1],
        C_step=of_C[1] if turned else of_C[0],
        m=m,
        n=n,
        k=k,
        block=block,
        padded=padded,
        rows=rows,
        exponent=exponent,
        workspace=workspace(2 * GROUP * DEPTH + (1 + groups) * SUMS_BYTES),
    )
    tasks = [
        Step(pack_share.address(2), slots),
        Step(check_share.address(2), 1, alone=True),
        Step(rows_kernel().address(2), -(-m // rows)),
    ]
    return Steps(tasks, words, buffer_bytes=packed_bytes + EXTREMES_BYTES * slots, kept=ready)


def bind(problem: Problem, params: Params) -> Run:
    """Return ``run(A, B, C)``; what tiles would lose something of goes to float32 registers."""
    missing_tiles("bf16")  # the system has to be asked, whoever binds
    return products.by_columns(problem, params, _products, MOST_COLUMNS, products.bind)
