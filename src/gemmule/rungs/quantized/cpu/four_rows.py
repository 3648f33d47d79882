"""Four rows at a time: each activation is read once for four rows, nibbles split by parity.

x is split into its even and odd elements once, so no nibble is moved.
"""

from __future__ import annotations

from gemmule.backends.cpu import jit
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu.plain.products import bind_four_rows

RUNG = CpuRung(
    title="Four rows at a time",
    idea="Four rows share every activation and keep four streams of memory busy. A byte holds an "
    "even and an odd column, so x is split into its even and odd elements once and no nibble is "
    "moved. The zero point goes off each code, before the product: that stays exact where a "
    "correction by the sum of x would cancel.",
    source="row blocking as in BLAS level 2",
    op="matvec",
    signatures=operands.ALL_SIGNATURES,
    arithmetic=operands.float_arithmetic(),
    after="unpack_loop",
    accepts_quant=operands.takes_row_along,
    suggest=operands.read_time(0.35, alone=True),
    bind=bind_four_rows,
    available=jit.unavailable,
)
