"""Split rows: few rows, each shared by many blocks of the grid.

`clustered_rows` shares a row among the eight blocks of a cluster at most, so that one row of a
million elements keeps eight multiprocessors busy and leaves the others idle. Here any number of
blocks share a row: each streams its own piece as `streamed_rows` does and writes one sum to the
workspace, and a second kernel, started early, adds these in a fixed order: no atomics, the same
bits on every run. The second launch has its price.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    ceil_div,
    instance,
    lies,
    modelled,
    starts_early,
    type_arguments,
)
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums, sums_of
from gemmule.rungs._cuda.stream import ALONE, INDEXED, shared_rows_s, starting
from gemmule.storage.models import numbers

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


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Split a row into parts of a turn of loads a block at least."""
    vectors = problem.n * ITEMSIZE[problem.a] // 16
    if problem.m > numbers(machine, "matvec/split_rows")["rows_of_a_unit"] * machine.units:
        return
    for splits in SPLITS:
        if splits <= max(min(SPLITS), vectors // THREADS):
            yield {"splits": splits, "unroll": 4 if vectors >= 4 * THREADS * splits else 2}


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    """Share rows; four unaligned loads a lane of doubles come to more registers."""
    own, lying = numbers(machine, "matvec/split_rows"), lies(problem)
    lying = "doubles" if lying == "unaligned" and ITEMSIZE[problem.a] == 8 else lying
    reading = shared_rows_s(
        problem,
        machine,
        own,
        (params["splits"], params["unroll"]),
        turn_s=own["turn_s"][2 if params["unroll"] == 2 else lying],
        rate=own["rate"][lying],
        at_once=own["at_once"],
    )
    return starting(problem, machine, own) + reading


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
    steps=_steps,
    **modelled(_choices, _seconds),
)
