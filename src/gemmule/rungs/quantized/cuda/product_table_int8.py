"""Product table for 8-bit codes, document 003's second alternative.

Adds to `int8_codes`: since a code has 256 values, a first launch computes all 256 products with
each value of x, scale and zero point included, and the row kernel only looks up and adds. Codes are
unsigned, so that each one is an index. The table, 256 n float32 in the workspace (4 MiB at n =
4096), outgrows the L1: every weight costs a scattered 4-byte read of the L2, far dearer than the
multiply-add it saves. The document's authors found no gain either.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.codes import (
    FITS,
    alignment,
    scale_type,
    signatures,
    table_chain,
    takes_one_scale,
)
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div
from gemmule.rungs._cuda.rows import sums

BITS = 8


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    p, rows, values = params["p"], params["rows"], params["values"]
    x, y, scale = CTYPE[problem.b], CTYPE[problem.out], scale_type(problem)
    read = f"{alignment(problem, BITS, values)}, {values}"
    product = Step(
        kernel=f"product_table_int8<{y}, {scale}, {read}>",
        grid=(ceil_div(problem.m, rows), 1, 1),
        block=(p, rows, 1),
    )
    if problem.n == 0:
        return (product,)
    fill = Step(
        kernel=f"fill_table_int8<{x}, {scale}>",
        grid=(ceil_div(problem.n << BITS, 256), 1, 1),
        block=(256, 1, 1),
    )
    return (fill, product)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    return 4 * (problem.n << BITS)


RUNG = CudaRung(
    title="Product table, 8-bit codes",
    idea="All 256 products of each value of x, computed once; rows look them up.",
    source="document 003, precomputed result table, int8",
    op="matvec",
    after="int8_codes",
    branch="products looked up, which loses here",
    signatures=signatures(BITS),
    arithmetic=sums(lambda problem, params: table_chain(problem, params, BITS)),
    params={"p": (128, 32, 64, 256, 512), "rows": (4, 1, 2, 8), "values": (8, 16)},
    constraints=(FITS,),
    quantized=True,
    accepts_quant=takes_one_scale,
    workspace=_workspace,
    steps=_steps,
)
