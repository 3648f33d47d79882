"""Products across stored rows in vector registers: four rows at a time are spread over y."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import packed, unpacked, unpacked_as
from gemmule.backends.cpu.intrinsics import enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.shares import run_shares
from gemmule.backends.cpu.simd import ROWS, block_columns
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.rungs.quantized.cpu import _narrow_ops, _row_ops, _strip_kernels
from gemmule.rungs.quantized.cpu._activations import place_kernel
from gemmule.rungs.quantized.cpu._panels_job import PanelsJob
from gemmule.rungs.quantized.cpu._strip_ops import Form
from gemmule.rungs.quantized.cpu._vector_kernels import numbers_of

_index, _number = load("int32", "int32"), load("int64", "int64")
_get, _put = load("float32", "float32"), store("float32", "float32")

# Blocks of y that a panel holds: 32 KiB of 4-bit results stay in L1 while the rows stream by.
PANEL_BLOCKS = 64
# The same where a vector is two registers of AVX2: such processors have 32 KiB of L1.
NARROW_PANEL_BLOCKS = 32
# Results begin at a pair of a cache's lines, as processors fetch them: threads that write to
# neighbouring blocks would take each other's lines else.
RESULTS_ALIGNMENT = 128
# Blocks whose results one share joins, and blocks of all parts that the caller joins alone.
JOIN_BLOCKS = 16
JOIN_ALONE = 512


FIXED = PanelsJob._fields.index("x")  # words of a job that the matrix alone decides


class Spread(NamedTuple):
    """The product across the rows, and the addresses of what its shares run.

    product: (pool, helpers, share, join, x, y, n, parts, room, job): the address of room for x in
    fours and the parts' results, and that of a `PanelsJob`, whose x and y the kernel fills in, with
    `panels` behind it. share: a part of the rows, whose results `join` adds up, in shares of its
    own; columns: a part of the blocks, in place of share, with 0 in place of join and room for one
    part's results.
    on_arrays: the same, given x, y and the room as arrays. job: for a `Job` (`calls.builtin`), with
    words (pool, helpers, share, join, n, parts, floats of x in fours and what aligns the results,
    floats of a part's results, `PanelsJob`).
    """

    product: Kernel
    on_arrays: Kernel
    share: int
    join: int
    columns: int
    panels: int
    job: Kernel


_load_job, _SIZE = unpacked_as(PanelsJob), len(PanelsJob._fields)


@kernel
def _share(at: int, part: int) -> None:
    job, parts, panels = _load_job(at), _number(at, _SIZE), _number(at, _SIZE + 3)
    quads, blocks = job.m // 4 + job.m % 4, (job.row_bytes + 63) // 64
    low, high = quads * part // parts, quads * (part + 1) // parts
    sums = job.y + part * job.part_bytes
    for i in range(job.part_bytes // 4):
        _put(sums, i, np.float32(0))
    enter(panels, (job, low, high, sums, 0, blocks))


def _job(product: Kernel) -> Kernel:
    """Return `Spread.job`."""
    load_head = unpacked(9)

    @kernel
    def job(at: int, A: int, x: int, y: int) -> int:
        pool, helpers, share_at, join_at, n, parts, floats, part_floats, given = load_head(at)
        results = parts if join_at != 0 else 1
        room = np.empty(floats + results * part_floats, np.float32)
        product(pool, helpers, share_at, join_at, x, y, n, parts, room.ctypes.data, given)
        room[0] = 0  # Numba frees it behind the place that names it last
        return 0

    return job


@functools.cache
def spread_kernels(
    bits: int, pieces: int, scale_dtype: str, has_zeros: bool, lifted: bool, form: Form | None
) -> Spread:
    """Return the product of one kind of matrix, in one call from Python; form: if by strips."""
    if form is None:
        made = panels_kernel(bits, pieces, scale_dtype, has_zeros, lifted)
    else:
        made = _strip_kernels.strips_kernel(form)
    by_fours = form is None
    panels = made.entry(PanelsJob, int, int, int, int, int)
    load_words = unpacked(FIXED)

    @kernel
    def product(
        pool: int,
        helpers: int,
        share_at: int,
        join_at: int,
        x: int,
        y: int,
        n: int,
        parts: int,
        room: int,
        job: int,
    ) -> None:
        given = _load_job(job)
        quads, blocks = given.m // 4 + given.m % 4, (given.row_bytes + 63) // 64
        if by_fours:
            in_fours(x, given.m, room)
        results = -(-(room + 16 * quads) // RESULTS_ALIGNMENT) * RESULTS_ALIGNMENT
        panels_at = _number(job, _SIZE)
        steps = (given.block_step, given.part_bytes, given.lowest)
        rest = (room if by_fours else x, results, *steps, parts, y, n, panels_at)
        words = packed(load_words(job) + rest)
        run_shares(pool, helpers, share_at, words, parts)
        if join_at == 0:
            return
        joins = (blocks + JOIN_BLOCKS - 1) // JOIN_BLOCKS
        run_shares(pool, helpers if parts * blocks > JOIN_ALONE else 0, join_at, words, joins)

    @kernel
    def on_arrays(
        pool: int,
        helpers: int,
        share_at: int,
        join_at: int,
        x: Any,
        y: Any,
        n: int,
        parts: int,
        room: Any,
        job: int,
    ) -> None:
        at, to, work = x.ctypes.data, y.ctypes.data, room.ctypes.data
        product(pool, helpers, share_at, join_at, at, to, n, parts, work, job)

    kind = bits, _narrow_ops.by_words(pieces), form
    join, columns = _join_kernel(*kind).address(2), _columns_kernel(*kind).address(2)
    return Spread(product, on_arrays, _share.address(2), join, columns, panels, _job(product))


@kernel
def in_fours(x: int, m: int, room: int) -> None:
    """Write x to the room in fours, and what is left over each with three zeros."""
    full = m // 4 * 4
    for i in range(full):
        _put(room, i, _get(x, i))
    for i in range(full, m):
        at = room + 4 * full + 16 * (i - full)
        _put(at, 0, _get(x, i))
        for k in range(1, 4):
            _put(at, k, np.float32(0))


@functools.cache
def _join_kernel(bits: int, words: bool, form: Form | None) -> Kernel:
    """Return ``f(words, number)``: the sum of the parts of some blocks, in the order of columns."""
    join_blocks, load_job, size = _join_blocks(bits, words, form), _load_job, _SIZE

    @kernel
    def join(at: int, number: int) -> None:
        job, first = load_job(at), number * JOIN_BLOCKS
        end = min(first + JOIN_BLOCKS, (job.row_bytes + 63) // 64)
        join_blocks(at, _number(at, size), first, end)

    return join


@functools.cache
def _columns_kernel(bits: int, words: bool, form: Form | None) -> Kernel:
    """Return ``f(words, part)``: the whole results of one of `parts` shares of the blocks."""
    join_blocks, load_job, size = _join_blocks(bits, words, form), _load_job, _SIZE

    @kernel
    def columns(at: int, part: int) -> None:
        job, parts, panels = load_job(at), _number(at, size), _number(at, size + 3)
        blocks = (job.row_bytes + 63) // 64
        first, end = blocks * part // parts, blocks * (part + 1) // parts
        for i in range(first * job.block_step // 4, end * job.block_step // 4):
            _put(job.y, i, np.float32(0))
        enter(panels, (job, 0, job.m // 4 + job.m % 4, job.y, first, end))
        join_blocks(at, 1, first, end)

    return columns


@functools.cache
def _join_blocks(bits: int, words: bool, form: Form | None) -> Kernel:
    """Return ``f(words, parts, first, end)``: blocks' results of all parts, summed, to y."""
    columns = block_columns(bits)
    load_job, size = _load_job, _SIZE
    if form is None:
        in_columns = _sums_in_columns(bits, words)
    else:
        in_columns = _strip_kernels.sums_in_columns(form)

    @kernel
    def join(at: int, parts: int, first: int, end: int) -> None:
        job, y, n = load_job(at), _number(at, size + 1), _number(at, size + 2)
        for block in range(first, end):
            sums = job.y + block * job.block_step
            for part in range(1, parts):
                for i in range(columns):
                    _put(sums, i, _get(sums, i) + _get(sums + part * job.part_bytes, i))
            low = block * columns
            in_columns(sums, min(columns, n - low), y + 4 * low)

    return join


@functools.cache
def _sums_in_columns(bits: int, words: bool) -> Kernel:
    """Return ``f(sums, count, y)``: write a block's results to y, in the order of columns."""
    place_of = place_kernel(bits, words)

    @kernel
    def in_columns(sums: int, count: int, y: int) -> None:
        for column in range(count):
            _put(y, column, _get(sums, place_of(column)))

    return in_columns


@functools.cache
def panels_kernel(
    bits: int, pieces: int, scale_dtype: str, has_zeros: bool, lifted: bool
) -> Kernel:
    """Return ``f(job, first quad, end, y, left, right)``: rows added to y in blocks left:right."""
    kind = bits, pieces, scale_dtype, has_zeros, ROWS, lifted
    load_scales, load_zeros = numbers_of(*kind, whole=True)
    tail_scales, tail_zeros = numbers_of(*kind, whole=False)
    if has_wide_vectors():
        spread, at_once = _row_ops.spread_products(bits, pieces != 1, lifted=lifted), PANEL_BLOCKS
    else:
        form = _narrow_ops.Form(_narrow_ops.by_words(pieces), lifted)
        spread, at_once = _narrow_ops.spread_products(bits, form), NARROW_PANEL_BLOCKS
    load_blocks, load_words = _row_ops.load_blocks(ROWS), _row_ops.load_words
    times, ask_for = _row_ops.times_numbers, _row_ops.ask_for(ROWS)

    @kernel
    def panels(job: PanelsJob, first: int, end: int, y: int, left: int, right: int) -> None:
        whole, quads = job.row_bytes // 64, job.m // 4
        for low in range(left, right, at_once):
            high = min(right, low + at_once)
            for quad in range(first, end):
                step = 1 if quad < quads else 0  # 0: one row, three times with x = 0
                row = 4 * quad if quad < quads else 4 * quads + (quad - quads)
                code_step, scale_step = step * job.row_bytes, step * job.scale_step
                codes, place = job.codes + row * job.row_bytes, row * job.scale_step
                x = job.x + 16 * quad
                for block in range(low, min(whole, high)):
                    at, group = codes + 64 * block, _index(job.first, block)
                    ask_for(at + 4 * job.row_bytes, code_step)
                    words, lanes = load_blocks(at, code_step), job.lanes + 64 * block
                    index, count = place + group, job.groups - group
                    scales = load_scales(job.scales, index, scale_step, count, lanes)
                    zeros = load_zeros(job.zeros, index, scale_step, count, lanes)
                    to = y + block * job.block_step
                    spread(times(scales, x), zeros, words, to, job.lowest)
                if low <= whole < high:
                    at, group = codes + 64 * whole, _index(job.first, whole)
                    words = load_words(at, code_step, job.row_bytes - 64 * whole)
                    index, count, lanes = place + group, job.groups - group, job.lanes + 64 * whole
                    scales = tail_scales(job.scales, index, scale_step, count, lanes)
                    zeros = tail_zeros(job.zeros, index, scale_step, count, lanes)
                    to = y + whole * job.block_step
                    spread(times(scales, x), zeros, words, to, job.lowest)

    return panels
