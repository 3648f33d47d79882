"""Many columns: dequantise a block of rows, multiply it by BLAS while it is in the cache."""

from __future__ import annotations

from gemmule.backends.cpu import jit
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Suggestion
from gemmule.rungs._cpu import spread_s
from gemmule.rungs.quantized.cpu._operands import ALL_SIGNATURES, float_arithmetic, takes_row
from gemmule.rungs.quantized.cpu.plain.products import bind_blas

# Codes decoded, and numbers of B that BLAS packs for each block of rows, for each float32
# multiply-add of a core (Xeon with AMX, one core, busy, November 2026, 94 a ns: 16 and 112 rows by
# 512 and 4096 columns, 0.3 to 0.4 ns a number of B where its columns lie behind each other).
_CODES_PER_FMA, _PACKED_PER_FMA = 0.03, 0.03
BLOCK_BYTES = (4 << 20, 1 << 20, 16 << 20)


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    rates = machine.rates
    numbers, item = problem.k * problem.n, 8 if problem.b == "float64" else 4
    products = problem.flops / rates.blas
    blocks = max(1.0, problem.m * problem.k * item / BLOCK_BYTES[0])
    ready = problem.m * problem.k / _CODES_PER_FMA + blocks * numbers / _PACKED_PER_FMA
    busy = (products + ready / (rates.fma * machine.units)) * item / 4
    turned = numbers if problem.b not in ("float32", "float64") else 0
    turned += problem.outputs if problem.out not in ("float32", "float64") else 0
    return Suggestion({}, busy + turned / rates.convert + 3 * spread_s(machine))


RUNG = CpuRung(
    title="Dequantise blocks for BLAS",
    idea="Decoding a weight costs the same for one column as for a thousand. A block of rows that "
    "fits the cache is decoded once and multiplied by NumPy's BLAS.",
    source="NumPy's BLAS",
    op="matmul",
    signatures=ALL_SIGNATURES,
    arithmetic=float_arithmetic(),
    after="column_loop",
    branch="many columns",
    layouts_out=("row", "col"),
    params={"block_bytes": BLOCK_BYTES},
    accepts_quant=takes_row,
    suggest=_suggest,
    bind=bind_blas,
    available=jit.unavailable,
)
