"""Four stretches of columns at a time, asked for 3 KiB ahead; threads share the columns.

The four columns at work lie a quarter of a share apart, so that each thread reads four stretches of
memory in order.
"""

from __future__ import annotations

import functools

import numpy as np

from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import Pooled, in_pool, share_count
from gemmule.backends.cpu.steps import A, Steps, X, buffer
from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion, floats
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, Strides, by_plan, joined
from gemmule.rungs._cpu_vectors import prefetch_lines
from gemmule.rungs.matvec.cpu import _streams

COLUMNS = 4
WIDTHS = (16384, 8192, 4096)  # elements of a panel of y; 16384 float32 stay in a L2
# Two cores of a Xeon with AVX-512, cold float16, GB/s at 4096, 8192, 16384, November 2026. Eight
# neighbouring columns, asked for 64 KiB ahead into L2 and 512 bytes into L1: 29.5, 30.9, 30.7.
# Four that lie a quarter of a share apart, each part of a stretch read in order: 33.6, 33.8,
# 33.0 with 2 KiB ahead, 33.7, 34.2, 33.6 with 3, 31.2, 31.5, 30.6 with 4. One: 30.9, 33.1, 28.0.
AHEAD_BYTES = 3072
SMALLEST_BYTES = 1 << 17
LONG = 4096  # columns from here on: their float32 sums fill half of the first-level cache
SHARES_PER_THREAD = 2
FEWEST = 64  # columns of a share, so that its sums weigh little


@functools.cache
def add_kernel(a: str) -> Kernel:
    """Return ``add(A, step, x, sums, ends, low, width, count)``: sums += `count` columns times x.

    A: address of a panel of `width` elements, `low` on, in the first column. x, sums: of float32
    numbers, x in the order in which columns are met: see `place_of`. ends: room for 32 sums.
    """
    prefetch, one = prefetch_lines(COLUMNS), _streams.add_columns(a, 1)
    four = _streams.add_columns(a, COLUMNS)
    load_a, get, put = load(a, "float32"), load("float32", "float32"), store("float32", "float32")

    @kernel
    def add(
        A: int, step: int, x: int, sums: int, ends: int, low: int, width: int, count: int
    ) -> None:
        lines, quarter = width // 32, count // 4
        for j in range(quarter):
            for k in range(lines):
                at = A + j * step + 64 * k
                prefetch(at + AHEAD_BYTES, quarter * step)
                four(sums + 128 * k, at, quarter * step, x + 16 * j)
        for j in range(4 * quarter, count):
            for k in range(lines):
                one(sums + 128 * k, A + j * step + 64 * k, step, x + 4 * j)
        if 32 * lines == width:
            return
        if low + width >= 32:  # the last 32 elements once more, into sums of their own
            for i in range(32):
                put(ends, i, np.float32(0))
            end = A + 2 * (width - 32)
            for j in range(quarter):
                four(ends, end + j * step, quarter * step, x + 16 * j)
            for j in range(4 * quarter, count):
                one(ends, end + j * step, step, x + 4 * j)
            for i in range(32 * lines, width):
                put(sums, i, get(ends, 32 + i - width))
            return
        for i in range(width):
            total = np.float32(0)
            for j in range(count):
                total += load_a(A + j * step, i) * get(x, place_of(j, count))
            put(sums, i, total)

    return add


@kernel
def place_of(j: int, count: int) -> int:
    """Return where column j of `count` stands in the order in which they are met, four by four."""
    quarter = count // 4
    return 4 * (j % quarter) + j // quarter if j < 4 * quarter else j


@functools.cache
def spread_of(a: str, x: str) -> Pooled:
    """Return the shares' sums, with words (A, step, x, room, m, n, parts, width).

    Columns are in `parts`; room: for parts * m + n + 32 * parts float32 numbers, the shares' sums,
    x as they take it, and the sums of columns' ends.
    """
    add = add_kernel(a)
    put, get_x, item = store("float32", "float32"), load(x, "float32"), ITEMSIZE[a]

    @kernel
    def share(
        A: int,
        step: int,
        x: int,
        factors: int,
        sums: int,
        ends: int,
        m: int,
        first: int,
        last: int,
        width: int,
    ) -> None:
        start, count = A + first * step, last - first
        quarter = count // 4
        for column in range(4):
            for j in range(quarter):
                value = get_x(x, first + column * quarter + j)
                put(factors, first + 4 * j + column, value)
        for j in range(first + 4 * quarter, last):
            put(factors, j, get_x(x, j))
        for i in range(m):
            put(sums, i, np.float32(0))
        for low in range(0, m, width):
            size = min(width, m - low)
            x_at, sums_at = factors + 4 * first, sums + 4 * low
            add(start + low * item, step, x_at, sums_at, ends, low, size, count)

    @kernel
    def spread(
        part: int, A: int, step: int, x: int, room: int, m: int, n: int, parts: int, width: int
    ) -> None:
        first, last = part * n // parts, (part + 1) * n // parts
        factors, sums = room + 4 * parts * m, room + 4 * part * m
        ends = factors + 4 * n + 128 * part
        share(A, step, x, factors, sums, ends, m, first, last, width)

    return in_pool(spread, 8)


def plan(problem: Problem, params: Params) -> Build:
    """Return the product whose shares are some columns."""
    m, n, width = problem.m, problem.n, int(params["width"])
    spread = spread_of(problem.a, problem.b)

    def build(of_A: Strides, of_x: Strides, of_y: Strides) -> Steps:
        parts = share_count(problem.compulsory_bytes, n // FEWEST, SHARES_PER_THREAD)
        words = (A, of_A[1], X, buffer(), m, n, parts, width)
        return joined(spread, parts, words, problem, 4 * n + 128 * parts)

    return build


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect nearly the read ceiling, for matrices much larger than the threads' sums."""
    sums_bytes = 8 * problem.m * machine.units  # written once, read once
    if problem.batch > 1 or problem.compulsory_bytes < max(SMALLEST_BYTES, 16 * sums_bytes):
        return None
    if problem.m < 8 * _streams.STEP:
        return None
    calls = 2 * _cpu.spread_s(machine, problem.compulsory_bytes) - machine.rates.call
    return Suggestion({}, calls + _cpu.streaming_s(problem, machine, _share_of(problem, machine)))


def _share_of(problem: Problem, machine: Machine) -> float:
    """Return the share of the read ceiling: less where a column's sums leave the first cache.

    There some processors find the lines by themselves as fast, and some faster: `rates.asked` is
    what this one gains over `panel_threads`, whose estimate has 0.84 of the ceiling at 16384.
    """
    return 0.98 if problem.m < LONG else min(0.98, 0.84 * machine.rates.asked)


RUNG = CpuRung(
    title="Four stretches, asked for ahead",
    idea="Each thread reads a share of the columns, four at once in whole vector registers. They "
    "lie a quarter of the share apart: four stretches of memory, each line asked for 3 KiB ahead.",
    source="software prefetching and split-K, textbook; distances by our measurement",
    signatures=floats("float16", "bfloat16"),
    layouts=("col",),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="split_columns",
    params={"width": WIDTHS},
    suggest=suggest,
    available=missing_vectors,
    **by_plan(plan),
)
