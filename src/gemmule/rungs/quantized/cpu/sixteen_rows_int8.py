"""A few columns rounded to 8 bits: sixteen rows in the lanes, activations broadcast.

All lanes meet the same scale of x, so 256 dot products need 64 conversions and as many scalings.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.backends.cpu.target import missing_features
from gemmule.rungs.quantized.cpu import sixteen_rows
from gemmule.rungs.quantized.cpu._operands import (
    columns_time,
    rounded_arithmetic,
    takes_row_along,
    with_arranged,
)
from gemmule.rungs.quantized.cpu._product import bind_ways
from gemmule.rungs.quantized.cpu.few_columns import COLUMNS
from gemmule.rungs.quantized.cpu.tiles.kernels import groups_are_records, integer_tiles
from gemmule.rungs.quantized.cpu.tiles.ops import TILE_COLUMNS
from gemmule.rungs.quantized.cpu.vector.rows import float_columns

# Products for each float32 multiply-add of a core, as in `few_columns`.
_PER_FMA = {"uint4": 2.1, "uint8": 2.4}

RUNG = replace(
    sixteen_rows.RUNG,
    title="Sixteen rows in the lanes, 8-bit activations",
    idea="One instruction multiplies four broadcast activations with sixteen rows, and the integer "
    "sums of 32 columns of the matrix meet one conversion, not eight.",
    source="VNNI (VPDPBUSD); the tile of a packed matmul (Goto and van de Geijn 2008)",
    arithmetic=rounded_arithmetic,
    after="few_columns_int8",
    accepts_quant=lambda problem: takes_row_along(problem) and groups_are_records(problem, 16),
    suggest=with_arranged(
        85, TILE_COLUMNS, columns_time(0.95, TILE_COLUMNS, _PER_FMA, rounded=True)
    ),
    bind=bind_ways(integer_tiles, float_columns, columns=COLUMNS),
    available=lambda: missing_features("avx512f", "avx512bw", "avx512dq", "avx512vnni"),
)
