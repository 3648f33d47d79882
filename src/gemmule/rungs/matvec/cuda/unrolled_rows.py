"""Thread per row, unrolled 16 times: what of the tiled kernel's gain is the tile, and what is not.

Adds to `thread_per_row` nothing but more loads under way. The compiler unrolls that kernel's loop
four times and the loop over a tile of x in `shared_x` sixteen times, so that comparing the two does
not tell whether the tile gains or the loads do. This kernel has as many loads of A under way as the
tiled one, no shared memory and no barrier. It gains more than the tile does: the loads decide, and
the tile's barriers cost (document 000's study has both at all sizes of blocks).
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES
from gemmule.rungs._cuda.rows import sums, thread_steps

RUNG = CudaRung(
    title="Thread per row, unrolled",
    idea="One thread computes one element of y with 16 loads of its row under way.",
    source="a question that document 000 leaves open: the tile, or the loads under way",
    after="thread_per_row",
    branch="document 000: loads under way without the tile",
    signatures=ALL_SIGNATURES,
    arithmetic=sums(lambda problem, params: problem.n),
    layouts=("row", "col", "strided"),
    params={"block": (128, 32, 64, 256, 512, 1024)},
    batched=True,
    steps=thread_steps("unrolled_rows"),
)
