"""Split columns: few columns and very many rows, split over the whole grid.

A cluster has eight blocks, too few for a tall matrix of few columns. Here any number of blocks
share the rows; each writes its partial sums to the workspace, and a second kernel adds them up in a
fixed order: no atomics, nothing to zero, the same bits on every run. It needs no clusters, so it
is also what older architectures run. The second launch costs about a microsecond.
"""

from __future__ import annotations

from gemmule.problem import ITEMSIZE, Problem
from gemmule.rung import (
    Arithmetic,
    Constraint,
    Machine,
    Params,
    Rung,
    Step,
    Suggestion,
    floats,
    integers,
)
from gemmule.rungs._cuda import CTYPE, accumulator, ceil_div, type_arguments


def _strips(problem: Problem, params: Params) -> int:
    columns = params["lanes"] * (16 // ITEMSIZE[problem.a])
    return ceil_div(problem.m, columns)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    lanes, split = params["lanes"], params["split"]
    flags = ", ".join(str(f).lower() for f in (problem.alignment == 16, problem.batch > 1))
    types = type_arguments(problem)
    return (
        Step(
            kernel=f"split_columns<{types}, {lanes}, {split}, {flags}>",
            grid=(_strips(problem, params) * split, problem.batch, 1),
            block=(256, 1, 1),
        ),
        Step(
            kernel=f"add_splits<{CTYPE[problem.out]}, {split}>",
            grid=(ceil_div(problem.m, 32) * problem.batch, 1, 1),
            block=(256, 1, 1),
            pdl=machine.arch >= "sm_9" or machine.arch.startswith("sm_1"),
        ),
    )


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    return int(problem.m * problem.batch * params["split"] * ITEMSIZE[accumulator(problem)])


def _chain(problem: Problem, params: Params) -> int:
    walkers = params["split"] * 8 * (32 // params["lanes"])
    return ceil_div(problem.n, walkers) + 5 + 8 + int(params["split"]) // 8 + 9


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Split until the grid covers the chip twice; wide strips where the rows are long."""
    best = {"lanes": 8, "split": 512}
    for lanes, split in ((32, 8), (8, 8), (32, 64), (8, 64)):
        if _strips(problem, {"lanes": lanes}) * split * problem.batch >= 2 * machine.units:
            best = {"lanes": lanes, "split": split}
            break
    if problem.alignment != 16:
        best = {"lanes": 32, "split": 64}
    blocks = _strips(problem, best) * best["split"] * problem.batch
    # One H200 (November 2026): the second launch costs 1.4 us; 0.96 of the ceiling when large.
    efficiency = 0.96 if problem.alignment == 16 else 0.6
    seconds = problem.compulsory_bytes / (efficiency * machine.read_bytes_per_s)
    fill = min(1.0, blocks / (2 * machine.units))
    return Suggestion(best, machine.call_s + 1.4e-6 + seconds / fill)


RUNG = Rung(
    title="Split columns",
    idea="Blocks of the whole grid share the rows; a second kernel adds their sums in fixed order.",
    source="split-K, deterministic: a workspace and a fixed-order reduction",
    op="matvec",
    signatures=(
        *floats("float16", "bfloat16", "float32", "float64"),
        *(s for s in integers() if s[2] == "int32"),
    ),
    arithmetic=lambda problem: Arithmetic(accumulator=accumulator(problem), chain=_chain),
    layouts=("col",),
    params={"lanes": (32, 8), "split": (8, 64, 512)},
    constraints=(
        Constraint(
            "m and n below 2^31, at most 65,535 products in a batch",
            lambda problem, params: max(problem.m, problem.n) < 2**31 and problem.batch < 65_536,
        ),
    ),
    workspace=_workspace,
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
