"""Warp per row with vector loads.

Adds to `warp_per_row`: 16-byte loads past the L1, since every byte of the matrix is used once, and
`loads` of them under way per lane before the first product, each with a running sum of its own:
bytes in flight are what hides the latency of DRAM, and fewer instructions move them.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Params
from gemmule.rungs._cuda.rows import (
    ROW_SIGNATURES,
    share_chain,
    shared_row_steps,
    sums,
    tree,
)


def _chain(problem: Problem, params: Params) -> int:
    # At most every load of a lane lands in one sum; then the sums meet, then the lanes.
    loads: int = params["loads"]
    return share_chain(problem, problem.n, 32, 16) + loads - 1 + tree(32)


RUNG = CudaRung(
    title="Warp per row, vector loads",
    idea="16-byte loads that bypass the L1, several in flight per lane.",
    source="the classic streaming matvec, between document 003 and the fast rungs",
    after="warp_per_row",
    signatures=ROW_SIGNATURES,
    arithmetic=sums(_chain),
    params={"loads": (4, 1, 2), "warps": (4, 1, 2, 8)},
    batched=True,
    steps=shared_row_steps("warp_vector", "loads"),
)
