"""Warpgroups for bytes: int8 and uint8 by `wgmma`, summed in int32, exact.

The frame is that of the halves: one thread loads by TMA, two warpgroups multiply, tiles follow
without a pause. A stage's lines of 128 bytes hold twice as many steps, and an instruction takes 32
of them in the time of 16 halves. But it reads bytes along the reduction alone: a B in rows, say, is
transposed by a kernel in front, 4 x 4 bytes at a time, into the workspace; so are operands lined up
that begin where TMA cannot read.
"""

from __future__ import annotations

from gemmule.core.problem import BYTES
from gemmule.core.rung import Arithmetic, CudaRung
from gemmule.rungs._cuda import wgmma_bytes

TILES = {"128x256": (128, 256), "256x128": (256, 128), "128x128": (128, 128), "128x64": (128, 64)}

PAIRS = tuple((a, b) for a in BYTES for b in BYTES)

RUNG = CudaRung(
    title="Warpgroups for bytes",
    idea="wgmma takes 32 steps of bytes at a time; what lies across the sum is transposed before.",
    source="PTX ISA: wgmma m64nNk32 with s32 sums",
    signatures=tuple((a, b, "int32") for a, b in PAIRS),
    scaled=tuple((a, b, out) for a, b in PAIRS for out in wgmma_bytes.SCALED),
    finished=tuple(("int8", "int8", out) for out in wgmma_bytes.FINISHED),
    arithmetic=lambda problem: Arithmetic(accumulator="int32", chain=lambda p, params: p.k),
    branch="bytes",
    **wgmma_bytes.common("matmul/wgmma_int8", TILES),
)
