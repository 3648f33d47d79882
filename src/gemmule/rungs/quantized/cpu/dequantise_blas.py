"""Many columns: dequantise a block of rows, multiply it by BLAS while it is in the cache."""

from __future__ import annotations

from gemmule.backends.cpu import jit
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Suggestion
from gemmule.rungs._cpu import spread_s
from gemmule.rungs.quantized.cpu._operands import ALL_SIGNATURES, float_arithmetic, takes_row
from gemmule.rungs.quantized.cpu.plain.products import bind_blas

# Codes decoded, and packed by BLAS, for each float32 multiply-add of a core (Xeon with AMX, one
# core, November 2026, 95 a ns: 0.15 and 0.8 ns; 909,000 codes by 42 columns 1.5 ms, 1,061,000
# across the rows by 8 1.05, 4.2 million by 512 37). An EPYC Zen 5 decodes ten in that time.
_CODES_PER_FMA = 0.012
# What blocks of rows reach of BLAS's speed: 2048 x 2048 by 512 columns on one core, groups of 16 to
# 128, 57 to 59 ms where packed_codes takes 43 to 45 and its share of the multipliers is known (Xeon
# with AVX-512, November 2026; an EPYC with AVX2, busy: 135 to 171 and 105 to 144).
_OF_BLAS = 0.7


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    rates = machine.rates
    products = problem.flops / (_OF_BLAS * rates.blas / (2 if problem.b == "float64" else 1))
    decoding = problem.m * problem.k / (_CODES_PER_FMA * rates.fma * machine.units)
    turned = problem.k * problem.n if problem.b != "float32" or problem.layout_b != "row" else 0
    turned += problem.outputs if problem.out != "float32" else 0
    copies = turned / rates.convert
    return Suggestion({}, products + decoding + copies + 3 * spread_s(machine))


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
    params={"block_bytes": (4 << 20, 1 << 20, 16 << 20)},
    accepts_quant=takes_row,
    suggest=_suggest,
    bind=bind_blas,
    available=jit.unavailable,
)
