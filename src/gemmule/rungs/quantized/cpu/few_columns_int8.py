"""A few columns rounded to 8 bits: integer products, four columns of B for each code.

Its loop shows the weakness of lanes along the row: for 32 dot products 32 more multiply-adds,
conversions and scalings turn sums of four into floats, because each lane meets another scale of x.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.backends.cpu.target import missing_features
from gemmule.rungs.quantized.cpu import few_columns
from gemmule.rungs.quantized.cpu._operands import columns_time, rounded_arithmetic, with_arranged
from gemmule.rungs.quantized.cpu._product import bind_ways
from gemmule.rungs.quantized.cpu.few_columns import COLUMNS
from gemmule.rungs.quantized.cpu.vector.rows import float_columns, integer_columns

# Products for each float32 multiply-add of a core, as in `few_columns`.
_PER_FMA = {"uint4": 1.0, "uint8": 0.73}

RUNG = replace(
    few_columns.RUNG,
    title="A few columns of 8-bit activations",
    idea="Codes are unpacked to bytes once for four columns; one instruction multiplies 64.",
    source="VNNI (VPDPBUSD); blocks of 32 activations as in llama.cpp's Q8_0",
    arithmetic=rounded_arithmetic,
    after="few_columns",
    branch="x rounded to 8 bits, where the caller permits it",
    suggest=with_arranged(150, COLUMNS, columns_time(0.95, COLUMNS, _PER_FMA)),
    bind=bind_ways(integer_columns, float_columns, columns=COLUMNS),
    available=lambda: missing_features("avx512f", "avx512bw", "avx512dq", "avx512vnni"),
)
