"""Split rows: few rows, each shared by many blocks of the grid.

`clustered_rows` shares a row among the eight blocks of a cluster at most, so that one row of a
million elements keeps eight multiprocessors busy and leaves the others idle. Here any number of
blocks share a row: each streams its own piece as `streamed_rows` does and writes one sum to the
workspace, and a second kernel, started early, adds these in a fixed order: no atomics, the same
bits on every run. The second launch has its price.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Terms
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
from gemmule.rungs._cuda.stream import ALONE, INDEXED
from gemmule.rungs._cuda.terms import streaming

THREADS = 256
MOST_ROWS = 2  # of a multiprocessor
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
    """Take fewer rows than fill the chip by themselves."""
    return RUNG.space(problem) if problem.m <= MOST_ROWS * machine.units else ()


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    splits, unroll, size = params["splits"], params["unroll"], ITEMSIZE[problem.a]
    turns = problem.n * size / (16 * THREADS * splits * unroll)
    kind = f"{lies(problem)} {unroll}"
    shape = problem.m * splits, 4, turns
    return streaming(problem, machine, shape, kind, {"split_s": splits})


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
    **modelled("matvec/split_rows", _terms, _choices),
)
