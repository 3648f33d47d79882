"""Split rows: few rows, each shared by many blocks of the grid.

`clustered_rows` shares a row among the eight blocks of a cluster at most, so that one row of a
million elements keeps eight multiprocessors busy and leaves the others idle. Here any number of
blocks share a row: each streams its own piece as `streamed_rows` does and writes one sum to the
workspace, and a second kernel, started early, adds these in a fixed order: no atomics, the same
bits on every run. The second launch costs about a microsecond.
"""

from __future__ import annotations

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    ceil_div,
    instance,
    quickest,
    starts_early,
    type_arguments,
)
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums, sums_of
from gemmule.rungs._cuda.stream import ALONE, INDEXED, shared_rows_s, starting

THREADS = 256
SPLITS = (32, 8, 16, 64, 128, 256, 512)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    splits, block = params["splits"], (THREADS, 1, 1)
    aligned = problem.alignment == 16
    read = instance("split_rows", type_arguments(problem), params["unroll"], aligned)
    add = instance("add_shares", CTYPE[problem.out], splits)
    return (
        Step(read, (problem.m, splits, 1), block),
        Step(add, (ceil_div(problem.m, 8), 1, 1), block, pdl=starts_early(machine)),
    )


def _chain(problem: Problem, params: Params) -> int:
    vector = 16 // ITEMSIZE[problem.a]
    turns = ceil_div(problem.n, vector * THREADS * params["splits"]) + 3
    return int(turns * vector + 5 + THREADS // 32 + params["splits"] // 32 + 6)


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Split a row as the model finds best, of a turn of loads a block at least."""
    vectors = problem.n * ITEMSIZE[problem.a] // 16
    if problem.m > 2 * machine.units:
        return None

    def point(splits: int) -> Params:
        return {"splits": splits, "unroll": 4 if vectors >= 4 * THREADS * splits else 2}

    points = [point(s) for s in SPLITS if s <= max(min(SPLITS), vectors // THREADS)]
    return quickest(points, lambda params: _seconds(problem, machine, params))


def _seconds(problem: Problem, machine: Machine, params: Params) -> float:
    """Return the modelled time; four unaligned loads a lane of doubles come to more registers."""
    aligned, double = problem.alignment == 16, ITEMSIZE[problem.a] == 8
    reading = shared_rows_s(
        problem,
        machine,
        params["splits"],
        params["unroll"],
        turn_us=0.52 if params["unroll"] == 2 else 0.8 if aligned else 1.5 if double else 1.0,
        rate=0.94 if aligned else 0.73 if double else 0.89,
        at_once=4.0,
    )
    return starting(problem, machine, 0.3, 1.0) + reading


RUNG = CudaRung(
    title="Split rows",
    idea="Many blocks share a row; a second kernel adds their sums in fixed order.",
    source="split-K, deterministic, as in split_columns",
    signatures=FLOAT_SIGNATURES,
    arithmetic=sums(_chain),
    after="clustered_rows",
    params={"splits": SPLITS, "unroll": (4, 2)},
    constraints=(INDEXED, ALONE),
    workspace=sums_of("splits"),
    suggest=_suggest,
    steps=_steps,
)
