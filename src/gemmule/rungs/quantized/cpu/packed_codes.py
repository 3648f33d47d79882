"""Many columns: blocks of rows are decoded near the multipliers and meet packed columns there.

The register tile is that of `matmul/cpu/packed`. What it copies of a float matrix is here decoded
from codes, as many columns of a row as stay in the second-level cache until all columns of B have
passed.
"""

from __future__ import annotations

from gemmule.backends.cpu.target import missing_vectors
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Suggestion
from gemmule.rungs._cpu import spread_s
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu.blocks.products import bind, tile_columns

# Multiply-adds of the tile, codes decoded and numbers of B packed for each float32 multiply-add
# that a core can do (a number of B 0.7 to 1.2 ns where it does 94 in one, by 16 and 112 rows of
# codes; the tile's loop alone does 0.95; Xeons with AMX, November 2026).
_PER_FMA, _CODES_PER_FMA, _PACKED_PER_FMA = 0.76, 0.2, 0.014


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    columns = tile_columns(problem.n)
    work = problem.m * columns / _PER_FMA + problem.m / _CODES_PER_FMA + columns / _PACKED_PER_FMA
    busy = problem.k * work / (machine.rates.fma * machine.units)
    return Suggestion({}, busy + 2 * spread_s(machine))


RUNG = CpuRung(
    title="Packed blocks of codes",
    idea="A block of rows is decoded in vector registers into the second-level cache, where a tile "
    "of 12 rows by 32 columns reads it from. Columns are packed in the order in which lanes hold "
    "codes, so no weight is moved.",
    source="Goto and van de Geijn 2008; BLIS, Van Zee and van de Geijn 2015",
    op="matmul",
    signatures=operands.VECTOR_SIGNATURES,
    layouts_b=("row", "col", "strided"),
    layouts_out=("row", "col"),
    arithmetic=operands.float_arithmetic(),
    after="dequantise_blas",
    params={"rows": (480, 192, 96)},
    accepts_quant=operands.takes_lanes_along,
    suggest=_suggest,
    bind=bind,
    available=missing_vectors,
)
