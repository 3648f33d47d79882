"""Float8 with scales by blocks: what DeepSeek's models multiply by.

The frame is that of `wgmma_float8`, for a stage is 128 steps, which is how far a block's scale
reaches. The stage's sum, which leaves the tensor cores anyway, joins the others by a multiply-add
instead of an addition, times the scale of its row of A and of its 128 columns of B. A second warp
of those that load brings them while a stage is awaited. One scale for a whole matrix or row costs
the same.
"""

from __future__ import annotations

from gemmule.core.problem import FLOAT8
from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda import wgmma_bytes
from gemmule.rungs.matmul.cuda import wgmma_float8

TILES = {"128x256": (128, 256), "128x128": (128, 128)}
MOST_STAGES = 5  # as the scales of a sixth would not fit
_COMMON = wgmma_bytes.common("matmul/wgmma_float8_blocks", TILES)

RUNG = CudaRung(
    title="Float8 by blocks",
    idea="Each 128 steps, a sum of their own for accuracy, join the others times a scale.",
    source="DeepSeek-V3, section 3.5.2; DeepGEMM; PTX ISA: wgmma m64nNk32",
    signatures=tuple((a, b, "bfloat16") for a in FLOAT8 for b in FLOAT8),
    scaled=wgmma_float8.SIGNATURES,
    by_blocks=True,
    arithmetic=lambda problem: wgmma_float8.ARITHMETIC,
    branch="float8",
    **{
        **_COMMON,
        "after": "wgmma_float8",
        "steps": wgmma_bytes.steps_by(TILES, MOST_STAGES),
    },
)
