"""Block columns: the product across the rows of a row-major matrix, without copy or atomics.

Adds to `block_multiply`: vectors instead of single values, and sums that meet within a block
instead of by atomics. Results that lie side by side are summed over rows a whole leading dimension
apart. Each lane keeps the sums of one 16-byte vector of columns, so every load is coalesced and
brings eight halves; the threads of a block walk the rows of its strip, 4 or 8 loads in flight each,
and their sums meet in shared memory, always in the same order. A strip is as wide as leaves the
chip one wave of blocks: from 32 bytes, which is what the memory fetches at least, or half of it
where the chip would be idle otherwise, to 4 KB. x is asked for before the rows: it is cold too,
every block wants it at once, and behind a megabyte of matrix it would arrive last.
"""

from __future__ import annotations

import math

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda import stream
from gemmule.rungs._cuda.geometry import (
    STREAMED_SIGNATURES,
    ceil_div,
    instance,
    quickest,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums


def _in_flight(threads: int) -> int:
    """Return the loads in flight a thread: 1024 threads have 64 registers each."""
    return 4 if threads == 1024 else 8


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    threads, lanes = params["threads"], params["lanes"]
    template = type_arguments(problem), threads, lanes, _in_flight(threads), stream.flags(problem)
    grid = (stream.strips(problem, lanes), problem.batch, 1)
    return (Step(instance("block_columns", *template), grid, (threads, 1, 1)),)


def _chain(problem: Problem, params: Params) -> int:
    threads, lanes = int(params["threads"]), int(params["lanes"])
    return (
        stream.rows_of_a_thread(problem, threads // lanes, _in_flight(threads)) + 5 + threads // 32
    )


# One H200 (November 2026), fitted to 132 shapes and dtypes, then set by hand, to choose well (0.6 %
# behind the best measured, where the choice was measured): the share of the read ceiling that
# strips of so many 16-byte vectors reach, and what unaligned rows leave of it; the bytes a
# multiprocessor must have under way; how far beyond its fair share one can go where others are
# idle; by what large blocks start later; what a turn takes. Of these, what unaligned rows leave of
# strips of 32 vectors, and their turn, were fitted to 125 shapes more, of 50 to 20,000 rows; how
# far strips of one vector and of 32 go beyond their share, a turn of the others, and what 512
# threads gain on few unaligned rows of doubles, to 178 more: 14551 x 471 halves 7.2 us by 59 wide
# strips, 6.1 by 8 vectors; 40 x 3455 floats 3.8 by 10 strips of a vector; 64 x 179 doubles 2.6 by
# 256 threads, 2.4 by 512.
EFFICIENCY = {1: 0.51, 2: 0.71, 4: 0.915, 8: 0.968, 32: 0.987, 256: 0.98}
OF_UNALIGNED, OF_UNALIGNED_WIDE, OF_UNALIGNED_DOUBLES = 0.74, 0.92, 0.85
TURN_US, TURN_WIDE_US = 1.4, 0.95
LARGE_BLOCKS_OF_HALVES = 1.045  # 4096 x 4096: 10.1 us by 1024 threads, 10.3 by 512
BYTES_UNDER_WAY = 34_000
BEYOND_SHARE, BEYOND_NARROW, BEYOND_WIDE, WIDE_BYTES = 3.7, 2.5, 1.8, 3_000_000
FEWER_DOUBLES_US = 0.15
STARTING_US = {256: 0.0, 512: 0.14, 1024: 0.215}
THREADS_OF_A_UNIT = 768
HIDDEN_BYTES = 128 * 1024
OF_LARGE_NARROW = 0.88  # 15755 x 3346 doubles by 8 lanes 113 us


def _fill(problem: Problem, machine: Machine, params: Params) -> tuple[float, float]:
    """Return which share of the chip's speed the blocks have, and their waves."""
    lanes, threads = params["lanes"], params["threads"]
    there = stream.strips(problem, lanes) * problem.batch / machine.units
    at_once = max(1, THREADS_OF_A_UNIT // threads)
    under_way = min(max(1.0, there), at_once) * min(threads, problem.n * lanes)
    under_way *= 16 * _in_flight(threads)
    waves = there / at_once
    wide = lanes == 32 and problem.matrix_bytes > WIDE_BYTES
    beyond = BEYOND_WIDE if wide else BEYOND_NARROW if lanes == 1 else BEYOND_SHARE
    fill = min(1.0, beyond * there)
    if waves >= 1:  # the last blocks have the memory to themselves, and cannot use all of it
        part = waves % 1
        fill = waves / (waves - part + (max(part, 1 / BEYOND_SHARE) if part else 0))
    return min(fill, under_way / BYTES_UNDER_WAY), waves if waves > 4 else math.ceil(waves)


def _seconds(problem: Problem, machine: Machine, params: Params) -> float:
    """Return the modelled time: a start, and the bytes or the turns, whichever takes longer."""
    lanes, threads = params["lanes"], params["threads"]
    fill, waves = _fill(problem, machine, params)
    rate = EFFICIENCY[lanes] * fill * machine.read_bytes_per_s
    aligned, wide = problem.alignment == 16, lanes == 32
    if not aligned:
        several = wide and threads < 1024 and problem.n >= 50
        wide_share = (
            OF_UNALIGNED_DOUBLES if stream.unaligned_doubles(problem) else OF_UNALIGNED_WIDE
        )
        rate *= wide_share if several else OF_UNALIGNED
    elif lanes <= 8 and problem.matrix_bytes > stream.LARGE_BYTES:
        rate *= OF_LARGE_NARROW
    if threads == 1024 and waves <= 1 and aligned and ITEMSIZE[problem.a] == 2:
        rate *= LARGE_BLOCKS_OF_HALVES
    turns = ceil_div(problem.n * lanes, threads * _in_flight(threads))
    alone = 2 * threads > THREADS_OF_A_UNIT  # nothing is under way between a block and the next
    between = 0.4e-6 * max(0, math.ceil(waves) - 1) if alone else 0.0
    folding_us = 0.017 * math.log2(max(1.0, 32 / lanes)) + STARTING_US[threads]
    narrow = stream.narrow_s(problem)
    if problem.m * ITEMSIZE[problem.a] >= 16:  # a turn or two of small matrices hide it
        narrow *= min(1.0, problem.matrix_bytes / HIDDEN_BYTES)
    folding_us += 0.2 if problem.alignment != 16 else 0.0
    if problem.alignment != 16 and ITEMSIZE[problem.a] == 8 and threads == 512:
        folding_us -= FEWER_DOUBLES_US
    start = stream.starting(problem, machine, folding_us - 0.17, 0.55) + narrow
    turn_us = TURN_WIDE_US if wide else TURN_US
    reading = max(problem.compulsory_bytes / rate, 1e-6 * turn_us * (turns * waves - 1))
    return start + between + float(reading)


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Take the strips that the model likes best: one wave of blocks, as wide as that allows."""
    return quickest(RUNG.space(problem), lambda params: _seconds(problem, machine, params))


RUNG = CudaRung(
    title="Block columns",
    idea="A lane sums one 16-byte vector of columns; a block walks all rows of its strip.",
    source="column panels as in BLAS",
    signatures=STREAMED_SIGNATURES,
    arithmetic=sums(_chain),
    layouts=("col",),
    after="block_multiply",
    params={"lanes": (8, 2, 4, 32, 1, 256), "threads": (512, 256, 1024)},
    constraints=(
        stream.FITS,
        stream.UNITS_OF_ROWS,
        Constraint(
            "256 threads for 256 lanes",
            lambda problem, params: params["lanes"] != 256 or params["threads"] == 256,
        ),
        Constraint(
            "512 threads for unaligned rows of bytes, not 1024 for any bytes",
            lambda problem, params: (
                ITEMSIZE[problem.a] > 1
                or params["threads"] == 512
                or (params["threads"] == 256 and problem.alignment == 16)
            ),
        ),
    ),
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
