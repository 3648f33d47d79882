"""4-bit codes, document 003's int4 kernel.

Adds to `int8_codes`: two codes a byte, the even column in the low nibble, taken apart by shift and
mask. A quarter of the bytes of float16 are read; the instructions are as many as before, and at
middle sizes they set the time. `values` is how many a thread takes from one load: 8, 16 or 32 (4, 8
or 16 bytes); the document found 16 better than 8. An odd row leaves half a byte, which the columns
dealt out one by one take care of.
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

BITS = 4


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    p, rows, values = params["p"], params["rows"], params["values"]
    x, y, scale = CTYPE[problem.b], CTYPE[problem.out], scale_type(problem)
    read = f"{alignment(problem, BITS, values)}, {values}"
    return (
        Step(
            kernel=f"int4_codes<{x}, {y}, {scale}, {read}>",
            grid=(ceil_div(problem.m, rows), 1, 1),
            block=(p, rows, 1),
        ),
    )


RUNG = CudaRung(
    title="4-bit codes",
    idea="A quarter of the bytes of float16: two codes a byte, taken apart by shift and mask.",
    source="document 003, int4, with 8 against 16 values a thread",
    op="matvec",
    after="int8_codes",
    signatures=signatures(BITS),
    arithmetic=sums(lambda problem, params: product_chain(problem, params, BITS)),
    params={"p": (128, 32, 64, 256, 512), "rows": (4, 1, 2, 8), "values": (16, 8, 32)},
    constraints=(FITS,),
    quantized=True,
    accepts_quant=takes_groups,
    steps=_steps,
)
