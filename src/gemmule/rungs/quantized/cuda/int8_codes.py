"""8-bit codes, document 003's int8 kernel.

`two_step` over a quantised matrix: a thread loads 8 or 16 codes at once and as many values of x,
subtracts the zero point in float32 (in 8 bits the difference would wrap) and scales the sum of each
piece. Half the bytes of float16 are read, and yet it takes about as long as the best rung for
float16: a multiply-add has two more instructions beside it, and the issue slots are more than half
in use, so the loads are no longer all that a warp waits for. The document's form is one scale and
zero point for the matrix; rows and groups of a multiple of 32 columns work too.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.codes import (
    FITS,
    alignment,
    product_chain,
    scale_type,
    signatures,
    takes_groups,
)
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div
from gemmule.rungs._cuda.rows import sums

BITS = 8


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    p, rows, values = params["p"], params["rows"], params["values"]
    x, y, scale = CTYPE[problem.b], CTYPE[problem.out], scale_type(problem)
    read = f"{alignment(problem, BITS, values)}, {values}"
    return (
        Step(
            kernel=f"int8_codes<{x}, {y}, {scale}, {read}>",
            grid=(ceil_div(problem.m, rows), 1, 1),
            block=(p, rows, 1),
        ),
    )


RUNG = CudaRung(
    title="8-bit codes",
    idea="Half the bytes a weight: codes are converted and shifted by the zero point in registers.",
    source="document 003, int8",
    op="matvec",
    signatures=signatures(BITS),
    arithmetic=sums(lambda problem, params: product_chain(problem, params, BITS)),
    after="any_codes",
    params={"p": (128, 32, 64, 256, 512), "rows": (4, 1, 2, 8), "values": (16, 8)},
    constraints=(FITS,),
    quantized=True,
    accepts_quant=takes_groups,
    steps=_steps,
)
