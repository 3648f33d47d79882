"""Products across stored rows in vector registers: four rows at a time are spread over y."""

from __future__ import annotations

import functools
from typing import NamedTuple

from gemmule.backends.cpu.intrinsics import load, prefetch
from gemmule.backends.cpu.jit import Kernel, kernel, prange
from gemmule.rungs.quantized.cpu import _row_ops
from gemmule.rungs.quantized.cpu._vector_kernels import zero_points

_index = load("int32", "int32")

# Blocks of y that a panel holds: 32 KiB of 4-bit results stay in L1 while the rows stream by.
PANEL_BLOCKS = 64


class PanelsJob(NamedTuple):
    """What one product across the rows works on; the steps of scales count elements.

    x: ``(quads, 4)`` float32, four rows each, then the rows left over, each with three zeros.
    y: `parts` zero-filled results of ``part_bytes`` in the order of the lanes.
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


class PanelsKernels(NamedTuple):
    """The two forms of a panel kernel."""

    serial: Kernel  # (job, first quad, end, y)
    threaded: Kernel  # (job, parts)


@functools.cache
def panels_kernels(bits: int, per_lane: bool, scale_dtype: str, has_zeros: bool) -> PanelsKernels:
    """Return the kernels for one kind of matrix."""
    load_scales = _row_ops.group_numbers(scale_dtype, per_lane)
    load_zeros = zero_points(bits, per_lane, has_zeros)
    spread = _row_ops.spread_products(bits, per_lane)
    load_words, times = _row_ops.load_words, _row_ops.times_numbers

    @kernel
    def serial(job: PanelsJob, first: int, end: int, y: int) -> None:
        blocks = (job.row_bytes + 63) // 64
        quads = job.m // 4
        for low in range(0, blocks, PANEL_BLOCKS):
            for quad in range(first, end):
                step = 1 if quad < quads else 0  # 0: one row, three times with x = 0
                row = 4 * quad if quad < quads else 4 * quads + (quad - quads)
                code_step, scale_step = step * job.row_bytes, step * job.scale_step
                for block in range(low, min(blocks, low + PANEL_BLOCKS)):
                    at = job.codes + row * job.row_bytes + 64 * block
                    soon = at + 4 * job.row_bytes
                    prefetch(soon)
                    prefetch(soon + code_step)
                    prefetch(soon + 2 * code_step)
                    prefetch(soon + 3 * code_step)
                    words = load_words(at, code_step, job.row_bytes - 64 * block)
                    group = _index(job.first, block)
                    place = row * job.scale_step + group
                    count, lanes = job.groups - group, job.lanes + 64 * block
                    scales = load_scales(job.scales, place, scale_step, count, lanes)
                    zeros = load_zeros(job.zeros, place, scale_step, count, lanes)
                    weights = times(scales, job.x + 16 * quad)
                    spread(weights, zeros, words, y + block * job.block_step)

    @kernel(parallel=True)
    def threaded(job: PanelsJob, parts: int) -> None:
        quads = job.m // 4 + job.m % 4
        for part in prange(parts):
            low, high = quads * part // parts, quads * (part + 1) // parts
            serial(job, low, high, job.y + part * job.part_bytes)

    return PanelsKernels(serial, threaded)
