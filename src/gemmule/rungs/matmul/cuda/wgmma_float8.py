"""Warpgroups for float8: e4m3 and e5m2 in any mix by `wgmma`, summed in float32 beside it.

The frame is that of `wgmma_int8`. Hopper's tensor cores align the products of an instruction, of
32 steps, and the sum so far to the largest, and keep 14 bits: over thousands of steps errors would
grow far beyond float32's. So a sum leaves them after each stage of 128 steps for registers, where
float32 adds the stages up. Of these there are 128 for sums and 64 for the stage on its way, a
warpgroup's tile of 128 x 128 by halves; while one warpgroup adds, the other one multiplies.
"""

from __future__ import annotations

from gemmule.core.problem import FLOAT8
from gemmule.core.rung import Arithmetic, CudaRung
from gemmule.rungs._cuda import wgmma_bytes
from gemmule.rungs._cuda.geometry import ceil_div

TILES = {"256x128": (256, 128), "128x256": (128, 256), "128x128": (128, 128), "128x64": (128, 64)}
KEPT = 2.0**11  # over float32's unit roundoff: 14 bits, the rest cut off

# In units of 14 bits: each product of a stage and four sums on their way are cut off once, and the
# stages' float32 sums count 2^-11 each.
ARITHMETIC = Arithmetic(
    accumulator="float32",
    chain=lambda problem, params: (
        min(problem.k, wgmma_bytes.STEPS)
        + 4
        + ceil_div(ceil_div(problem.k, wgmma_bytes.STEPS), 2048)
    ),
    per_add=KEPT,
)

SIGNATURES = tuple((a, b, out) for a in FLOAT8 for b in FLOAT8 for out in wgmma_bytes.SCALED)

FINISHED = tuple(("float8_e4m3fn", "float8_e4m3fn", out) for out in wgmma_bytes.FINISHED)

RUNG = CudaRung(
    title="Warpgroups for float8",
    idea="Tensor cores sum 128 steps, which is all they are exact enough for; registers the rest.",
    source="DeepSeek-V3, section 3.3.2: promotion to CUDA cores; PTX ISA: wgmma m64nNk32",
    signatures=SIGNATURES,
    scaled=SIGNATURES,
    finished=FINISHED,
    arithmetic=lambda problem: ARITHMETIC,
    branch="float8",
    **wgmma_bytes.common("matmul/wgmma_float8", TILES),
)
