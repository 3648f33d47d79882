"""Transposed block & multiply, document 004's second algorithm: A^T x over column-major storage.

Adds to `col_transposed`: sections of `width` elements of each column, as many more threads, x in
shared memory, atomics into a workspace of batch x m sums (float32; float64 for float64), zeroed and
converted inside. More loads are under way; reads stay uncoalesced: a thread walks consecutive
addresses by itself, and only the caches turn its sectors into use, which is why narrow sections do
best. The order of the additions, hence the last bits of the result, varies. Shared memory: width x
itemsize of x.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.blocks import COMMON, around, product, workspace


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    multiply = product("block_multiply_transposed", problem, params)
    return around(problem, (multiply,) if problem.n else ())


RUNG = CudaRung(
    title="Transposed block and multiply",
    idea="A thread per column and section of its elements; sections meet by atomics.",
    source="document 004, Transposed Block & Multiply",
    after="col_transposed",
    workspace=workspace,
    steps=_steps,
    **COMMON,
)
