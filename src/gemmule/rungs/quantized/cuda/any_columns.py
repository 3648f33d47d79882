"""Any quantised matrix with several columns, code by code: `any_codes` for each column of x.

A block for each column and each eight rows (or 32 columns of the matrix), so that any shape of X
runs.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, Machine, Params, Step
from gemmule.rungs.quantized.cuda import any_codes


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    kernel = f"any_columns<{any_codes.template(problem)}>"
    grid = (any_codes.blocks(problem) * problem.n, 1, 1)
    return (Step(kernel=kernel, grid=grid, block=(32, 8, 1)),)


RUNG = replace(
    any_codes.RUNG,
    title="Any codes, several columns",
    idea="A block for each column of x; the codes are found anew for every one.",
    op="matmul",
    after="any_codes",
    branch="several columns",
    layouts_b=("row", "col", "strided"),
    constraints=(
        Constraint(
            "fewer than 2^31 blocks",
            lambda problem, params: any_codes.blocks(problem) * max(problem.n, 1) < 2**31,
        ),
    ),
    steps=_steps,
    spills=True,  # some shapes keep a few bytes in memory on sm_120a
)
