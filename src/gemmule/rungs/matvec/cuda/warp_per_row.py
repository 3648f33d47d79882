"""Warp per row: neighbouring lanes read neighbouring columns.

Adds to `thread_per_row`: lane l takes columns l, l + 32 and so on, so a warp's request is a few
whole sectors of DRAM instead of 32 scattered ones, and there are 32 times as many threads. The
price is a reduction: 32 partial sums meet by shuffles, in five exchanges without shared memory or
barriers.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES, ceil_div
from gemmule.rungs._cuda.rows import shared_row_steps, sums, tree

RUNG = CudaRung(
    title="Warp per row",
    idea="The 32 lanes of a warp share a row: coalesced reads, then a sum by shuffles.",
    source="the classic coalesced matvec, between document 000 and document 003",
    after="thread_per_row",
    signatures=ALL_SIGNATURES,
    arithmetic=sums(lambda problem, params: ceil_div(problem.n, 32) + tree(32)),
    params={"warps": (4, 1, 2, 8, 16, 32)},
    batched=True,
    steps=shared_row_steps("warp_per_row", aligned=False),
)
