"""A few columns rounded to 8 bits: tiles of sixteen rows by sixteen columns.

Bytes are multiplied in tiles of AMX: codes as they lie (nibbles unpacked first) with 32 rounded
activations of sixteen columns. Each block of 32 has its own scale, so its sums leave the tile
through memory to be converted and scaled, which takes longer than the products.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from gemmule.backends.cpu.amx import missing_tiles
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CpuRung, Machine, Params, Suggestion
from gemmule.rungs.quantized.cpu._amx_launch import (
    groups_are_records,
    multiply_integer_tiles,
    suggestion,
)
from gemmule.rungs.quantized.cpu._operands import (
    FLOAT32_SIGNATURES,
    ROWS_PER_TASK,
    Run,
    Stored,
    bound,
    chain_of,
    takes_row_along,
)

# Codes prepared and products for each float32 multiply-add of a core, which does 95 a nanosecond
# (Xeon with AMX, November 2026: from caches 126 ns
# for 16 rows x 128 columns x 16 columns of 4-bit codes, 435 ns for 64 columns; 8 bits: what each
# further column costs beside a read of the codes).
_CODES_PER_FMA = {"uint4": 0.95, "uint8": 1.05}
_PER_FMA = {"uint4": 3.3, "uint8": 3.2}


def _arithmetic(problem: Problem) -> Arithmetic:
    return Arithmetic("float32", chain_of(in_lanes=True), product="float32", activations_bits=8)


def _bind(problem: Problem, params: Params) -> Run:
    missing_tiles("int8")  # the system has to be asked, whoever binds
    rows_per_task = int(params["rows_per_task"])

    def core(parts: Stored, B: NDArray[Any], C: NDArray[Any]) -> None:
        multiply_integer_tiles(parts, B, C, rows_per_task)

    return bound(core, "float32")


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    if problem.quant is None or problem.quant.activations != "int8":
        return None
    return suggestion(problem, machine, _CODES_PER_FMA[problem.a], _PER_FMA[problem.a])


RUNG = CpuRung(
    title="Tile registers, 8-bit activations",
    idea="One instruction multiplies 16 rows x 32 columns of codes with 16 columns of activations: "
    "8,192 products in 16 cycles. Scaling their sums then takes longer.",
    source="AMX (TDPBUSD); blocks of 32 activations as in llama.cpp's Q8_0",
    op="matmul",
    signatures=FLOAT32_SIGNATURES,
    arithmetic=_arithmetic,
    after="sixteen_rows_int8",
    params={"rows_per_task": ROWS_PER_TASK},
    quantized=True,
    accepts_quant=lambda problem: takes_row_along(problem) and groups_are_records(problem),
    suggest=_suggest,
    bind=_bind,
    available=lambda: missing_tiles("int8"),
)
