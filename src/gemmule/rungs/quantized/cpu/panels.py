"""Across the rows: each row is spread over a panel of results that stays in L1."""

from __future__ import annotations

from gemmule.backends.cpu import jit
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu.plain.products import bind_panels

RUNG = CpuRung(
    title="Panels",
    idea="A product across the rows still reads along them: row i times x[i] is added to y, "
    "4,096 results at a time so that they stay in L1. Each thread takes a share of the rows and "
    "its own y; the shares are added at the end.",
    source="the column form of BLAS GEMV",
    op="matvec",
    signatures=operands.ALL_SIGNATURES,
    arithmetic=operands.float_arithmetic(),
    after="unpack_loop",
    branch="across the rows",
    params={"threads": (True, False)},
    accepts_quant=operands.takes_row_across,
    suggest=operands.read_time(0.25),
    bind=bind_panels,
    available=jit.unavailable,
)
