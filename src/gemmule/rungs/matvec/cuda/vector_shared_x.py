"""Vector loads with x in shared memory, document 003's first alternative.

Adds to `two_step`: the rows of a block share each value of x, so the block copies x into shared
memory once, `tile` values at a time. The document saw no gain: the L1 already serves what the rows
share, every tile costs two barriers, and at a barrier no loads of A are under way. Shared memory:
tile x itemsize of x, and 32 sums.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import rows as by_rows


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    (step,) = by_rows.shared_row_steps("vector_shared_x", "values", "tile")(
        problem, params, machine
    )
    return (replace(step, smem=params["tile"] * ITEMSIZE[problem.b]),)


def _chain(problem: Problem, params: Params) -> int:
    p, tile, values = params["p"], params["tile"], params["values"]
    whole: int = problem.n // tile * by_rows.share_chain(problem, tile, p, values)
    return whole + by_rows.share_chain(problem, problem.n % tile, p, values) + 2 * by_rows.tree(32)


RUNG = CudaRung(
    title="Vector loads, x in shared memory",
    idea="The block copies a tile of x to shared memory, and all its rows multiply from there.",
    source="document 003, leveraging shared memory",
    after="two_step",
    branch="document 003: x in shared memory, which loses here",
    signatures=by_rows.ROW_SIGNATURES,
    arithmetic=by_rows.sums(_chain),
    params={
        "p": (128, 32, 64, 256),
        "rows": (4, 1, 8, 16),
        "values": by_rows.VALUES,
        "tile": (2048, 1024, 4096),
    },
    constraints=(by_rows.BLOCK_FITS, by_rows.VALUES_FIT),
    batched=True,
    steps=_steps,
)
