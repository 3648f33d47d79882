"""Warp per row: neighbouring lanes read neighbouring columns.

Adds to `thread_per_row`: lane l takes columns l, l + 32 and so on, so a warp's request is a few
whole sectors of DRAM instead of 32 scattered ones, and there are 32 times as many threads. The
price is a reduction: 32 partial sums meet by shuffles, in five exchanges without shared memory or
barriers.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES, ceil_div, type_arguments
from gemmule.rungs._cuda.rows import row_blocks, sums, tree


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    warps = params["warps"]
    return (
        Step(
            kernel=f"warp_per_row<{type_arguments(problem)}>",
            grid=(row_blocks(problem, warps), 1, 1),
            block=(32, warps, 1),
        ),
    )


RUNG = CudaRung(
    title="Warp per row",
    idea="The 32 lanes of a warp share a row: coalesced reads, then a sum by shuffles.",
    source="the classic coalesced matvec, between document 000 and document 003",
    op="matvec",
    after="thread_per_row",
    signatures=ALL_SIGNATURES,
    arithmetic=sums(lambda problem, params: ceil_div(problem.n, 32) + tree(32)),
    params={"warps": (4, 1, 2, 8, 16, 32)},
    batched=True,
    steps=_steps,
)
