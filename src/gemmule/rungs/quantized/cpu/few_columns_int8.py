"""A few columns rounded to 8 bits: integer products, four columns of B for each code.

Its loop shows the weakness of lanes along the row: for 32 dot products 32 more multiply-adds,
conversions and scalings turn sums of four into floats, because each lane meets another scale of x.
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
    groups_fit_lanes,
    read_time,
    takes_row_along,
)
from gemmule.rungs.quantized.cpu._rows import multiply_rows_in_integers
from gemmule.rungs.quantized.cpu.few_columns import COLUMNS

# Products for each float32 multiply-add of a core, as in `few_columns`.
_PER_FMA = {"uint4": 1.0, "uint8": 0.73}


def _arithmetic(problem: Problem) -> Arithmetic:
    return Arithmetic("float32", chain_of(in_lanes=True), product="float32", activations_bits=8)


def _bind(problem: Problem, params: Params) -> Run:
    rows_per_task = int(params["rows_per_task"])
    columns = min(COLUMNS, max(1, problem.n))

    def core(parts: Stored, B: NDArray[Any], C: NDArray[Any]) -> None:
        multiply_rows_in_integers(parts, B, C, columns, rows_per_task)

    return bound(core, "float32")


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    reading = read_time(0.95, columns_at_once=max(1, problem.n))(problem, machine)
    if reading is None:
        return None
    columns = -(-problem.n // COLUMNS) * COLUMNS
    products = (
        problem.m * problem.k * columns / (_PER_FMA[problem.a] * machine.rates.fma * machine.units)
    )
    return Suggestion({}, max(reading.expected_s, products + spread_s(machine)))


RUNG = CpuRung(
    title="A few columns of 8-bit activations",
    idea="Codes are unpacked to bytes once for four columns; one instruction multiplies 64.",
    source="VNNI (VPDPBUSD); blocks of 32 activations as in llama.cpp's Q8_0",
    op="matmul",
    signatures=FLOAT32_SIGNATURES,
    arithmetic=_arithmetic,
    after="few_columns",
    branch="x rounded to 8 bits, where the caller permits it",
    params={"rows_per_task": ROWS_PER_TASK},
    quantized=True,
    accepts_quant=lambda problem: takes_row_along(problem) and groups_fit_lanes(problem),
    suggest=_suggest,
    bind=_bind,
    available=lambda: missing_features("avx512f", "avx512bw", "avx512vnni"),
)
