"""Split columns: few columns and very many rows, split over the whole grid.

Where a matrix has too few columns for one wave of strips, any number of blocks share the rows of a
strip; each writes its partial sums to the workspace, and a second kernel adds them up in a
fixed order: no atomics, nothing to zero, the same bits on every run. The second launch is started
early (programmatic dependent launch) and costs about a microsecond.
"""

from __future__ import annotations

from gemmule.problem import ITEMSIZE, Problem
from gemmule.rung import (
    Arithmetic,
    Machine,
    Params,
    Rung,
    Step,
    Suggestion,
    floats,
    integers,
)
from gemmule.rungs._cuda import CTYPE, accumulator, ceil_div, type_arguments
from gemmule.rungs._stream import FITS, flags, strips


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    lanes, splits = params["lanes"], params["splits"]
    return (
        Step(
            kernel=f"split_columns<{type_arguments(problem)}, {lanes}, {params['unroll']}, "
            f"{flags(problem)}>",
            grid=(strips(problem, lanes), splits, problem.batch),
            block=(256, 1, 1),
        ),
        Step(
            kernel=f"add_splits<{CTYPE[problem.out]}, {splits}>",
            grid=(ceil_div(problem.m, 32) * problem.batch, 1, 1),
            block=(256, 1, 1),
            pdl=machine.arch >= "sm_9" or machine.arch.startswith("sm_1"),
        ),
    )


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    return int(problem.m * problem.batch * params["splits"] * ITEMSIZE[accumulator(problem)])


def _chain(problem: Problem, params: Params) -> int:
    walkers = params["splits"] * (256 // params["lanes"])
    return ceil_div(problem.n, walkers) + 5 + 8 + int(params["splits"]) // 8 + 9


SPLITS = (8, 4, 16, 32, 64, 128, 256)


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Split until there are four blocks a multiprocessor, with two rows a thread or more."""
    aligned = problem.alignment == 16
    huge = problem.matrix_bytes > 2**30  # then narrow strips in many waves are 1 % ahead
    lanes = 32 if strips(problem, 32) >= 4 and not huge else 8
    there = strips(problem, lanes) * problem.batch
    wanted = (27 if huge else 4) * machine.units
    deepest = problem.n * lanes // 512
    fitting = [splits for splits in SPLITS if splits <= deepest] or [min(SPLITS)]
    splits = min(fitting, key=lambda splits: abs(splits * there - wanted))
    # One H200 (November 2026), fitted to 60 shapes and dtypes: the second launch costs 1.0 us; 0.96
    # of the ceiling, for unaligned rows 0.75 of halves and 0.88 of wider elements.
    rate = machine.read_bytes_per_s
    rate *= 0.96 if aligned else 0.75 if ITEMSIZE[problem.a] <= 2 else 0.88
    rate *= min(1.0, there * splits / (2 * machine.units))
    params = {"lanes": lanes, "unroll": 4 if aligned else 8, "splits": splits}
    seconds = problem.compulsory_bytes / rate
    return Suggestion(params, machine.call_s + 1.0e-6 + seconds)


RUNG = Rung(
    title="Split columns",
    idea="Many blocks share the rows of a strip; a second kernel adds their sums in fixed order.",
    source="split-K, deterministic: a workspace and a fixed-order reduction",
    op="matvec",
    signatures=(
        *floats("float16", "bfloat16", "float32", "float64"),
        *(s for s in integers() if s[2] == "int32"),
    ),
    arithmetic=lambda problem: Arithmetic(accumulator=accumulator(problem), chain=_chain),
    layouts=("col",),
    after="block_columns",
    params={"lanes": (32, 8, 256), "unroll": (8, 4), "splits": SPLITS},
    constraints=(FITS,),
    workspace=_workspace,
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
