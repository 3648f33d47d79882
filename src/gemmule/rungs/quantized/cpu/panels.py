"""Across the rows: each row is spread over a panel of results that stays in L1."""

from __future__ import annotations

from gemmule.backends.cpu import jit
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu._operands import (
    ALL_SIGNATURES,
    float_arithmetic,
    read_time,
    takes_row_across,
)
from gemmule.rungs.quantized.cpu.plain.products import bind_panels

RUNG = CpuRung(
    title="Panels",
    idea="A product across the rows still reads along them: row i times x[i] is added to y, "
    "4,096 results at a time so that they stay in L1. Each thread takes a share of the rows and "
    "its own y; the shares are added at the end.",
    source="the column form of BLAS GEMV",
    op="matvec",
    signatures=ALL_SIGNATURES,
    arithmetic=float_arithmetic(),
    after="unpack_loop",
    branch="across the rows",
    params={"threads": (True, False)},
    accepts_quant=takes_row_across,
    suggest=read_time(0.25),
    bind=bind_panels,
    available=jit.unavailable,
)
