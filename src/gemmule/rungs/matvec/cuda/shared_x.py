"""x in shared memory, document 000's tiled kernel.

Adds to `thread_per_row`: the block fetches each value of x once from global memory instead of once
a thread. Along rows that gains little: x is small beside A and every thread of a warp asks for the
same value, which the caches already serve by one broadcast, so the phases mostly add barriers.
Across the rows it gains much, though the bytes are the same, and not because x is fetched less
often: the compiler unrolls the plain loop four times and the loop over the tile sixteen times (the
machine code shows it), so a thread has 16 loads of A on their way in place of 4.

The tile holds as many values as the block has threads, in the dtype of x; shared memory: block x
itemsize of x.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES
from gemmule.rungs._cuda.rows import sums, thread_steps

RUNG = CudaRung(
    title="x in shared memory",
    idea="The block copies x into shared memory, as many values at a time as it has threads, and "
    "all its threads multiply from there.",
    source="document 000, tiled kernel",
    after="thread_per_row",
    branch="documents 000 and 001: x in shared memory",
    signatures=ALL_SIGNATURES,
    arithmetic=sums(lambda problem, params: problem.n),
    layouts=("row", "col", "strided"),
    params={"block": (128, 32, 64, 256, 512, 1024)},
    batched=True,
    steps=thread_steps("shared_x", smem_of_x=True),
)
