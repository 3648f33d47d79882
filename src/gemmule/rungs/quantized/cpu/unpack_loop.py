"""The plain loop: take a code, make it a weight, multiply, add."""

from __future__ import annotations

from gemmule.backends.cpu import jit
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu._operands import (
    ALL_SIGNATURES,
    float_arithmetic,
    read_time,
    takes_row,
)
from gemmule.rungs.quantized.cpu.plain.products import bind_loop

RUNG = CpuRung(
    title="Unpack in a loop",
    idea="One weight at a time: shift and mask its code out of the byte, subtract the zero point, "
    "multiply by the group's scale and by x. It is what the others must agree with.",
    source="the definition w = scale * (code - zero)",
    op="matvec",
    signatures=ALL_SIGNATURES,
    arithmetic=float_arithmetic(),
    accepts_quant=takes_row,
    suggest=read_time(0.02, alone=True),
    bind=bind_loop,
    available=jit.unavailable,
)
