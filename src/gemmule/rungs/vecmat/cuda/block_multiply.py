"""Block & multiply, document 004's first algorithm.

Adds to `col_thread_per_row`: the columns are cut into sections of `width`, so that there are ceil(n
/ width) times as many threads, and a block keeps its section of x in shared memory. The gain is
parallelism alone: sectors a request stay as they were, occupancy rises from a few percent to most
of the chip. The sections of a row meet by atomic additions, whose order is not fixed: the last bits
of the result may differ from run to run.

Sums are added up in float32 (float64 for float64) whatever the result's dtype, in a workspace of
batch x m sums that is zeroed and converted inside; shared memory: width x itemsize of x. The
presets are the document's widths at its height of 1024 rows.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.blocks import COMMON, around, product, workspace


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    multiply = product("block_multiply", problem, params)
    return around(problem, (multiply,) if problem.n else ())


RUNG = CudaRung(
    title="Block and multiply",
    idea="A thread per row and section of columns; x in shared memory; sections meet by atomics.",
    source="document 004, Block & Multiply",
    after="col_thread_per_row",
    layouts=("col",),
    workspace=workspace,
    steps=_steps,
    **COMMON,
)
