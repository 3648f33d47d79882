"""What CUDA rungs of tiled matmuls share: launches, grids of tiles, and a model of their time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmule.core.device_model import Numbers, Terms
from gemmule.core.problem import COMPLEX, FLOATS, Problem
from gemmule.core.rung import Constraint, Machine, Params, Step
from gemmule.rungs._cuda.geometry import accumulator, ceil_div, modelled
from gemmule.rungs._cuda.terms import rounds

Size = Callable[[Params], tuple[int, int]]  # of a block's tile: rows and columns of C

LARGEST_GRID = 2**31 - 1
WIDE_INTEGERS = ("int64", "uint64")  # of which a thread holds too few for the larger tile
EVERY_LAYOUT = ("row", "col", "strided")
# Of a complex number's parts: four products of them are one of it.
PARTS = {"complex64": "float32", "complex128": "float64"}
# What matmul rungs say of themselves that take operands in any order, alone or in batches.
ANY_ORDER: dict[str, Any] = {
    "layouts": EVERY_LAYOUT,
    "layouts_b": EVERY_LAYOUT,
    "batched": True,
}
FMA_ROUNDS = Constraint(
    "fma=False needs floats: integers round nothing",
    lambda problem, params: params["fma"] or problem.out in FLOATS,
)


def tiles(problem: Problem, height: int, width: int) -> int:
    """Return how many tiles of C there are, over the whole batch."""
    return ceil_div(problem.m, height) * ceil_div(problem.n, width) * problem.batch


def square(name: str, times: int = 1) -> Size:
    """Return the size of a square tile whose side is so many times a parameter."""
    return lambda params: (times * params[name], times * params[name])


def launch(
    kernel: str, problem: Problem, size: tuple[int, int], block: tuple[int, int], smem: int = 0
) -> tuple[Step, ...]:
    """Return the launch of a kernel with a block for each tile of C."""
    return (Step(kernel, (tiles(problem, *size), 1, 1), (*block, 1), smem),)


def by_square(
    rung: str, name: str, times: int = 1, kind: Callable[[Problem], str] = accumulator
) -> dict[str, Any]:
    """Return what a rung says of its time whose square tile is `times` the parameter `name` wide.

    kind: of a problem, what has rates of its own.
    """

    def terms(problem: Problem, params: Params, machine: Machine) -> Terms:
        side, counted = times * params[name], kind(problem)
        steps = max(problem.k, 1) * (4 if problem.out in COMPLEX else 1)
        shape = tiles(problem, side, side), max(1, 128 // side) ** 2, steps
        return rounds(problem, machine, shape, f"{PARTS.get(counted, counted)} {side}")

    return modelled(rung, terms)


def fits_grid(size: Size) -> Constraint:
    """Return the constraint that all tiles, of `size(params)` rows and columns, fit on grid x."""
    return Constraint(
        f"at most {LARGEST_GRID:,} blocks",
        lambda problem, params: tiles(problem, *size(params)) <= LARGEST_GRID,
    )


def left(problem: Problem, machine: Machine, blocks: int) -> Numbers:
    """Return the term of writing the result, by how much of it lies together, as far as is told."""
    whole = str(problem.alignment) if problem.alignment >= 8 else "less"
    outputs = problem.outputs * problem.batch / max(blocks, 1)
    return {f"left_s {whole}": ceil_div(blocks, machine.units) * outputs}
