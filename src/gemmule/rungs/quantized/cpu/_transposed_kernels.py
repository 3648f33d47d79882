"""Products across stored rows in vector registers: four rows at a time are spread over y."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import packed, unpacked, unpacked_as
from gemmule.backends.cpu.intrinsics import enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.shares import run_shares
from gemmule.backends.cpu.simd import LANES, ROWS, block_columns, has_wide_vectors
from gemmule.rungs.quantized.cpu import _narrow_ops, _row_ops
from gemmule.rungs.quantized.cpu._vector_kernels import numbers_of

_index, _number = load("int32", "int32"), load("int64", "int64")
_get, _put = load("float32", "float32"), store("float32", "float32")

# Blocks of y that a panel holds: 32 KiB of 4-bit results stay in L1 while the rows stream by.
PANEL_BLOCKS = 64
# The same where a vector is two registers of AVX2: such processors have 32 KiB of L1.
NARROW_PANEL_BLOCKS = 32
# Blocks whose results one share joins, and blocks of all parts that the caller joins alone.
JOIN_BLOCKS = 16
JOIN_ALONE = 512


class PanelsJob(NamedTuple):
    """What one product across the rows works on; the steps of scales count elements.

    x: ``(quads, 4)`` float32, four rows each, then the rows left over, each with three zeros.
    y: results of ``part_bytes`` each in the order of the lanes, one for each part.
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
    y: int
    block_step: int
    part_bytes: int


FIXED = PanelsJob._fields.index("x")  # words of a job that the matrix alone decides


class Spread(NamedTuple):
    """The product across the rows, and the addresses of its two steps in shares.

    product: (pool, helpers, share, join, x, y, n, parts, room, job): the address of room for x in
    fours and the parts' results, and that of a `PanelsJob`, whose x and y the kernel fills in, with
    `panels` behind it.
    on_arrays: the same, given x, y and the room as arrays. job: for a `Job` (`calls.builtin`), with
    words (pool, helpers, share, join, n, parts, floats of x in fours, floats of a part's results,
    `PanelsJob`).
    """

    product: Kernel
    on_arrays: Kernel
    share: int
    join: int
    panels: int
    job: Kernel


_load_job, _SIZE = unpacked_as(PanelsJob), len(PanelsJob._fields)


@kernel
def _share(at: int, part: int) -> None:
    job, parts, panels = _load_job(at), _number(at, _SIZE), _number(at, _SIZE + 3)
    quads = job.m // 4 + job.m % 4
    low, high = quads * part // parts, quads * (part + 1) // parts
    sums = job.y + part * job.part_bytes
    for i in range(job.part_bytes // 4):
        _put(sums, i, np.float32(0))
    enter(panels, (job, low, high, sums))


def _job(product: Kernel) -> Kernel:
    """Return `Spread.job`."""
    load_head = unpacked(9)

    @kernel
    def job(at: int, A: int, x: int, y: int) -> int:
        pool, helpers, share_at, join_at, n, parts, floats, part_floats, given = load_head(at)
        room = np.empty(floats + parts * part_floats, np.float32)
        product(pool, helpers, share_at, join_at, x, y, n, parts, room.ctypes.data, given)
        room[0] = 0  # Numba frees it behind the place that names it last
        return 0

    return job


@functools.cache
def spread_kernels(bits: int, pieces: int, scale_dtype: str, has_zeros: bool) -> Spread:
    """Return the product of one kind of matrix, in one call from Python."""
    panels = panels_kernel(bits, pieces, scale_dtype, has_zeros).entry(PanelsJob, int, int, int)
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
        in_fours(x, given.m, room)
        results = room + 16 * quads
        panels_at = _number(job, _SIZE)
        rest = (room, results, given.block_step, given.part_bytes, parts, y, n, panels_at)
        words = packed(load_words(job) + rest)
        run_shares(pool, helpers, share_at, words, parts)
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

    steps = _share.address(2), _join_kernel(bits).address(2)
    return Spread(product, on_arrays, *steps, panels, _job(product))


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
def _join_kernel(bits: int) -> Kernel:
    """Return ``f(words, number)``: the sum of the parts of some blocks, in the order of columns."""
    columns = block_columns(bits)
    load_job, size, width = _load_job, _SIZE, columns // LANES

    @kernel
    def join(at: int, number: int) -> None:
        job, parts = load_job(at), _number(at, size)
        y, n = _number(at, size + 1), _number(at, size + 2)
        first = number * JOIN_BLOCKS
        for block in range(first, min(first + JOIN_BLOCKS, (job.row_bytes + 63) // 64)):
            sums = job.y + block * job.block_step
            for part in range(1, parts):
                for i in range(columns):
                    _put(sums, i, _get(sums, i) + _get(sums + part * job.part_bytes, i))
            low = block * columns
            for lane in range(LANES):
                for k in range(min(width, n - low - lane * width)):
                    _put(y, low + lane * width + k, _get(sums, k * LANES + lane))

    return join


@functools.cache
def panels_kernel(bits: int, pieces: int, scale_dtype: str, has_zeros: bool) -> Kernel:
    """Return ``f(job, first quad, end, y)`` for one kind of matrix: rows added to y."""
    load_scales, load_zeros = numbers_of(bits, pieces, scale_dtype, has_zeros, ROWS, whole=True)
    tail_scales, tail_zeros = numbers_of(bits, pieces, scale_dtype, has_zeros, ROWS, whole=False)
    if has_wide_vectors():
        spread, at_once = _row_ops.spread_products(bits, pieces != 1), PANEL_BLOCKS
    else:
        spread, at_once = _narrow_ops.spread_products(bits), NARROW_PANEL_BLOCKS
    load_blocks, load_words = _row_ops.load_blocks(ROWS), _row_ops.load_words
    times, ask_for = _row_ops.times_numbers, _row_ops.ask_for(ROWS)

    @kernel
    def panels(job: PanelsJob, first: int, end: int, y: int) -> None:
        blocks, whole = (job.row_bytes + 63) // 64, job.row_bytes // 64
        quads = job.m // 4
        for low in range(0, blocks, at_once):
            for quad in range(first, end):
                step = 1 if quad < quads else 0  # 0: one row, three times with x = 0
                row = 4 * quad if quad < quads else 4 * quads + (quad - quads)
                code_step, scale_step = step * job.row_bytes, step * job.scale_step
                codes, place = job.codes + row * job.row_bytes, row * job.scale_step
                x = job.x + 16 * quad
                for block in range(low, min(whole, low + at_once)):
                    at, group = codes + 64 * block, _index(job.first, block)
                    ask_for(at + 4 * job.row_bytes, code_step)
                    words, lanes = load_blocks(at, code_step), job.lanes + 64 * block
                    index, count = place + group, job.groups - group
                    scales = load_scales(job.scales, index, scale_step, count, lanes)
                    zeros = load_zeros(job.zeros, index, scale_step, count, lanes)
                    spread(times(scales, x), zeros, words, y + block * job.block_step)
                if whole < blocks <= low + at_once:
                    at, group = codes + 64 * whole, _index(job.first, whole)
                    words = load_words(at, code_step, job.row_bytes - 64 * whole)
                    index, count, lanes = place + group, job.groups - group, job.lanes + 64 * whole
                    scales = tail_scales(job.scales, index, scale_step, count, lanes)
                    zeros = tail_zeros(job.zeros, index, scale_step, count, lanes)
                    spread(times(scales, x), zeros, words, y + whole * job.block_step)

    return panels
