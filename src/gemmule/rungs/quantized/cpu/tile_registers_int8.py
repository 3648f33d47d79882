"""A few columns rounded to 8 bits: tiles of sixteen rows by sixteen columns.

Bytes are multiplied in tiles of AMX: codes as they lie (nibbles unpacked first) with 32 rounded
activations of sixteen columns. Each block of 32 has its own scale, so its sums leave the tile
through memory to be converted and scaled, which takes longer than the products.
"""

from __future__ import annotations

from gemmule.backends.cpu.amx import missing_tiles
from gemmule.backends.cpu.simd import LANES
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Params
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu._product import bind_ways
from gemmule.rungs.quantized.cpu.amx.int8 import integer_tiles
from gemmule.rungs.quantized.cpu.few_columns import COLUMNS
from gemmule.rungs.quantized.cpu.tiles.kernels import groups_are_records
from gemmule.rungs.quantized.cpu.vector.rows import float_columns

# Codes prepared and products for each float32 multiply-add of a core, which does 95 a nanosecond
# (Xeon with AMX, November 2026: from caches 126 ns
# for 16 rows x 128 columns x 16 columns of 4-bit codes, 435 ns for 64 columns; 8 bits: what each
# further column costs beside a read of the codes).
_CODES_PER_FMA = {"uint4": 0.95, "uint8": 1.05}
_PER_FMA = {"uint4": 3.3, "uint8": 3.2}


def _bind(problem: Problem, params: Params) -> operands.Run:
    missing_tiles("int8")  # the system has to be asked, whoever binds
    return bind_ways(integer_tiles, float_columns, columns=COLUMNS)(problem, params)


RUNG = CpuRung(
    title="Tile registers, 8-bit activations",
    idea="One instruction multiplies 16 rows x 32 columns of codes with 16 columns of activations: "
    "8,192 products in 16 cycles. Scaling their sums then takes longer.",
    source="AMX (TDPBUSD); blocks of 32 activations as in llama.cpp's Q8_0",
    op="matmul",
    signatures=operands.FLOAT32_SIGNATURES,
    arithmetic=operands.rounded_arithmetic,
    after="sixteen_rows_int8",
    params={"rows_per_task": operands.ROWS_PER_TASK},
    accepts_quant=lambda problem: operands.takes_row_along(problem) and groups_are_records(problem),
    suggest=operands.with_arranged(
        80,
        LANES,
        operands.columns_time(
            0.90, LANES, _PER_FMA, codes_per_fma=_CODES_PER_FMA, spreads=2, rounded=True
        ),
    ),
    bind=_bind,
    available=lambda: missing_tiles("int8"),
)
