"""What CUDA rungs of tiled matmuls share: launches, grids of tiles, and a model of their time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemmule.core.device_model import Numbers
from gemmule.core.problem import FLOATS, Problem
from gemmule.core.rung import Constraint, Machine, Params, Step
from gemmule.rungs._cuda.geometry import accumulator, ceil_div, modelled
from gemmule.storage.models import numbers

Size = Callable[[Params], tuple[int, int]]  # of a block's tile: rows and columns of C

LARGEST_GRID = 2**31 - 1
WIDE_INTEGERS = ("int64", "uint64")  # of which a thread holds too few for the larger tile
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


def by_square(
    rung: str, name: str, times: int = 1, share: Callable[[Problem, Numbers], float] | None = None
) -> dict[str, Any]:
    """Return what a rung says of its time whose square tile is `times` the parameter `name` wide.

    Its coefficients: of each side the blocks that a multiprocessor runs at a time, and the share of
    unit_flops that it reaches; start_s, what each product takes beside. share: of a problem, that
    it reaches whatever the side.
    """

    def choices(problem: Problem, machine: Machine) -> list[Params]:
        wide = accumulator(problem) in WIDE_INTEGERS
        sides = numbers(machine, rung)["sides"]
        return [{name: side} for side in sides if not (wide and side == 8)]

    def seconds(problem: Problem, params: Params, machine: Machine) -> float:
        own = numbers(machine, rung)
        kind, of_side, side = own["unit_flops_per_s"], own["sides"][params[name]], params[name]
        rate = kind[accumulator(problem)] if isinstance(kind, Mapping) else kind
        rate *= of_side["share"] * (share(problem, own) if share else 1.0)
        size = (times * side, times * side)
        tiled = expected_s(problem, machine, size, of_side["blocks"], rate)
        return float(own.get("start_s", 0.0) + tiled)

    return modelled(choices, seconds)


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
