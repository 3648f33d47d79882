"""A few columns: decode in vector registers, four columns of B for each weight.

Lanes run along the row.
"""

from __future__ import annotations

from gemmule.backends.cpu.target import missing_features
from gemmule.core.rung import CpuRung
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu._product import bind_ways
from gemmule.rungs.quantized.cpu.vector.rows import float_columns

COLUMNS = 4  # 4 rows x 4 columns of totals fill half of the 32 vector registers

# Products of codes for each float32 multiply-add that a core can do: a ratio, so that it travels
# (Xeon with AMX, November 2026: what a further column costs beyond the eighth).
_PER_FMA = {"uint4": 0.62, "uint8": 0.48}

RUNG = CpuRung(
    title="A few columns in vector registers",
    idea="A looked-up weight meets four columns of B in a row of multiply-adds. From about five "
    "columns on (4 bits) the multipliers, not the memory, set the time.",
    source="our own; register blocking as in BLAS level 3",
    op="matmul",
    signatures=operands.VECTOR_SIGNATURES,
    arithmetic=operands.float_arithmetic(operands.in_lanes),
    after="column_loop",
    params={"rows_per_task": operands.ROWS_PER_TASK},
    accepts_quant=operands.takes_lanes_along,
    suggest=operands.with_arranged(150, COLUMNS, operands.columns_time(0.90, COLUMNS, _PER_FMA)),
    bind=bind_ways(float_columns, columns=COLUMNS),
    available=lambda: missing_features("avx512f", "avx512bw", "avx512dq"),
)
