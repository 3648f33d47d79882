"""Split columns: few columns and very many rows, split over the whole grid.

A cluster has eight blocks at most, too few for a tall matrix. Where it has too few columns for one
wave of strips, any number of blocks of the grid share the rows of a strip; each writes its partial
sums to the workspace, and a second kernel adds them up in a fixed order: no atomics, nothing to
zero, the same bits on every run. The second launch starts early (programmatic dependent launch).
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Terms
from gemmule.core.problem import COMPLEX, ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import stream
from gemmule.rungs._cuda.geometry import (
    COMPLEX_SIGNATURES,
    CTYPE,
    FLOAT8_SIGNATURES,
    STREAMED_SIGNATURES,
    accumulator,
    ceil_div,
    instance,
    lies,
    modelled,
    starts_early,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums, sums_of
from gemmule.rungs._cuda.terms import narrow, streaming


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

COMPLEX_SPLITS = (8, 16, 32, 64)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    return (p for p in RUNG.space(problem) if p["unroll"] == 4 and p["lanes"] < 256)


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Beside reading, bring together the sums of all splits."""
    lanes, splits = params["lanes"], params["splits"]
    blocks = stream.strips(problem, lanes) * problem.batch * splits
    at_once = 4 if problem.alignment == 16 else 3
    shape = blocks, at_once, problem.n * lanes / (splits * 256 * params["unroll"])
    sums = 2 * problem.m * problem.batch * splits * ITEMSIZE[accumulator(problem)]
    more = {"split_s": splits, f"narrow_s {lies(problem)}": narrow(problem)}
    kind = f"{lies(problem)} {lanes}"
    added = {"added": sums / machine.read_bytes_per_s}
    return streaming(problem, machine, shape, kind, more, added)


RUNG = CudaRung(
    title="Split columns",
    idea="Many blocks share the rows of a strip; a second kernel adds their sums in fixed order.",
    source="split-K, deterministic: a workspace and a fixed-order reduction",
    signatures=(*STREAMED_SIGNATURES, *FLOAT8_SIGNATURES, *COMPLEX_SIGNATURES),
    arithmetic=sums(_chain),
    layouts=("col",),
    after="block_columns",
    branch="few columns, longer sums",
    params={"lanes": (32, 8, 256), "unroll": (8, 4), "splits": SPLITS},
    constraints=(
        stream.FITS,
        stream.WHOLE,
        stream.UNITS_OF_ROWS,
        Constraint(
            "an even number of splits for unaligned rows of bytes",
            lambda problem, params: (
                problem.alignment == 16 or ITEMSIZE[problem.a] > 1 or params["splits"] % 2 == 0
            ),
        ),
        Constraint(
            "4 loads in flight a lane and 8, 16, 32 or 64 splits of complex numbers",
            lambda problem, params: (
                problem.a not in COMPLEX
                or (params["unroll"] == 4 and params["splits"] in COMPLEX_SPLITS)
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
    steps=_steps,
    **modelled("vecmat/split_columns", _terms, _choices),
)
