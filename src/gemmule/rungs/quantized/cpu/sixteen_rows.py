"""A few columns: sixteen rows in the lanes, decoded once for all columns.

64 bytes of sixteen rows are transposed and decoded once; then every multiply-add takes its
activation straight from memory, in all lanes, and nothing else is in the loop.
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
    read_time,
    takes_row_along,
)
from gemmule.rungs.quantized.cpu._tile_ops import TILE_COLUMNS, chunk_columns
from gemmule.rungs.quantized.cpu._tiles import groups_are_chunks, multiply_float_tiles

# Products for each float32 multiply-add of a core, as in `few_columns`.
_PER_FMA = {"uint4": 0.84, "uint8": 0.8}


def _arithmetic(problem: Problem) -> Arithmetic:
    """One sum along a chunk, one along the chunks, and three roundings of a weight."""
    permitted = problem.quant is not None and problem.quant.activations == "int8"

    def chain(p: Problem, params: Params) -> int:
        longest = chunk_columns(4)
        return min(p.reduction, longest) + -(-p.reduction // chunk_columns(8)) + 4

    bits = 8 if permitted else None
    return Arithmetic("float32", chain, product="float32", activations_bits=bits)


def _bind(problem: Problem, params: Params) -> Run:
    rows_per_task = int(params["rows_per_task"])

    def core(parts: Stored, B: NDArray[Any], C: NDArray[Any]) -> None:
        multiply_float_tiles(parts, B, C, rows_per_task)

    return bound(core, "float32")


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    reading = read_time(0.90, columns_at_once=max(1, problem.n))(problem, machine)
    if reading is None:
        return None
    columns = -(-problem.n // TILE_COLUMNS) * TILE_COLUMNS
    products = (
        problem.m * problem.k * columns / (_PER_FMA[problem.a] * machine.rates.fma * machine.units)
    )
    return Suggestion({}, max(reading.expected_s, products + spread_s(machine)))


RUNG = CpuRung(
    title="Sixteen rows in the lanes",
    idea="A lane holds a row: 64 bytes of sixteen rows are transposed and decoded once, then every "
    "weight meets sixteen columns by broadcast activations, with no sum over lanes at the end.",
    source="the tile of a packed matmul (Goto and van de Geijn 2008)",
    op="matmul",
    signatures=FLOAT32_SIGNATURES,
    arithmetic=_arithmetic,
    after="few_columns",
    params={"rows_per_task": ROWS_PER_TASK},
    quantized=True,
    accepts_quant=lambda problem: takes_row_along(problem) and groups_are_chunks(problem),
    suggest=_suggest,
    bind=_bind,
    available=lambda: missing_features("avx512f", "avx512bw"),
)
