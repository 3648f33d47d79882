"""Thread per row, seed 000's first kernel.

The simplest parallel matvec: rows are independent, so each thread takes one. Along a row-major
matrix neighbouring threads read addresses a whole row apart, so each 32-byte sector that DRAM
delivers serves one thread only until the next iterations hit it in the L1; down a column-major
one they read neighbours and the same code is coalesced.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, Machine, Params, Rung, Step
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES, accumulator, ceil_div, type_arguments


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    block = params["block"]
    return (
        Step(
            kernel=f"thread_per_row<{type_arguments(problem)}, {block}>",
            grid=(ceil_div(problem.m, block) * problem.batch, 1, 1),
            block=(block, 1, 1),
        ),
    )


RUNG = Rung(
    title="Thread per row",
    idea="One thread computes one element of y: it walks its row of A and all of x.",
    source="seed 000, basic kernel; seed 004, naive kernel over column-major storage",
    op="matvec",
    signatures=ALL_SIGNATURES,
    arithmetic=lambda problem: Arithmetic(
        accumulator=accumulator(problem), chain=lambda p, params: p.n
    ),
    layouts=("row", "col", "strided"),
    params={"block": (128, 32, 64, 256, 512, 1024)},
    batched=True,
    steps=_steps,
)
