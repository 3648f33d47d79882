"""Split columns: few columns and very many rows, split over the whole grid.

A cluster has eight blocks at most, too few for a tall matrix. Where it has too few columns for one
wave of strips, any number of blocks of the grid share the rows of a strip; each writes its partial
sums to the workspace, and a second kernel adds them up in a fixed order: no atomics, nothing to
zero, the same bits on every run. The second launch is started early (programmatic dependent launch)
and costs about a microsecond.
"""

from __future__ import annotations

import math

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda import stream
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    FLOAT8_SIGNATURES,
    STREAMED_SIGNATURES,
    accumulator,
    ceil_div,
    instance,
    starts_early,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums, sums_of


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    lanes, splits = params["lanes"], params["splits"]
    template = type_arguments(problem), lanes, params["unroll"], stream.flags(problem)
    read, add = (
        instance("split_columns", *template),
        instance("add_splits", CTYPE[problem.out], splits),
    )
    blocks, block = ceil_div(problem.m, 32) * problem.batch, (256, 1, 1)
    return (
        Step(read, (stream.strips(problem, lanes), splits, problem.batch), block),
        Step(add, (blocks, 1, 1), block, pdl=starts_early(machine)),
    )


def _chain(problem: Problem, params: Params) -> int:
    walkers = params["splits"] * (256 // params["lanes"])
    rows = stream.rows_of_a_thread(problem, walkers, params["unroll"])
    return rows + 5 + 8 + int(params["splits"]) // 8 + 9


SPLITS = (8, *range(4, 8), *range(9, 33), 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)


# One H200 (November 2026): 2000 x 17 halves 3.7 us by 80 splits, 3.0 by 16; 1000 x 33 3.5 by 56,
# 2.9 by 8; 1306 x 45 bfloat16 3.8 by 8, 3.2 by 16. Below a megabyte sums take longer than what was
# fitted. Fewer rows than a thread has loads under way are not worth a block: 17390 x 20 floats 4.1
# by 224 splits, 3.8 by 128; 4111 x 7 doubles 3.0 by 40.
LEAST_OF_A_TURN = 0.66  # that the last of a block's threads have
SMALL_BYTES, SMALL_ROWS, SMALL_US, BELOW_A_MEGABYTE_US = 200_000, 2000, 0.85, 0.3


def _most(problem: Problem, lanes: int) -> int:
    """Return the most splits that have about a turn of rows for each of a block's threads."""
    return int(problem.n * lanes / (256 * 4 * LEAST_OF_A_TURN))


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Split so that one wave of blocks fills the chip, where there are rows for all of them."""
    huge = problem.matrix_bytes > 2**30
    large_doubles = ITEMSIZE[problem.a] == 8 and problem.matrix_bytes > stream.LARGE_BYTES
    if problem.alignment == 16 and (huge or large_doubles):
        # Many waves, of narrow strips 1 to 4 % ahead; doubles below that of wide ones: 15755 x 3346
        # of them 98.7 us by 48 or 64 splits, 107 by 11 of narrow strips, 113 by block_columns.
        lanes = 8 if huge else 32
        blocks = stream.strips(problem, lanes) * problem.batch
        splits = min(SPLITS, key=lambda s: abs(s * blocks - 27 * machine.units))
        seconds = _seconds(problem, machine, lanes, splits)
        return Suggestion({"lanes": lanes, "unroll": 4, "splits": splits}, seconds)
    small = problem.batch * problem.matrix_bytes < SMALL_BYTES
    if small and problem.n <= SMALL_ROWS:
        few = {"lanes": 8, "unroll": 4, "splits": 8 if problem.n < 1000 else 16}
        element_by_element = (
            stream.narrow_s(problem) if problem.m * ITEMSIZE[problem.a] < 16 else 0.0
        )
        return Suggestion(
            few, stream.starting(problem, machine, SMALL_US, 0.75) + element_by_element
        )
    even = problem.alignment != 16 and ITEMSIZE[problem.a] == 1
    seconds, lanes, splits = min(
        (_seconds(problem, machine, lanes, splits), lanes, splits)
        for lanes in ((32, 8) if stream.strips(problem, 8) > 1 else (8,))
        for splits in SPLITS
        if splits <= max(min(SPLITS), _most(problem, lanes)) and not (even and splits % 2)
    )
    return Suggestion({"lanes": lanes, "unroll": 4, "splits": splits}, seconds)


def _seconds(problem: Problem, machine: Machine, lanes: int, splits: int) -> float:
    """Return the modelled time; one H200 (November 2026), fitted to 132 shapes and dtypes.

    Four blocks of aligned rows are on a multiprocessor at a time, three of unaligned ones: 4095 x
    4095 halves in 17 strips take 11.4 us by 22 splits, 13.8 by 31.
    """
    aligned = problem.alignment == 16
    blocks = stream.strips(problem, lanes) * problem.batch * splits
    slots = machine.units * (4 if aligned else 3)
    full = blocks / slots
    fill = (
        1.0
        if full > 4
        else full / math.ceil(full)
        if full > 1
        else min(0.85 + 0.15 * full, 2 * full)
    )
    each = blocks / machine.units  # some multiprocessors have a block more: 128 or 256, not 192
    if 1 < each <= 2:
        fill *= (each / math.ceil(each)) ** 0.35
    rate = 0.975 * fill * machine.read_bytes_per_s
    if not aligned:
        rate *= 0.865 if lanes == 8 else 0.965 if stream.unaligned_doubles(problem) else 0.92
    if problem.n < 600 and not aligned and ITEMSIZE[problem.a] == 2:
        rate *= 0.93  # a block has few turns, in which nothing hides the heads of halves
    rate *= max(0.25, min(1.0, problem.m * ITEMSIZE[problem.a] / (16 * lanes)) ** 0.6)
    turns = ceil_div(problem.n * lanes, splits * 256 * 4)
    added = 2 * problem.m * problem.batch * splits * ITEMSIZE[accumulator(problem)]
    reading = problem.compulsory_bytes / rate + 2.4 * added / machine.read_bytes_per_s
    begin_us = 0.14 + 0.0025 * splits
    begin_us += BELOW_A_MEGABYTE_US if problem.compulsory_bytes < 1e6 else 0.0
    start = stream.starting(problem, machine, begin_us, 0.75) + stream.narrow_s(problem)
    return start + max(float(reading), 1.25e-6 * (turns * max(1, full) - 1))


RUNG = CudaRung(
    title="Split columns",
    idea="Many blocks share the rows of a strip; a second kernel adds their sums in fixed order.",
    source="split-K, deterministic: a workspace and a fixed-order reduction",
    signatures=(*STREAMED_SIGNATURES, *FLOAT8_SIGNATURES),
    arithmetic=sums(_chain),
    layouts=("col",),
    after="block_columns",
    branch="few columns, longer sums",
    params={"lanes": (32, 8, 256), "unroll": (8, 4), "splits": SPLITS},
    constraints=(
        stream.FITS,
        stream.UNITS_OF_ROWS,
        Constraint(
            "an even number of splits for unaligned rows of bytes",
            lambda problem, params: (
                problem.alignment == 16 or ITEMSIZE[problem.a] > 1 or params["splits"] % 2 == 0
            ),
        ),
        Constraint(
            "4 loads in flight a lane for unaligned rows and elements of 8 bytes",
            lambda problem, params: (
                params["unroll"] == 4 or (problem.alignment == 16 and ITEMSIZE[problem.a] < 8)
            ),
        ),
    ),
    workspace=sums_of("splits"),
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
