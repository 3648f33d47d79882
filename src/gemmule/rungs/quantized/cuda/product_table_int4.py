"""Product table for 4-bit codes, the alternative that document 003's authors could not test.

The table of `product_table_int8` with 16 entries for each value of x: 16 n float32 in the workspace
(256 KiB at n = 4096), a cache line of 64 bytes for each column. It nearly fits an L1; a look-up
still costs a load where an addition and a multiply-add would do, and here it loses.
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

BITS = 4


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    p, rows, values = params["p"], params["rows"], params["values"]
    x, y, scale = CTYPE[problem.b], CTYPE[problem.out], scale_type(problem)
    read = f"{alignment(problem, BITS, values)}, {values}"
    product = Step(
        kernel=f"product_table_int4<{y}, {scale}, {read}>",
        grid=(ceil_div(problem.m, rows), 1, 1),
        block=(p, rows, 1),
    )
    if problem.n == 0:
        return (product,)
    fill = Step(
        kernel=f"fill_table_int4<{x}, {scale}>",
        grid=(ceil_div(problem.n << BITS, 256), 1, 1),
        block=(256, 1, 1),
    )
    return (fill, product)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    return 4 * (problem.n << BITS)


RUNG = CudaRung(
    title="Product table, 4-bit codes",
    idea="All 16 products of each value of x, computed once; rows look them up.",
    source="document 003, precomputed result table, int4 (proposed there, not measured)",
    op="matvec",
    after="int4_codes",
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
