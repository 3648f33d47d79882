"""A few columns: tiles of 48 rows by sixteen columns, activations as sums of bfloat16.

One instruction of AMX multiplies a tile of 16 rows x 32 columns with one of 32 rows x 16 columns,
in bfloat16. Codes less their zero points are exact in it, and a float32 is the sum of three
bfloat16 (a float16 of two), so nothing is rounded but sums. A look-up makes 32 bfloat16 of 32
nibbles; 48 rows share each tile of x. Where x may be rounded to 8 bits, one bfloat16 does.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.backends.cpu.amx import missing_tiles
from gemmule.backends.cpu.simd import LANES, block_columns
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs.quantized.cpu import _operands as operands
from gemmule.rungs.quantized.cpu._product import bind_ways
from gemmule.rungs.quantized.cpu.amx.bfloat16 import BLOCK_ROWS
from gemmule.rungs.quantized.cpu.amx.floats import bfloat16_tiles
from gemmule.rungs.quantized.cpu.blocks.few import job
from gemmule.rungs.quantized.cpu.few_columns import COLUMNS
from gemmule.rungs.quantized.cpu.tiles.kernels import groups_are_chunks
from gemmule.rungs.quantized.cpu.vector.rows import float_columns

# Codes decoded, and products by the pieces of x, for each float32 multiply-add of a core (95 a ns;
# Xeon with AMX, November 2026: 16 rows x 128 columns x 16 columns of 4-bit codes and three pieces
# take 156 ns, 64 columns 546; of 8-bit codes 224 and 735; with one piece 110, 309, 166 and 412).
# Whole products, whose x is read from farther away, take longer: 2048 x 2048 by 128 and by 512
# columns of two pieces 0.87 and 1.12 times what `rounded_tiles` takes, of 8-bit codes 0.84 and
# 1.16; of three 0.72 and 0.9, 0.87 and 0.96. 8-bit codes from memory are decoded more slowly. One
# piece again, with numbers for the zeros that such a loop had: what further columns cost at 2048 x
# 2048. Numbers turned into float32 and back are counted in multiply-adds, and those of x made ready
# (43 where x is near; by 31 to 2969 columns, 70 products on two cores, the choice is best by 100).
_CODES_PER_FMA = {"uint4": 0.61, "uint8": 0.23}
_PER_FMA = {"uint4": {1: 3.0, 2: 1.85, 3: 2.0}, "uint8": {1: 2.35, 2: 1.8, 3: 1.65}}
_CONVERTED, _ARRANGED = 10, 100
# One thread lays out what lies by columns anew: 0.9 ns a number in a cache, 2 to 3 beyond it.
_LAID = 150
# What `job` multiplies, 2048 x 2048 by 2 to 16 columns: 235 to 262 us, 370 to 390 of 8 bits.
_BY_ADDRESS = {"uint4": 4.4, "uint8": 4.4}


def _rounds(problem: Problem) -> bool:
    return problem.quant is not None and problem.quant.activations == "int8"


def _pieces(problem: Problem) -> int:
    """Return how many bfloat16 stand for an activation.

    Where rounding to 8 bits is permitted one is enough: it is wrong by at most 2^-9 of an element,
    an 8-bit code by 2^-8 of the largest in its block.
    """
    return 1 if _rounds(problem) else {"float32": 3, "float16": 2, "bfloat16": 1}[problem.b]


def _chain(problem: Problem, params: Params) -> int:
    """One sum in the tiles along a chunk, one along the chunks.

    Within a chunk a product meets 16 additions in the tile, that of both halves, one for every
    tile, the rest of its zero point and two scalings. With zero points that are no whole numbers
    the two terms are up to three times as large as their sum.
    """
    bits = 8 if problem.a == "uint8" else 4
    in_chunk = 17 + 3 * 16 // bits + 2
    if problem.quant is not None and problem.quant.has_zeros:
        in_chunk = 3 * (in_chunk + block_columns(bits) // 32 * 3 + 17)  # the sum of x, too
    return in_chunk + -(-problem.reduction // block_columns(bits)) + 3


def _bind(problem: Problem, params: Params) -> operands.Run:
    missing_tiles("bf16")  # the system has to be asked, whoever binds
    ways = bfloat16_tiles(_pieces(problem)), float_columns
    return bind_ways(*ways, columns=COLUMNS)(problem, params)


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    products = {dtype: by_pieces[_pieces(problem)] for dtype, by_pieces in _PER_FMA.items()}
    if problem.b == "bfloat16" and problem.n <= LANES:
        products = _BY_ADDRESS
    suggest = operands.columns_time(0.90, LANES, products, codes_per_fma=_CODES_PER_FMA, spreads=2)
    # The last rows take as long as 48, and so do threads that have none of the last round.
    rows = BLOCK_ROWS * machine.units
    whole = replace(problem, m=-(-problem.m // rows) * rows)
    found = operands.with_arranged(_ARRANGED, LANES, suggest, shared=True)(whole, machine)
    if found is None or products is _BY_ADDRESS:
        return found
    laid = (problem.k * problem.n) * (problem.layout_b == "col")
    laid += problem.outputs * (problem.layout_out == "col")
    more = laid * _LAID / machine.rates.fma
    if problem.b != "float32":
        converted = (problem.k * problem.n + problem.outputs) * _CONVERTED
        more += converted / (machine.rates.fma * machine.units)
    return replace(found, expected_s=found.expected_s + more)


RUNG = CpuRung(
    title="Tile registers",
    idea="Codes are exact in bfloat16, and a float32 is the sum of three: one instruction "
    "multiplies 16 rows x 32 columns with sixteen columns of activations.",
    source="AMX (TDPBF16PS); splitting as in Henry, Tang and Heinecke 2019",
    op="matmul",
    signatures=operands.FLOAT32_SIGNATURES,
    arithmetic=operands.float_arithmetic(_chain),
    after="sixteen_rows",
    params={"rows_per_task": operands.ROWS_PER_TASK},
    accepts_quant=lambda problem: operands.takes_row_along(problem) and groups_are_chunks(problem),
    suggest=_suggest,
    bind=_bind,
    job=job,
    available=lambda: missing_tiles("bf16"),
)
