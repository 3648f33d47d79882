"""Split reduction: several blocks share a tile of C, so that small results occupy the whole GPU.

Few rows by a large matrix, as when a language model decodes for some dozen users, make fewer tiles
than the GPU has multiprocessors, and the others would idle. Here the blocks of a cluster each take
a part of the reduction. Each sends its sums to the block that stores them, by stores to that
block's shared memory, where they are added in the order of the ranks: no buffer in global memory,
no second kernel, and the same order of additions in every run.

An instruction multiplies 64 rows, but as few columns as 8. So the longer side of C goes along its
rows, if need be as C^T = B^T A^T, and the shorter one along its columns: 16 rows of C take a tile
of 64 x 16 instead of 64 x 64, and stages of 20 KB hold 16 of the large matrix. Sums leave through
shared memory, by `stmatrix`, transposed where C lies so: a kernel is 17 to 19 KB of instructions,
for each is fetched but once, and 60 KB of them took much longer. What limits now are the launch,
the memory, and the L2.
"""

from __future__ import annotations

import math

from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import half_tiles
from gemmule.rungs._cuda.geometry import ceil_div, instance, modelled, type_arguments
from gemmule.rungs._cuda.terms import rounds
from gemmule.rungs._cuda.tiles import LARGEST_GRID, tiles

TILES = {
    "64x16": (64, 16),
    "64x32": (64, 32),
    "64x64": (64, 64),
    "64x128": (64, 128),
    "128x128": (128, 128),
}
SHARED_BYTES = 227 * 1024  # of a multiprocessor, for one block; two have half of it each
BLOCK_BYTES = 1024  # of those what a block takes for itself
OWN_SLOTS = 16384  # bytes of sums up to which they have a place beside the ring
MOST_STAGES = 8
# The share of the multiprocessors that clusters of so many blocks can occupy, one block each: a
# cluster lies within one of the GPU's parts of 16 or 18.
PLACED = {1: 1.0, 2: 1.0, 4: 0.84, 8: 0.72}


def _turned(problem: Problem) -> bool:
    """Tell whether C^T = B^T A^T is computed: the longer side goes along an instruction's rows."""
    return problem.m < problem.n


def _size(params: Params) -> tuple[int, int]:
    return TILES[params["tile"]]


def _sides(problem: Problem, params: Params) -> tuple[int, int]:
    """Return the tile's rows and columns of C as it is."""
    height, width = _size(params)
    return (width, height) if _turned(problem) else (height, width)


def _blocks(problem: Problem, params: Params) -> int:
    return tiles(problem, *_sides(problem, params)) * int(params["parts"])


def _deep(height: int, width: int) -> int:
    """Return how many times DEPTH steps a stage holds: narrow tiles take two of them."""
    return 2 if height == 64 and width <= 64 else 1


def _ring(problem: Problem, params: Params, machine: Machine) -> tuple[int, int]:
    """Return the stages, and the bytes of shared memory with the place for sums."""
    height, width = _size(params)
    stage = _deep(height, width) * (height + width) * half_tiles.DEPTH * 2
    sums = height * width * 4 if params["parts"] > 1 and height * width * 4 <= OWN_SLOTS else 0
    alone = height == 128 or _blocks(problem, params) <= PLACED[params["parts"]] * machine.units
    room = (SHARED_BYTES if alone else SHARED_BYTES // 2) - BLOCK_BYTES - sums
    stages = min(room // stage, MOST_STAGES)
    return stages, stages * stage + sums


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    height, width = _size(params)
    stages, smem = _ring(problem, params, machine)
    flags, maps = half_tiles.turned_maps(problem, (height, width), 1, turned=_turned(problem))
    numbers = height, width, _deep(height, width), stages
    return (
        Step(
            kernel=instance("wgmma_split", type_arguments(problem), *numbers, *flags),
            grid=(_blocks(problem, params), 1, 1),
            block=(2 * height + 32, 1, 1),
            smem=smem,
            cluster=(params["parts"], 1, 1),
            maps=maps,
        ),
    )


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Wait for stages, the memory and the L2; blocks of a cluster take some time to meet.

    Many neighbours that want the same tile at the same time cost no more than one.
    """
    tile, (height, width), parts = params["tile"], _size(params), params["parts"]
    blocks, steps = (
        _blocks(problem, params),
        ceil_div(problem.k, half_tiles.DEPTH * params["parts"]),
    )
    shape = math.ceil(blocks / PLACED[parts]), 1 if height == 128 else 2, steps
    down = ceil_div(max(problem.m, problem.n), height)
    lines = {"height": height, "width": width, "width_again": width / down}
    each = blocks * steps * half_tiles.DEPTH / machine.units
    loaded = {f"{name}_s": line * each for name, line in lines.items()}
    more = {f"meeting_s {tile}": float(parts > 1), f"out_s {tile}": 1.0}
    more["written_s"] = ceil_div(blocks, machine.units) * height * width
    return rounds(problem, machine, shape, tile, more, {}, {}, {}, loaded)


RUNG = CudaRung(
    title="Split reduction",
    idea="The blocks of a cluster each sum a part of the reduction, and send each other sums.",
    source="split-K; swapped operands as in DeepGEMM, sums in distributed shared memory as in its "
    "pull request 186",
    after="wgmma_tile",
    branch="few tiles, long sums",
    params={"tile": tuple(TILES), "parts": (1, 2, 4, 8)},
    constraints=(
        half_tiles.ALIGNED,
        half_tiles.COUNTED,
        Constraint(
            "narrow tiles want the operand of the shorter side along the sum",
            lambda problem, params: (
                _size(params)[1] >= 64 or half_tiles.along_k(problem)[0 if _turned(problem) else 1]
            ),
        ),
        Constraint(
            "narrow tiles by at most two blocks: meeting takes what more of them gain",
            lambda problem, params: _size(params)[1] >= 64 or params["parts"] <= 2,
        ),
        Constraint(
            f"at most {LARGEST_GRID:,} blocks",
            lambda problem, params: _blocks(problem, params) <= LARGEST_GRID,
        ),
    ),
    batched=True,
    steps=_steps,
    **half_tiles.COMMON,
    **modelled("matmul/wgmma_split", _terms),
)
