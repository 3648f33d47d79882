"""The plain loop: take a code, make it a weight, multiply, add."""

from __future__ import annotations

from gemmule.backends.cpu import jit
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu.plain.products import bind_loop

RUNG = CpuRung(
    title="Unpack in a loop",
    idea="One weight at a time: shift and mask its code out of the byte, subtract the zero point, "
    "multiply by the group's scale and by x. It is what the others must agree with.",
    source="the definition w = scale * (code - zero)",
    op="matvec",
    signatures=operands.ALL_SIGNATURES,
    arithmetic=operands.float_arithmetic(),
    accepts_quant=operands.takes_row,
    suggest=operands.read_time(0.02, alone=True),
    bind=bind_loop,
    available=jit.unavailable,
)
