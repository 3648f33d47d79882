"""y blocks per row and a second kernel, document 003's alternative layout.

Adds to `two_step`: the columns of a row are cut into y sections, each summed by a block of its own,
so that a matrix of few rows still fills the device. The partial sums go through a workspace of
batch x m x y sums of 4 bytes (8 for float64), and a second launch adds them in a fixed order: the
result is the same in every run, unlike atomics. With rows enough for every multiprocessor it only
cuts the work of a thread short: at 4096 columns and four blocks of 128 threads a row a thread has
one load to make, and the instructions around it outnumber it.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import rows as by_rows
from gemmule.rungs._cuda.geometry import ceil_div, instance, type_arguments


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    y = params["y"]
    (step,) = by_rows.shared_row_steps("y_blocks", "values", "y")(problem, params, machine)
    kernel = instance("add_sections", type_arguments(problem), y)
    add = Step(kernel, (ceil_div(problem.m * problem.batch, 256), 1, 1), (256, 1, 1))
    return replace(step, grid=(step.grid[0], y, 1)), add


def _chain(problem: Problem, params: Params) -> int:
    p: int = params["p"]
    y: int = params["y"]
    values: int = params["values"]
    section = ceil_div(problem.n, y) + 2 * values
    return by_rows.share_chain(problem, section, p, values) + values + 2 * by_rows.tree(32) + y - 1


RUNG = CudaRung(
    title="y blocks per row",
    idea="y blocks sum a section of the row each; a second kernel adds the sections in order.",
    source="document 003, several blocks per row and a second kernel",
    after="two_step",
    branch="document 003: y blocks a row, which loses here",
    signatures=by_rows.ROW_SIGNATURES,
    arithmetic=by_rows.sums(_chain),
    params={
        "y": (4, 2, 8, 16),
        "p": (128, 32, 64, 256),
        "rows": (4, 1, 2),
        "values": by_rows.VALUES,
    },
    constraints=(by_rows.BLOCK_FITS, by_rows.VALUES_FIT),
    batched=True,
    workspace=by_rows.sums_of("y"),
    steps=_steps,
)
