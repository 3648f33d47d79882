"""A quantised matrix times a matrix in plain loops: that of one vector for every column."""

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
    title="Unpack in a loop, for every column",
    idea="The plain loop once for every column of B.",
    source="the definition w = scale * (code - zero)",
    op="matmul",
    signatures=ALL_SIGNATURES,
    arithmetic=float_arithmetic(),
    after="unpack_loop",
    branch="several columns",
    quantized=True,
    accepts_quant=takes_row,
    suggest=read_time(0.015, alone=True),
    bind=bind_loop,
    available=jit.unavailable,
)
