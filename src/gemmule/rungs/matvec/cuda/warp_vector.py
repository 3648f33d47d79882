"""Warp per row with vector loads.

Adds to `warp_per_row`: 16-byte loads past the L1, since every byte of the matrix is used once, and
`loads` of them under way per lane before the first product, each with a running sum of its own:
bytes in flight are what hides the latency of DRAM, and fewer instructions move them.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Params
from gemmule.rungs._cuda import rows as by_rows


def _chain(problem: Problem, params: Params) -> int:
    # At most every load of a lane lands in one sum; then the sums meet, then the lanes.
    loads: int = params["loads"]
    return by_rows.share_chain(problem, problem.n, 32, 16) + loads - 1 + by_rows.tree(32)


RUNG = CudaRung(
    title="Warp per row, vector loads",
    idea="16-byte loads that bypass the L1, several in flight per lane.",
    source="the classic streaming matvec, between document 003 and the fast rungs",
    after="warp_per_row",
    signatures=by_rows.ROW_SIGNATURES,
    arithmetic=by_rows.sums(_chain),
    params={"loads": (4, 1, 2), "warps": (4, 1, 2, 8)},
    batched=True,
    steps=by_rows.shared_row_steps("warp_vector", "loads"),
)
