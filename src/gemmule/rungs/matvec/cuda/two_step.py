"""Two-step reduction, document 003's kernel for more than 32 threads per row.

Adds to `p_threads_vector`: p from 32 to 1024, so that a few long rows fill the device. Lanes sum by
shuffles, then warps through shared memory: a slot for each pair of row and warp, and a barrier
between writing and reading them. Where there are rows enough to fill the chip, the second step only
costs time. Shared memory: 32 sums (128 or 256 bytes).

The presets are the document's two tables: ``p100_<size>`` and ``rtx3090_<size>``, blockDim.x and .y
of its square sizes; and ``h200_<size>``, the best found on that card where it is more than a warp
for a row (`p_threads_vector` has the others). The document's grid, (1, n / rows), becomes a flat
one of ceil(m / rows) blocks on x, since y ends at 65,535.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Params
from gemmule.rungs._cuda import rows as by_rows


def _chain(problem: Problem, params: Params) -> int:
    p = params["p"]
    return by_rows.share_chain(problem, problem.n, p, params["values"]) + 2 * by_rows.tree(32)


RUNG = CudaRung(
    title="Two-step reduction",
    idea="More than a warp for a row: warps sum by shuffles, then meet in shared memory.",
    source="document 003, reduction for p > 32, with its parameter tables for P100 and RTX 3090",
    after="p_threads_vector",
    signatures=by_rows.ROW_SIGNATURES,
    arithmetic=by_rows.sums(_chain),
    params={
        "p": (128, 32, 64, 256, 512, 1024),
        "rows": (4, 1, 2, 8, 16, 32),
        "values": by_rows.VALUES,
    },
    presets={
        name: {"p": p, "rows": rows, "values": 8} for name, p, rows in by_rows.DOCUMENT_LAYOUTS
    }
    | by_rows.newer_presets(several_warps=True),
    constraints=(by_rows.BLOCK_FITS, by_rows.VALUES_FIT),
    batched=True,
    steps=by_rows.shared_row_steps("two_step", "values"),
)
