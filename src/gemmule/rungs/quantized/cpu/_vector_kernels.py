"""Products along stored rows in vector registers: the loop that float and integer rungs share."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gemmule.backends.intrinsics import load, prefetch, store
from gemmule.backends.jit import Intrinsic, Kernel, kernel, prange
from gemmule.rungs.quantized.cpu import _row_ops, _simd
from gemmule.rungs.quantized.cpu._integers import (
    ACTIVATION_GROUP,
    add_integer_products,
    planes,
    record_bytes,
)

_index = load("int32", "int32")
_get = load("float32", "float32")
_put = store("float32", "float32")
_put_byte = store("int8", "int32")
_put_word = store("int32", "int32")


# Activations of one chunk of a panel: they stay in L1 beside the totals.
CHUNK_BYTES = 16384


class RowsJob(NamedTuple):
    """What one product along the rows works on: addresses, and steps in bytes or elements.

    x holds ``panels`` panels, each with ``block_step`` bytes for every block; y has one row of
    ``y_step`` bytes for every row of codes and ``panel_bytes`` of it for every panel. ``ahead`` is
    how far before its use a line of codes is asked for; scale_step counts elements.
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
    ahead: int


class RowsKernels(NamedTuple):
    """The two forms of a row kernel; both are called with (job, rows per task)."""

    serial: Kernel
    threaded: Kernel


@functools.cache
def rows_kernels(
    bits: int, columns: int, per_lane: bool, scale_dtype: str, has_zeros: bool, integers: bool
) -> RowsKernels:
    """Return the kernels for one kind of matrix and `columns` columns of activations at once."""
    load_scales = _row_ops.group_numbers(scale_dtype, per_lane)
    load_zeros = zero_points(bits, per_lane, has_zeros)
    if integers:
        add = add_integer_products(bits, columns, has_zeros)
    else:
        add = _row_ops.add_products(bits, columns, per_lane)
    make = _rows_kernel if columns == 1 else _tiles_kernel
    return _in_tasks(make(load_scales, load_zeros, add, columns))


def zero_points(bits: int, per_lane: bool, has_zeros: bool) -> Intrinsic:
    """Return the operation that gives four rows' zero points."""
    if has_zeros:
        return _row_ops.group_numbers("float32", per_lane)
    return _row_ops.fixed_numbers(float(2 ** (bits - 1)))


def _rows_kernel(
    load_scales: Intrinsic, load_zeros: Intrinsic, add: Intrinsic, columns: int
) -> Kernel:
    no_totals = _row_ops.zeros_of(_simd.ROWS * columns)
    store_sums = _row_ops.store_sums(columns)
    load_words = _row_ops.load_words

    @kernel
    def rows(job: RowsJob, first: int, end: int) -> None:
        blocks = (job.row_bytes + 63) // 64
        row = first
        while row < end:
            step = 1 if row + 4 <= end else 0  # 0: the same row four times, for the last ones
            start = job.codes + row * job.row_bytes
            code_step = step * job.row_bytes
            for panel in range(job.panels):
                totals = no_totals()
                for block in range(blocks):
                    at = start + 64 * block
                    if panel == 0:
                        soon = at + job.ahead
                        prefetch(soon)
                        prefetch(soon + code_step)
                        prefetch(soon + 2 * code_step)
                        prefetch(soon + 3 * code_step)
                    words = load_words(at, code_step, job.row_bytes - 64 * block)
                    group = _index(job.first, block)
                    place, scale_step = row * job.scale_step + group, step * job.scale_step
                    count, lanes = job.groups - group, job.lanes + 64 * block
                    scales = load_scales(job.scales, place, scale_step, count, lanes)
                    zeros = load_zeros(job.zeros, place, scale_step, count, lanes)
                    x = job.x + (panel * blocks + block) * job.block_step
                    totals = add(totals, scales, zeros, words, x)
                y = job.y + row * job.y_step + panel * job.panel_bytes
                store_sums(totals, y, step * job.y_step)
            row += 4 if step == 1 else 1

    return rows


def _tiles_kernel(
    load_scales: Intrinsic, load_zeros: Intrinsic, add: Intrinsic, columns: int
) -> Kernel:
    """Like `_rows_kernel`, with x taken in chunks that stay in L1 while all rows of a task pass.

    The totals wait in memory between two chunks.
    """
    count = _simd.ROWS * columns
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
                        totals = add(totals, scales, zeros, words, x)
                    if high == blocks:
                        y = job.y + row * job.y_step + panel * job.panel_bytes
                        store_sums(totals, y, step * job.y_step)
                    else:
                        store_totals(totals, place)

    return tiles


def _in_tasks(rows: Kernel) -> RowsKernels:
    @kernel
    def serial(job: RowsJob, rows_per_task: int) -> None:
        for low in range(0, job.m, rows_per_task):
            rows(job, low, min(job.m, low + rows_per_task))

    @kernel(parallel=True)
    def threaded(job: RowsJob, rows_per_task: int) -> None:
        tasks = (job.m + rows_per_task - 1) // rows_per_task
        for task in prange(tasks):
            rows(job, task * rows_per_task, min(job.m, (task + 1) * rows_per_task))

    return RowsKernels(serial, threaded)


@functools.cache
def arrange_kernel(bits: int, columns: int) -> Kernel:
    """Return ``f(x, n, x_columns, out)``: activations in the order of the lanes.

    x: ``(n, x_columns)`` float32, contiguous. out: zero-filled, ``(panels, blocks, codes of a lane,
    columns, 16)``, where panel p holds columns ``p * columns`` and following ones.
    """
    width = _simd.codes_per_lane(bits)

    @kernel
    def arrange(x: int, n: int, x_columns: int, out: int) -> None:
        blocks = (n + 16 * width - 1) // (16 * width)
        for column in range(x_columns):
            panel, c = column // columns, column % columns
            for block in range(blocks):
                base = (panel * blocks + block) * width * columns * 16 + 16 * c
                for k in range(width):
                    j = 16 * width * block + k
                    for lane in range(min(16, (n - j + width - 1) // width)):
                        value = _get(x, (j + width * lane) * x_columns + column)
                        _put(out, base + 16 * columns * k + lane, value)

    return arrange


@functools.cache
def quantise_kernel(bits: int, columns: int) -> Kernel:
    """Return ``f(x, n, x_columns, out) -> int``: activations as records of 8-bit codes.

    Like `arrange_kernel`, but out is a zero-filled byte array ``(panels, blocks, columns, record)``
    (see `_integers`). Each 32 columns share a scale, max|x| / 127. Returns how many values
    are NaN or infinite; the records are of no use if any is.
    """
    width = _simd.codes_per_lane(bits)
    sides, record = planes(bits), record_bytes(bits)

    @kernel
    def quantise(x: int, n: int, x_columns: int, out: int) -> int:
        blocks = (n + 16 * width - 1) // (16 * width)
        bad = 0
        for column in range(x_columns):
            panel, c = column // columns, column % columns
            for low in range(0, n, ACTIVATION_GROUP):
                high = min(n, low + ACTIVATION_GROUP)
                largest = abs(_get(x, low * x_columns + column))
                for j in range(low, high):
                    value = abs(_get(x, j * x_columns + column))
                    bad += 0 if value <= 3.4028234663852886e38 else 1
                    largest = max(largest, value)
                scale = np.float32(largest / np.float32(127))
                block, lane = low // (16 * width), low // width % 16
                place = out + ((panel * blocks + block) * columns + c) * record
                for lane_low in range(low, high, width):
                    total = 0
                    for j in range(lane_low, min(high, lane_low + width)):
                        ratio = (
                            _get(x, j * x_columns + column) / scale if scale > 0 else np.float32(0)
                        )
                        code = int(
                            np.rint(min(127, max(-127, ratio)))
                        )  # subnormal scales are rough
                        total += code
                        side, byte = j % sides, 4 * lane + j % width // sides
                        _put_byte(place + 64 * side, byte, code)
                    _put_word(place + 64 * sides, lane, total)
                    _put(place + 64 * (sides + 1), lane, scale)
                    lane += 1
        return bad

    return quantise
