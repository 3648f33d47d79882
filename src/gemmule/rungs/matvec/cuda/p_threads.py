"""p threads per dot product, document 003's first step, one value at a time.

Adds to `warp_per_row`: the number of threads on a row is a parameter, a power of two up to 32, so
that short rows do not leave lanes idle and a warp may carry several rows. With the default of 8 and
long rows it is a step back: eight lanes read 16 bytes of halves at a time, half a sector, from four
rows at once, and there are a quarter of the threads. Every column belongs to exactly one thread
whatever n is, and a group of p lanes sums by itself.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.geometry import ceil_div
from gemmule.rungs._cuda.rows import BLOCK_FITS, ROW_SIGNATURES, shared_row_steps, sums, tree

RUNG = CudaRung(
    title="p threads per row",
    idea="A group of p lanes shares a row: p from 1 to 32, `rows` rows to a block.",
    source="document 003, p threads per dot product",
    after="warp_per_row",
    branch="document 003: p threads a row, its parameters searched",
    signatures=ROW_SIGNATURES,
    arithmetic=sums(lambda problem, q: ceil_div(problem.n, q["p"]) + tree(q["p"])),
    params={"p": (8, 1, 2, 4, 16, 32), "rows": (16, 4, 8, 32, 64, 128)},
    constraints=(BLOCK_FITS,),
    batched=True,
    steps=shared_row_steps("p_threads", aligned=False),
)
