"""Clustered columns: the product across the rows of a row-major matrix, without copy or atomics.

Results that lie side by side are summed over rows a whole leading dimension apart. Each lane keeps
the sums of one 16-byte vector of columns, so every load is coalesced; the rows are split over the
warps of a block and over the blocks of a cluster, which fills the chip from few columns. Partial
sums meet in shared memory, then through the cluster's distributed shared memory, always in
the same order: the same bits on every run, in a single launch.
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
from gemmule.rungs._cuda import accumulator, ceil_div, type_arguments


def _strips(problem: Problem, params: Params) -> int:
    columns = params["lanes"] * (16 // ITEMSIZE[problem.a])
    return ceil_div(problem.m, columns)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    shape = ", ".join(str(params[name]) for name in ("lanes", "unroll", "cluster"))
    flags = ", ".join(str(f).lower() for f in (problem.alignment == 16, problem.batch > 1))
    cluster = params["cluster"]
    return (
        Step(
            kernel=f"clustered_columns<{type_arguments(problem)}, {shape}, {flags}>",
            grid=(_strips(problem, params) * cluster, problem.batch, 1),
            block=(256, 1, 1),
            cluster=(cluster, 1, 1),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    walkers = params["cluster"] * 8 * (32 // params["lanes"])
    return ceil_div(problem.n, walkers) + 5 + 8 + int(params["cluster"])


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Split rows over as few blocks as cover the chip, each lane with four rows or more."""
    small = problem.m * problem.n * ITEMSIZE[problem.a] <= 2**20
    choices = ((32, 1), (32, 4), (32, 8), (8, 4), (8, 8)) if not small else ((2, 1), (8, 8))
    lanes, cluster = choices[-1]
    for wider, deeper in choices:
        walkers = deeper * 8 * (32 // wider)
        blocks = _strips(problem, {"lanes": wider}) * deeper * problem.batch
        if blocks >= 2 * machine.units or 8 * walkers > problem.n:
            lanes, cluster = wider, deeper
            break
    best = {"lanes": lanes, "unroll": 4 if lanes == 32 else 8, "cluster": cluster}
    if problem.alignment != 16:
        best["unroll"] = 4
    blocks = _strips(problem, best) * cluster * problem.batch
    # One H200 (November 2026): 0.7 us beyond a plain launch, 0.85 of the ceiling when large.
    efficiency = 0.85 if problem.alignment == 16 else 0.5
    seconds = problem.compulsory_bytes / (efficiency * machine.read_bytes_per_s)
    fill = min(1.0, blocks / machine.units)
    return Suggestion(best, machine.call_s + 0.7e-6 + seconds / fill)


RUNG = Rung(
    title="Clustered columns",
    idea="A lane sums one 16-byte vector of columns; a cluster's blocks split the rows and add up.",
    source="column panels as in BLAS; thread block clusters of compute capability 9.0",
    op="matvec",
    signatures=(
        *floats("float16", "bfloat16", "float32", "float64"),
        *(s for s in integers() if s[2] == "int32"),
    ),
    arithmetic=lambda problem: Arithmetic(accumulator=accumulator(problem), chain=_chain),
    layouts=("col",),
    params={"lanes": (8, 2, 32), "unroll": (8, 4), "cluster": (8, 4, 1)},
    constraints=(
        Constraint(
            "m and n below 2^31, at most 65,535 products in a batch",
            lambda problem, params: max(problem.m, problem.n) < 2**31 and problem.batch < 65_536,
        ),
        Constraint(
            "2 loads in flight a lane for unaligned rows, whatever unroll says",
            lambda problem, params: problem.alignment == 16 or params["unroll"] == 4,
        ),
        Constraint(
            "strips of 32 bytes are for one block alone, of 128 for a cluster",
            lambda problem, params: (
                params["lanes"] == 32 or (params["lanes"] == 2) == (params["cluster"] == 1)
            ),
        ),
    ),
    archs=("sm_90a", "sm_100a", "sm_120a"),
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
