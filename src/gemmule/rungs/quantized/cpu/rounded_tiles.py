"""Many columns of bfloat16: weights rounded once to it, in tile registers.

Codes become the weights that they stand for, rounded to the dtype of x as a model in it has them,
so that the sums of all groups are one: a block of rows is decoded into the second-level cache as
tiles, which meet the tiles of all columns there. Codes are looked up 32 at a time and not moved; x
is packed in the order in which they come.
"""

from __future__ import annotations

from gemmule.backends.cpu.amx import missing_tiles
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CpuRung, Machine, Params, Suggestion
from gemmule.rungs._cpu import spread_s
from gemmule.rungs.matmul.cpu._tile_blocks import GROUP
from gemmule.rungs.matmul.cpu._tile_steps import STEP_TERMS
from gemmule.rungs.quantized.cpu._operands import signatures, takes_lanes
from gemmule.rungs.quantized.cpu.blocks.rounded import bind, job

# Multiply-adds of tiles, numbers of x packed and codes decoded for each float32 multiply-add of a
# core, which does 95 a ns (Xeon with AMX, November 2026, 2048 x 2048 in groups of 64: codes of 4
# bits 0.24 ms, of 8 bits 0.35, each further 64 columns 0.38; zeros for x would be twice as quick).
_PER_FMA, _PACKED_PER_FMA = 7.0, 0.03
_CODES_PER_FMA = {"uint4": 0.18, "uint8": 0.125}


def _chain(problem: Problem, params: Params) -> int:
    """A product meets sixteen additions within its tile, that of both halves, one a later tile."""
    return 17 + -(-problem.reduction // STEP_TERMS) + 4


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    columns = -(-problem.n // GROUP) * GROUP
    work = problem.m * (columns / _PER_FMA + 1 / _CODES_PER_FMA[problem.a])
    busy = problem.k * (work + columns / _PACKED_PER_FMA)
    return Suggestion({}, busy / (machine.rates.fma * machine.units) + 2 * spread_s(machine))


RUNG = CpuRung(
    title="Rounded weights in tile registers",
    idea="Codes become weights, rounded once to the bfloat16 of x, and meet its columns in tiles "
    "of 32 x 32 sums: one set of sums, none of a group.",
    source="AMX (TDPBF16PS); mixed operands as in Marlin (Frantar et al., 2024)",
    op="matmul",
    signatures=signatures("bfloat16"),
    layouts_b=("row", "col", "strided"),
    layouts_out=("row", "col"),
    arithmetic=lambda problem: Arithmetic("float32", _chain, product="float32", inputs="bfloat16"),
    after="packed_codes",
    params={"rows": (256, 128, 64, 512)},
    accepts_quant=takes_lanes,
    suggest=_suggest,
    bind=bind,
    job=job,
    available=lambda: missing_tiles("bf16"),
)
