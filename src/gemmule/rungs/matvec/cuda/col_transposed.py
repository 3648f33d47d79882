"""Thread per column for A^T x, document 004's naive transposed multiplication.

A column-major matrix transposed is a row-major one, so this is `thread_per_row` as someone with
column-major storage (MATLAB, Fortran) meets it: neighbouring threads read addresses a whole column
apart, and it is as slow. It stands here as the baseline of the two transposed algorithms after it.
"""

from __future__ import annotations

from gemmule.core.rung import CudaRung
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums, thread_steps

RUNG = CudaRung(
    title="Transposed, thread per column",
    idea="One thread per column of the column-major matrix walks down it and through x.",
    source="document 004, naive transposed multiplication",
    after="thread_per_row",
    branch="another memory order: a column-major copy",
    signatures=FLOAT_SIGNATURES,
    arithmetic=sums(lambda problem, params: problem.n),
    params={"block": (128, 64, 256, 1024)},
    batched=True,
    steps=thread_steps("col_transposed"),
)
