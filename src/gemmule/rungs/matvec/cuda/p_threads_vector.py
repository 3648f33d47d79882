"""p threads per dot product with vector loads, document 003.

Adds to `p_threads`: one instruction fetches 16 bytes (8 halves, 16 int8), so fewer requests carry
the same bytes. `values` is what a thread takes in one step; where that is more than one load, they
are all issued before the first is used, and the matrix goes past the L1. Rows that do not begin at
multiples of 16 bytes (odd n, slices) are read element by element, and what n leaves over is dealt
out one by one. Part of the gain over the rung before is not of the loads' making: by default p is
32 here and 8 there.

The presets ``h200_<size>`` are the best parameters found on that card where a warp a row is enough.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Params
from gemmule.rungs._cuda import rows as by_rows


def _chain(problem: Problem, params: Params) -> int:
    p = params["p"]
    return by_rows.share_chain(problem, problem.n, p, params["values"]) + by_rows.tree(p)


RUNG = CudaRung(
    title="p threads per row, 16-byte loads",
    idea="Each thread fetches 16 bytes at a time: 8, 16 or 32 values a step.",
    source="document 003, vectorised loads",
    after="p_threads",
    signatures=by_rows.ROW_SIGNATURES,
    arithmetic=by_rows.sums(_chain),
    params={"p": (32, 1, 2, 4, 8, 16), "rows": (4, 1, 8, 16, 32), "values": by_rows.VALUES},
    presets=by_rows.newer_presets(several_warps=False),
    constraints=(by_rows.BLOCK_FITS, by_rows.VALUES_FIT),
    batched=True,
    steps=by_rows.shared_row_steps("p_threads_vector", "values"),
)
