"""Thread per row of a column-major matrix, document 004's naive multiplication.

The same loop as `thread_per_row`, over the other storage order: a warp reads 32 neighbours of a
column at once, so every request is coalesced. What it lacks is parallelism: m threads in all, each
with n iterations, leave a device idle unless m is large.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES
from gemmule.rungs._cuda.rows import sums, thread_steps

RUNG = CudaRung(
    title="Thread per row, column-major",
    idea="One thread per row walks along the columns; a warp reads 32 neighbours of each.",
    source="document 004, naive multiplication",
    signatures=ALL_SIGNATURES,
    arithmetic=sums(lambda problem, params: problem.n),
    layouts=("col",),
    params={"block": (128, 32, 64, 256, 512, 1024)},
    batched=True,
    steps=thread_steps("col_thread_per_row"),
)
