"""A few columns: decode in vector registers, four columns of B for each weight.

Lanes run along the row.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from gemmule.backends.cpu.target import missing_features
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs._cpu import spread_s
from gemmule.rungs.quantized.cpu._operands import (
    FLOAT32_SIGNATURES,
    ROWS_PER_TASK,
    Run,
    Stored,
    bound,
    float_arithmetic,
    groups_fit_lanes,
    read_time,
    takes_row_along,
)
from gemmule.rungs.quantized.cpu._rows import multiply_rows

COLUMNS = 4  # 4 rows x 4 columns of totals fill half of the 32 vector registers

# Products of codes for each float32 multiply-add that a core can do: a ratio, so that it travels
# (Xeon with AMX, November 2026: what a further column costs beyond the eighth).
_PER_FMA = {"uint4": 0.62, "uint8": 0.48}


def _bind(problem: Problem, params: Params) -> Run:
    rows_per_task = int(params["rows_per_task"])
    columns = min(COLUMNS, max(1, problem.n))

    def core(parts: Stored, B: NDArray[Any], C: NDArray[Any]) -> None:
        multiply_rows(parts, B, C, columns, rows_per_task)

    return bound(core, "float32")


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    reading = read_time(0.90, columns_at_once=max(1, problem.n))(problem, machine)
    if reading is None:
        return None
    columns = -(-problem.n // COLUMNS) * COLUMNS
    products = (
        problem.m * problem.k * columns / (_PER_FMA[problem.a] * machine.rates.fma * machine.units)
    )
    return Suggestion({}, max(reading.expected_s, products + spread_s(machine)))


RUNG = CpuRung(
    title="A few columns in vector registers",
    idea="A looked-up weight meets four columns of B in a row of multiply-adds. From about five "
    "columns on (4 bits) the multipliers, not the memory, set the time.",
    source="our own; register blocking as in BLAS level 3",
    op="matmul",
    signatures=FLOAT32_SIGNATURES,
    arithmetic=float_arithmetic(in_lanes=True),
    after="column_loop",
    params={"rows_per_task": ROWS_PER_TASK},
    quantized=True,
    accepts_quant=lambda problem: takes_row_along(problem) and groups_fit_lanes(problem),
    suggest=_suggest,
    bind=_bind,
    available=lambda: missing_features("avx512f", "avx512bw"),
)
