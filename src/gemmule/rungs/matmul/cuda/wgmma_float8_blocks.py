"""Float8 with A in registers, and scales by blocks: what DeepSeek's models multiply by.

`wgmma_float8` has the tensor cores read A from shared memory for each half of a warpgroup's 256
columns. Here a warpgroup's rows of a stage go to registers once and are multiplied from there. That
was to spare shared memory, and takes a seventh longer: products from registers are what limits it.

A stage is 128 steps, which is how far a block's scale reaches: its sum, which leaves the tensor
cores anyway, joins the others by a multiply-add, times the scale of its row of A and of its 128
columns of B. A second warp of those that load brings them while a stage is awaited. One scale
for a whole matrix or row costs the same.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda import wgmma_bytes
from gemmule.rungs.matmul.cuda import wgmma_float8

TILES = {"128x256": (128, 256), "128x128": (128, 128)}
E4M3 = ("float8_e4m3fn", "float8_e4m3fn")  # whose kernels a GPU proved
MOST_STAGES = 5  # as the scales of a sixth would not fit
_COMMON = wgmma_bytes.common("matmul/wgmma_float8_blocks", TILES)

RUNG = CudaRung(
    title="Float8 from registers",
    idea="A's rows are read once for two sums, and each 128 steps join the others times a scale.",
    source="DeepSeek-V3, section 3.5.2; DeepGEMM; PTX ISA: wgmma m64nNk32 with A in registers",
    signatures=((*E4M3, "bfloat16"),),
    scaled=tuple((*E4M3, out) for out in wgmma_bytes.SCALED),
    by_blocks=True,
    arithmetic=lambda problem: wgmma_float8.ARITHMETIC,
    branch="float8",
    **{
        **_COMMON,
        "after": "wgmma_float8",
        "steps": wgmma_bytes.steps_by(TILES, MOST_STAGES),
    },
)
