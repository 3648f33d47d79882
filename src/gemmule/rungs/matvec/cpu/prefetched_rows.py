"""Two stretches of rows at a time, each read in the order of memory and asked for 3 KiB ahead.

The two rows at work lie half a share apart. A processor prefetches best what is read in order, in
few places, page after page: four neighbouring rows had three quarters of the memory's rate, this
has all of it.
"""

from __future__ import annotations

import functools

import numpy as np

from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import SHARES_PER_THREAD
from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion, floats
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, by_plan, in_rows
from gemmule.rungs._cpu_vectors import prefetch_lines, zeros_of
from gemmule.rungs.matvec.cpu import _streams

ROWS = 2
# A processor prefetches best what is read in order, in few places, page after page. So the two
# rows at work lie half a share apart: each is part of a stretch that is read from end to end. Two
# cores of a Xeon with AVX-512, cold float16, GB/s at 4096, 8192, 16384, November 2026: neighbouring
# rows, asked for two rows ahead, 30.3, 30.3, 31.1; rows half a share apart, asked for 2 KiB ahead
# 33.1, 34.4, 34.4, 3 KiB 33.4, 35.2, 34.6, 4 KiB 31.9, 33.7, 32.9; four stretches 33.1, 34.7, 33.3.
AHEAD_BYTES = 3072
# Longest vector that is widened once for a share: 16 KiB of the first-level cache.
READY = 4096


@functools.cache
def prefetched_kernel(a: str, x: str, y: str, *, ready: bool) -> Kernel:
    """Return the micro-kernel of `_cpu_rows` along the rows.

    ready: x is widened once, in the order in which elements are met, not for each pair of rows.
    """
    no_totals, make_ready = zeros_of(2 * ROWS), _streams.make_ready(a, x)
    prefetch = prefetch_lines(ROWS)
    add = _streams.add_row_products(a, "ready" if ready else x, ROWS)
    add_ends, lane_sums = _streams.add_row_ends(a, x, ROWS), _streams.lane_sums(ROWS)
    load_a, load_x, store_y = load(a, "float32"), load(x, "float32"), store(y, "float32")
    a_line, x_line = _streams.STEP_BYTES, _streams.STEP * (4 if x == "float32" else 2)
    met_line = 4 * _streams.STEP if ready else x_line

    @kernel
    def rows(A: int, step: int, x: int, y: int, n: int, first: int, last: int) -> None:
        lines, row_bytes = n // 32, max(2 * n, a_line)
        room = np.empty(32 * lines + 1 if ready else 1, np.float32)
        met = x
        if ready:
            met = room.ctypes.data
            for k in range(lines):
                make_ready(x + k * x_line, met + k * met_line)
        half = (last - first + 1) // 2
        ahead, turn, gap = AHEAD_BYTES, lines - AHEAD_BYTES // a_line, step - row_bytes
        if row_bytes < AHEAD_BYTES:  # whole rows ahead
            ahead, turn, gap = (AHEAD_BYTES // row_bytes + 1) * step, lines, 0
        for i in range(first, first + half):
            to_other = half * step if i + half < last else 0  # 0: the same row twice, if odd
            row = A + i * step
            totals = no_totals()
            for k in range(lines):
                at = row + k * a_line
                prefetch(at + ahead + (gap if k >= turn else 0), to_other)  # past its end: the next
                totals = add(totals, at, to_other, met + k * met_line)
            if lines and 32 * lines < n:  # the last 32 elements, without those counted
                end = x + (n - 32) * x_line // 32
                totals = add_ends(totals, row + 2 * (n - 32), to_other, end, 32 * (lines + 1) - n)
            sum_0, sum_1 = lane_sums(totals)
            for j in range(n if lines else 0, n):
                v = load_x(x, j)
                sum_0 += load_a(row, j) * v
                sum_1 += load_a(row + to_other, j) * v
            store_y(y, i, sum_0)
            if i + half < last:
                store_y(y, i + half, sum_1)

    return rows


def plan(problem: Problem, params: Params) -> Build:
    """Return the product whose shares are some rows."""
    ready = bool(params["ready"]) and problem.n <= READY
    rows = prefetched_kernel(problem.a, problem.b, problem.out, ready=ready)
    return in_rows(problem, rows, params["shares_per_thread"])


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect the read ceiling, for rows enough; x is widened once where no memory is waited for."""
    if problem.n < _streams.STEP or problem.batch * problem.m < 8 * machine.units:
        return None
    rows_s = problem.batch * problem.m * _cpu.ROW_FMAS / (machine.rates.fma * machine.units)
    # 4096^2 to 16384^2 cold: 30.1 to 35.6 GB/s where `threads` has 25.6 to 29.7 (two cores of a
    # Xeon with AVX-512); 384^2 to 2048^2 in caches 53 to 60, 44 to 52 (one of an EPYC), 2026-11.
    moving = _cpu.streaming_s(problem, machine, 1.0)
    calls = _cpu.spread_s(machine, problem.compulsory_bytes)
    cached = problem.compulsory_bytes <= machine.cache_bytes // 2
    return Suggestion({"ready": cached}, calls + rows_s + moving)


RUNG = CpuRung(
    title="Two stretches, asked for ahead",
    idea="Two rows of halves pass at once, in whole vector registers. They lie half a share apart: "
    "each thread reads two stretches of memory in order, every line asked for 3 KiB ahead.",
    source="software prefetching, textbook; distance and rows by our measurement",
    signatures=floats("float16", "bfloat16"),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="threads",
    params={"shares_per_thread": SHARES_PER_THREAD, "ready": (False, True)},
    batched=True,
    suggest=suggest,
    available=missing_vectors,
    rows_apart=True,
    **by_plan(plan),
)
