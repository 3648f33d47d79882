"""What CUDA rungs of tiled matmuls share: launches, grids of tiles, and a model of their time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmule.core.problem import FLOATS, Problem
from gemmule.core.rung import Constraint, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda.geometry import ceil_div, quickest

Size = Callable[[Params], tuple[int, int]]  # of a block's tile: rows and columns of C

LARGEST_GRID = 2**31 - 1
EVERY_LAYOUT = ("row", "col", "strided")
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


def quickest_square(
    problem: Problem,
    machine: Machine,
    name: str,
    sides: tuple[tuple[int, int, float], ...],
    unit_flops: float,
    times: int = 1,
    start_s: float = 0.0,
) -> Suggestion | None:
    """Return the parameter `name` with the least `expected_s`, its square tile `times` as wide.

    sides: a value of the parameter, the blocks that a multiprocessor runs at a time, and the share
    of `unit_flops` that it reaches. start_s: what each product takes beside.
    """

    def seconds(params: Params) -> float:
        side = times * params[name]
        _, resident, rate = next(one for one in sides if one[0] == params[name])
        return start_s + expected_s(problem, machine, (side, side), resident, rate * unit_flops)

    return quickest([{name: one[0]} for one in sides], seconds)


def fits_grid(size: Size) -> Constraint:
    """Return the constraint that all tiles, of `size(params)` rows and columns, fit on grid x."""
    return Constraint(
        f"at most {LARGEST_GRID:,} blocks",
        lambda problem, params: tiles(problem, *size(params)) <= LARGEST_GRID,
    )


def expected_s(
    problem: Problem, machine: Machine, tile: tuple[int, int], resident: int, unit_flops: float
) -> float:
    """Return the modelled time of a tiled matmul in seconds.

    tile: rows and columns of C that a block computes; resident: blocks that one multiprocessor
    runs at a time; unit_flops: flops per second that one multiprocessor reaches when it is full.
    Blocks run in waves, the last of which may leave multiprocessors idle; each computes a whole
    tile, padding included. Bytes and flops overlap, so the longer of both counts.
    """
    height, width = tile
    blocks = tiles(problem, height, width)
    waves = ceil_div(blocks, machine.units * resident)
    busy = min(resident, ceil_div(blocks, machine.units))  # blocks that share a multiprocessor
    block_flops = 2.0 * height * width * max(problem.k, 1)
    # A multiprocessor with fewer blocks than it can hold has fewer warps to hide latency with.
    share = unit_flops * (0.5 + 0.5 * busy / resident)
    compute = waves * busy * block_flops / share
    moved = problem.compulsory_bytes / machine.read_bytes_per_s
    return machine.call_s + max(compute, moved)
