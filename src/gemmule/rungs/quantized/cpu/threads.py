"""Four rows at a time on all threads."""

from __future__ import annotations

from gemmule.backends.cpu import jit
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu._operands import (
    ALL_SIGNATURES,
    ROWS_PER_TASK,
    float_arithmetic,
    read_time,
    takes_row_along,
)
from gemmule.rungs.quantized.cpu.plain.products import bind_four_rows

RUNG = CpuRung(
    title="Threads",
    idea="Tasks of some rows each go to all threads. Small matrices stay on one.",
    source="row blocking as in BLAS level 2",
    op="matvec",
    signatures=ALL_SIGNATURES,
    arithmetic=float_arithmetic(),
    after="four_rows",
    params={"rows_per_task": ROWS_PER_TASK},
    quantized=True,
    accepts_quant=takes_row_along,
    suggest=read_time(0.40),
    bind=bind_four_rows,
    available=jit.unavailable,
)
