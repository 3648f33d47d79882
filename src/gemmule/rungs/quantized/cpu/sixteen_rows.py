"""A few columns: sixteen rows in the lanes, decoded once for all columns.

64 bytes of sixteen rows are transposed and decoded once; then every multiply-add takes its
activation straight from memory, in all lanes, and nothing else is in the loop.
"""

from __future__ import annotations

from gemmule.backends.cpu.simd import block_columns
from gemmule.backends.cpu.target import missing_features
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Params
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu._product import bind_ways
from gemmule.rungs.quantized.cpu.tiles.kernels import float_tiles, groups_are_records
from gemmule.rungs.quantized.cpu.tiles.ops import TILE_COLUMNS

# Products for each float32 multiply-add of a core, as in `few_columns`.
_PER_FMA = {"uint4": 0.84, "uint8": 0.8}


def _chain(problem: Problem, params: Params) -> int:
    """One sum along a chunk, one along the chunks, and three roundings of a weight."""
    longest = block_columns(4)
    return min(problem.reduction, longest) + -(-problem.reduction // block_columns(8)) + 4


RUNG = CpuRung(
    title="Sixteen rows in the lanes",
    idea="A lane holds a row: 64 bytes of sixteen rows are transposed and decoded once, then every "
    "weight meets sixteen columns by broadcast activations, with no sum over lanes at the end.",
    source="the tile of a packed matmul (Goto and van de Geijn 2008)",
    op="matmul",
    signatures=operands.FLOAT32_SIGNATURES,
    arithmetic=operands.float_arithmetic(_chain),
    after="few_columns",
    params={"rows_per_task": operands.ROWS_PER_TASK},
    accepts_quant=lambda problem: operands.takes_row_along(problem) and groups_are_records(problem),
    suggest=operands.with_arranged(
        60, TILE_COLUMNS, operands.columns_time(0.90, TILE_COLUMNS, _PER_FMA)
    ),
    bind=bind_ways(float_tiles, columns=2 * TILE_COLUMNS),
    available=lambda: missing_features("avx512f", "avx512bw", "avx512dq"),
)
