"""Warp per row with vector loads.

Adds to `warp_per_row`: 16-byte loads past the L1, since every byte of the matrix is used once, and
`loads` of them under way per lane before the first product, each with a running sum of its own:
bytes in flight are what hides the latency of DRAM, and fewer instructions move them.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import type_arguments
from gemmule.rungs._cuda.rows import (
    ROW_SIGNATURES,
    load_alignment,
    row_blocks,
    share_chain,
    sums,
    tree,
)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    warps = params["warps"]
    types, align = type_arguments(problem), load_alignment(problem)
    return (
        Step(
            kernel=f"warp_vector<{types}, {align}, {params['loads']}>",
            grid=(row_blocks(problem, warps), 1, 1),
            block=(32, warps, 1),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    # At most every load of a lane lands in one sum; then the sums meet, then the lanes.
    loads: int = params["loads"]
    return share_chain(problem, problem.n, 32, 16) + loads - 1 + tree(32)


RUNG = CudaRung(
    title="Warp per row, vector loads",
    idea="16-byte loads that bypass the L1, several in flight per lane.",
    source="the classic streaming matvec, between document 003 and the fast rungs",
    op="matvec",
    after="warp_per_row",
    signatures=ROW_SIGNATURES,
    arithmetic=sums(_chain),
    params={"loads": (4, 1, 2), "warps": (4, 1, 2, 8)},
    batched=True,
    steps=_steps,
)
