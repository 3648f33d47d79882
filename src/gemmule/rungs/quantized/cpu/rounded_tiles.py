"""Many columns: weights in bfloat16, in tile registers.

Codes become the weights that they stand for, so that the sums of all groups are one: rounded to a
bfloat16 x as a model in it has them, else as sums of two or three bfloat16, like x. A block of rows
is decoded into the second-level cache as tiles, which meet the tiles of all columns there. Codes
are looked up 32 at a time and not moved; x is packed in the order in which they come.
"""

from __future__ import annotations

from gemmule.backends.cpu.amx import missing_tiles
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CpuRung, Machine, Params, Suggestion
from gemmule.rungs._cpu import spread_s
from gemmule.rungs.matmul.cpu._tile_blocks import GROUP
from gemmule.rungs.matmul.cpu._tile_steps import PRODUCTS, STEP_TERMS
from gemmule.rungs.quantized.cpu._operands import signatures, takes_lanes, takes_lanes_along
from gemmule.rungs.quantized.cpu.blocks.rounded import bind, job, pieces_of

# Multiply-adds of tiles, numbers of x packed and codes decoded for each float32 multiply-add of a
# core, which does 95 a ns (Xeon with AMX, November 2026, 2048 x 2048 in groups of 64: codes of 4
# bits 0.24 ms, of 8 bits 0.35, each further 64 columns 0.38; zeros for x would be twice as quick).
# By two to six products of pieces, groups of 32: 64, 512 columns 1.1, 5.1 to 2.1, 13.5 ms, of 8
# bits 1.2, 5.4 to 2.4, 15; so that a product beside others takes two thirds of one alone. Of x in
# three pieces, 16 to 1024 rows of codes, a number takes 1.3 to 2.4 ns.
_PER_FMA, _PACKED_PER_FMA = 7.0, {1: 0.03, 2: 0.02, 3: 0.02}
_CODES_PER_FMA = {"uint4": 0.18, "uint8": 0.125}


def _chain(problem: Problem, params: Params) -> int:
    """A product meets sixteen additions within its tile, that of both halves, one a later tile."""
    products = len(PRODUCTS[pieces_of(problem)])
    return 17 + products * -(-problem.reduction // STEP_TERMS) + 4 + products


def _arithmetic(problem: Problem) -> Arithmetic:
    permitted = problem.quant is not None and problem.quant.activations == "int8"
    inputs = "bfloat16" if pieces_of(problem) == (1, 1) else None
    bits = 8 if permitted else None
    return Arithmetic("float32", _chain, "float32", inputs, activations_bits=bits)


def _takes(problem: Problem) -> bool:
    return (takes_lanes if problem.b == "bfloat16" else takes_lanes_along)(problem)


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    columns, pieces = -(-problem.n // GROUP) * GROUP, pieces_of(problem)
    products, decoding = (2 * len(PRODUCTS[pieces]) + 1) / 3, 1 if pieces[0] == 1 else 2
    codes = decoding / _CODES_PER_FMA[problem.a]
    work = problem.m * (columns * products / _PER_FMA + codes)
    busy = problem.k * (work + columns * pieces[1] / _PACKED_PER_FMA[pieces[1]])
    return Suggestion({}, busy / (machine.rates.fma * machine.units) + 2 * spread_s(machine))


RUNG = CpuRung(
    title="Weights in tile registers",
    idea="Codes become weights, rounded once to the bfloat16 of x or sums of two or three, and "
    "meet its columns in tiles of 32 x 32 sums: one set of sums, none of a group.",
    source="AMX (TDPBF16PS); mixed operands as in Marlin (Frantar et al., 2024); "
    "splitting as in Henry, Tang and Heinecke 2019",
    op="matmul",
    signatures=signatures("bfloat16", "float32", "float16"),
    layouts_b=("row", "col", "strided"),
    layouts_out=("row", "col"),
    arithmetic=_arithmetic,
    after="packed_codes",
    params={"rows": (256, 128, 64, 512)},
    accepts_quant=_takes,
    suggest=_suggest,
    bind=bind,
    job=job,
    available=lambda: missing_tiles("bf16"),
)
