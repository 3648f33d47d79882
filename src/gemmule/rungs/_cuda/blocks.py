"""What the block & multiply rungs of document 004 share: parameters, workspace, launches."""

from __future__ import annotations

from typing import Any

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, Machine, Params, Step
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    accumulator,
    ceil_div,
    instance,
    type_arguments,
)
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, row_blocks, sums

SUM_THREADS = 256  # kSumThreads of blocks.cuh

PARAMS: dict[str, tuple[int, ...]] = {
    "height": (256, 64, 128, 512, 1024),
    "width": (64, 8, 16, 32, 128, 256),
}
PRESETS = {f"seed_width_{width}": {"height": 1024, "width": width} for width in PARAMS["width"]}
WIDTH_FITS = Constraint(
    "width is at most height", lambda problem, params: params["width"] <= params["height"]
)


def around(problem: Problem, product: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the launches: the sums zeroed, then the product's own, then the sums stored."""
    grid = (ceil_div(problem.m * problem.batch, SUM_THREADS), 1, 1)
    block = (SUM_THREADS, 1, 1)
    zero = Step(kernel=f"zero_sums<{CTYPE[accumulator(problem)]}>", grid=grid, block=block)
    store = Step(kernel=f"store_sums<{CTYPE[problem.out]}>", grid=grid, block=block)
    return (zero, *product, store)


def block_grid(problem: Problem, params: Params) -> tuple[int, int, int]:
    """Return the flat grid of sections times row blocks times batch; never empty."""
    sections = max(1, ceil_div(problem.n, params["width"]))
    return (sections * row_blocks(problem, params["height"]), 1, 1)


def product(kernel: str, problem: Problem, params: Params) -> Step:
    """Return the launch of a block & multiply kernel."""
    name = instance(kernel, type_arguments(problem), params["width"])
    return Step(name, block_grid(problem, params), (params["height"], 1, 1))


def sums_bytes(problem: Problem) -> int:
    """Return the bytes of the sums in the workspace."""
    return problem.batch * problem.m * ITEMSIZE[accumulator(problem)]


def workspace(problem: Problem, params: Params, machine: Machine) -> int:
    """Return the workspace of block & multiply: batch x m sums of 4 or 8 bytes."""
    return sums_bytes(problem)


def chain(problem: Problem, params: Params) -> int:
    """Return the most additions: a section's products, then one atomic a section."""
    width: int = params["width"]
    return min(problem.n, width) + ceil_div(problem.n, width)


COMMON: dict[str, Any] = {
    "signatures": FLOAT_SIGNATURES,
    "arithmetic": sums(chain, unordered=True),
    "params": PARAMS,
    "presets": PRESETS,
    "constraints": (WIDTH_FITS,),
    "batched": True,
}
