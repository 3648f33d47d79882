"""A few columns rounded to 8 bits: sixteen rows in the lanes, activations broadcast.

All lanes meet the same scale of x, so 256 dot products need 64 conversions and as many scalings.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from gemmule.backends.cpu.target import missing_features
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CpuRung, Machine, Params, Suggestion
from gemmule.rungs._cpu import spread_s
from gemmule.rungs.quantized.cpu._operands import (
    FLOAT32_SIGNATURES,
    ROWS_PER_TASK,
    Run,
    Stored,
    bound,
    chain_of,
    read_time,
    takes_row_along,
)
from gemmule.rungs.quantized.cpu._tile_ops import TILE_COLUMNS
from gemmule.rungs.quantized.cpu._tiles import groups_are_chunks, multiply_tiles
from gemmule.rungs.quantized.cpu.few_columns import COLUMNS

# Products for each float32 multiply-add of a core, as in `few_columns`.
_PER_FMA = {"uint4": 2.1, "uint8": 2.4}


def _arithmetic(problem: Problem) -> Arithmetic:
    return Arithmetic("float32", chain_of(in_lanes=True), product="float32", activations_bits=8)


def _bind(problem: Problem, params: Params) -> Run:
    rows_per_task = int(params["rows_per_task"])
    columns = min(COLUMNS, max(1, problem.n))

    def core(parts: Stored, B: NDArray[Any], C: NDArray[Any]) -> None:
        multiply_tiles(parts, B, C, rows_per_task, columns)

    return bound(core, "float32")


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    reading = read_time(0.95, columns_at_once=max(1, problem.n))(problem, machine)
    if reading is None or problem.quant is None or problem.quant.activations != "int8":
        return None
    columns = -(-problem.n // TILE_COLUMNS) * TILE_COLUMNS
    products = (
        problem.m * problem.k * columns / (_PER_FMA[problem.a] * machine.rates.fma * machine.units)
    )
    return Suggestion({}, max(reading.expected_s, products + spread_s(machine)))


RUNG = CpuRung(
    title="Sixteen rows in the lanes, 8-bit activations",
    idea="One instruction multiplies four broadcast activations with sixteen rows, and the integer "
    "sums of 32 columns of the matrix meet one conversion, not eight.",
    source="VNNI (VPDPBUSD); the tile of a packed matmul (Goto and van de Geijn 2008)",
    op="matmul",
    signatures=FLOAT32_SIGNATURES,
    arithmetic=_arithmetic,
    after="few_columns_int8",
    params={"rows_per_task": ROWS_PER_TASK},
    quantized=True,
    accepts_quant=lambda problem: takes_row_along(problem) and groups_are_chunks(problem),
    suggest=_suggest,
    bind=_bind,
    available=lambda: missing_features("avx512f", "avx512bw", "avx512vnni"),
)
