"""Products along stored rows in vector registers: the loop that float and integer rungs share."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gemmule.backends.cpu import simd, target
from gemmule.backends.cpu.intrinsics import load, prefetch
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel
from gemmule.backends.cpu.pool import Pooled
from gemmule.rungs.quantized.cpu import _narrow_ops, _row_ops
from gemmule.rungs.quantized.cpu._integers import add_integer_products
from gemmule.rungs.quantized.cpu._lifted import LIFT
from gemmule.rungs.quantized.cpu._quad_ops import BLOCKS, add_quads, quad_numbers
from gemmule.rungs.quantized.cpu._tasks import in_tasks

_index = load("int32", "int32")

# Rows at once that meet one column. A processor prefetches best what is read in order, in few
# places, page after page, so they lie half a share apart: each belongs to a stretch that is read
# from end to end. GB/s, cold, two cores of a Xeon with AVX-512, November 2026, 4096, 8192, 16384
# columns, int4 with 8-bit activations: four neighbouring rows, each line asked for twice, 26.0,
# 27.2, 24.5; one stretch, a page and 1 KiB ahead, 29.3, 27.9, 31.7; two, 3 KiB ahead, 29.3, 31.9,
# 34.5, 2.5 KiB 29.3, 32.2, 33.8, 4 KiB 28.6, 30.4, 31.1; four, 2 KiB ahead, 27.6, 27.3, 27.7.
STRETCHES = 2
AHEAD_BYTES = 3072

# Activations of one chunk of a panel: they stay in L1 beside the totals.
CHUNK_BYTES = 16384


class RowsJob(NamedTuple):
    """What one product along the rows works on: addresses, and steps in bytes or elements.

    x holds ``panels`` panels, each with ``block_step`` bytes for every block; y has one row of
    ``y_step`` bytes for every row of codes and ``panel_bytes`` of it for every panel. scale_step
    counts elements. lowest: `_lifted.LOWEST_BYTES`.
    """

    codes: int
    row_bytes: int
    m: int
    scales: int
    zeros: int
    scale_step: int
    groups: int
    first: int
    lanes: int
    x: int
    block_step: int
    panels: int
    y: int
    y_step: int
    panel_bytes: int
    lowest: int


class RowsKernels(NamedTuple):
    """A kernel over rows ``first:end``, and in tasks: words (the job, rows per task)."""

    rows: Kernel
    tasks: Pooled


@functools.cache
def rows_kernels(
    bits: int,
    columns: int,
    pieces: int,
    scale_dtype: str,
    has_zeros: bool,
    integers: bool,
    lifted: bool = False,
    quads: int = 0,
) -> RowsKernels:
    """Return the kernels for one kind of matrix and `columns` columns of activations at once.

    pieces: see `_operands.Blocks`; lifted: see `_row_ops.add_products`; quads: see
    `_quad_ops.quad_pieces`, for one column of integers alone.
    """
    if quads > 0:
        rows = _quads_kernel(quads, scale_dtype, has_zeros)
        return RowsKernels(rows, in_tasks(rows, RowsJob))
    at_once = stretches(integers) if columns == 1 else simd.ROWS
    kind = bits, pieces, scale_dtype, has_zeros, at_once, lifted
    tail = numbers_of(*kind, whole=False)
    if columns == 1:
        add = _one_column(bits, pieces, has_zeros, integers, lifted)
        rows = _rows_kernel(numbers_of(*kind, whole=True), tail, add, at_once)
    else:
        if integers:
            add = add_integer_products(bits, columns, has_zeros, at_once)
        else:
            add = _row_ops.add_products(bits, columns, pieces != 1, at_once)
        rows = _tiles_kernel(*tail, add, columns)
    return RowsKernels(rows, in_tasks(rows, RowsJob))


def _one_column(bits: int, pieces: int, has_zeros: bool, integers: bool, lifted: bool) -> Intrinsic:
    """Return what adds a block's products with one column."""
    if target.has_wide_vectors():
        if integers:
            return add_integer_products(bits, 1, has_zeros, STRETCHES)
        return _row_ops.add_products(bits, 1, pieces != 1, STRETCHES, lifted=lifted)
    if integers:
        return _narrow_ops.add_integer_products(bits, has_zeros, STRETCHES)
    form = _narrow_ops.Form(_narrow_ops.by_words(pieces), lifted)
    return _narrow_ops.add_products(bits, stretches(integers), form)


def stretches(integers: bool) -> int:
    """Return how many rows meet one column at once: four where AVX2 spends much on each's end."""
    return STRETCHES if integers or target.has_wide_vectors() else 2 * STRETCHES


def numbers_of(
    bits: int,
    pieces: int,
    scale_dtype: str,
    has_zeros: bool,
    rows: int,
    lifted: bool,
    *,
    whole: bool,
) -> tuple[Intrinsic, Intrinsic]:
    """Return the operations that give the rows' scales and zero points in a block.

    whole: in blocks that a row fills, whose groups AVX2 takes by broadcasts. lifted: zero points
    are wanted plus 2^23, and stored so.
    """
    if whole and pieces > 1 and not target.has_wide_vectors():
        make = functools.partial(_narrow_ops.whole_block_numbers, pieces=pieces, rows=rows)
    else:
        make = functools.partial(_row_ops.group_numbers, per_lane=pieces != 1, rows=rows)
    fixed = 2.0 ** (bits - 1) + (LIFT if lifted else 0)
    zeros = make("float32") if has_zeros else _row_ops.fixed_numbers(fixed, rows)
    return make(scale_dtype), zeros


Numbers = tuple[Intrinsic, Intrinsic]


def _quads_kernel(pieces: int, scale_dtype: str, has_zeros: bool) -> Kernel:
    """Return a `_rows_kernel` by quads."""
    fixed = _row_ops.fixed_numbers(0.0, STRETCHES)  # taken off in integers

    def numbers(whole: bool) -> Numbers:
        scales = quad_numbers(scale_dtype, pieces, STRETCHES, whole=whole)
        zeros = quad_numbers("float32", pieces, STRETCHES, whole=whole)
        return scales, zeros if has_zeros else fixed

    add = add_quads(pieces, STRETCHES, has_zeros=has_zeros)
    return _rows_kernel(numbers(True), numbers(False), add, STRETCHES, BLOCKS)


def _rows_kernel(
    whole_numbers: Numbers, tail_numbers: Numbers, add: Intrinsic, at_once: int, blocks: int = 1
) -> Kernel:
    """Return ``f(job, first, end)``; blocks: how many `add` takes at once, of each row."""
    load_scales, load_zeros = whole_numbers
    tail_scales, tail_zeros = tail_numbers
    no_totals, store_sums = _row_ops.zeros_of(at_once), _row_ops.store_sums(1, at_once)
    load_words = _row_ops.load_words_of(at_once, blocks)
    load_blocks = _row_ops.load_blocks(at_once, blocks)
    ask_for, length = _row_ops.ask_for(at_once, blocks), simd.BLOCK_BYTES * blocks

    # In one kernel: each call of another would take a job's words and its vectors through memory.
    @kernel
    def rows(job: RowsJob, first: int, end: int) -> None:
        whole, left = job.row_bytes // length, job.row_bytes % length
        full = (end - first) // at_once
        for number in range(end - first - full * (at_once - 1)):
            # What is left when all stretches are as long are single rows, which meet themselves.
            step = full if number < full else 0
            row = first + number + (0 if number < full else full * (at_once - 1))
            start, code_step = job.codes + row * job.row_bytes, step * job.row_bytes
            place, scale_step = row * job.scale_step, step * job.scale_step
            totals = no_totals()
            for i in range(whole):
                at, group = start + length * i, _index(job.first, blocks * i)
                ask_for(at + AHEAD_BYTES, code_step)
                words, lanes = load_blocks(at, code_step), job.lanes + length * i
                index, count = place + group, job.groups - group
                scales = load_scales(job.scales, index, scale_step, count, lanes)
                zeros = load_zeros(job.zeros, index, scale_step, count, lanes)
                x = job.x + i * job.block_step
                totals = add(totals, scales, zeros, words, x, job.lowest)
            if left > 0:
                at, group = start + length * whole, _index(job.first, blocks * whole)
                words, lanes = load_words(at, code_step, left), job.lanes + length * whole
                index, count = place + group, job.groups - group
                scales = tail_scales(job.scales, index, scale_step, count, lanes)
                zeros = tail_zeros(job.zeros, index, scale_step, count, lanes)
                x = job.x + whole * job.block_step
                totals = add(totals, scales, zeros, words, x, job.lowest)
            store_sums(totals, job.y + row * job.y_step, step * job.y_step)

    return rows


def _tiles_kernel(
    load_scales: Intrinsic, load_zeros: Intrinsic, add: Intrinsic, columns: int
) -> Kernel:
    """Like `_rows_kernel`, with x taken in chunks that stay in L1 while all rows of a task pass.

    The totals wait in memory between two chunks.
    """
    count = simd.ROWS * columns
    load_totals, store_totals = _row_ops.load_totals(count), _row_ops.store_totals(count)
    store_sums, load_words = _row_ops.store_sums(columns), _row_ops.load_words

    @kernel
    def tiles(job: RowsJob, first: int, end: int) -> None:
        blocks = (job.row_bytes + 63) // 64
        chunk = max(1, CHUNK_BYTES // job.block_step)
        full, left = (end - first) // 4, (end - first) % 4
        kept = np.empty((full + left) * count * 16, np.float32)
        for panel in range(job.panels):
            kept[:] = 0
            for low in range(0, blocks, chunk):
                high = min(blocks, low + chunk)
                for quad in range(full + left):
                    step = 1 if quad < full else 0  # 0: one row, four times
                    row = first + (4 * quad if quad < full else 3 * full + quad)
                    code_step, scale_step = step * job.row_bytes, step * job.scale_step
                    place = kept.ctypes.data + quad * count * 64
                    totals = load_totals(place)
                    for block in range(low, high):
                        at = job.codes + row * job.row_bytes + 64 * block
                        if panel == 0:
                            soon = at + 64 * chunk
                            prefetch(soon)
                            prefetch(soon + code_step)
                            prefetch(soon + 2 * code_step)
                            prefetch(soon + 3 * code_step)
                        words = load_words(at, code_step, job.row_bytes - 64 * block)
                        group = _index(job.first, block)
                        index = row * job.scale_step + group
                        groups, lanes = job.groups - group, job.lanes + 64 * block
                        scales = load_scales(job.scales, index, scale_step, groups, lanes)
                        zeros = load_zeros(job.zeros, index, scale_step, groups, lanes)
                        x = job.x + (panel * blocks + block) * job.block_step
                        totals = add(totals, scales, zeros, words, x, job.lowest)
                    if high == blocks:
                        y = job.y + row * job.y_step + panel * job.panel_bytes
                        store_sums(totals, y, step * job.y_step)
                    else:
                        store_totals(totals, place)

    return tiles
