"""Split reduction: several blocks share a tile of C, so that small results occupy the whole GPU.

Few rows by a large matrix, as when a language model decodes for some dozen users, make fewer tiles
than the GPU has multiprocessors, and the others would idle. Here the blocks of a cluster each take
a part of the reduction. Their sums meet in shared memory, which a cluster's blocks may read from
each other: no buffer in global memory, no second kernel, and the same order of additions in every
run. Tiles of 64 rows waste little on few of them. On an H200 64 rows by 4096 x 14336 take 33.5 us
by it, cuBLAS 35.7 and `wgmma_specialized` 67.8; shorter products reach 0.8 to 0.95 of cuBLAS. What
limits those is the way from the launch to the first stage, and that from the last sum to C.
"""

from __future__ import annotations

import math

from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda.geometry import ceil_div, type_arguments
from gemmule.rungs._cuda.half_tiles import (
    ALIGNED,
    ARITHMETIC,
    COUNTED,
    DEPTH,
    SIGNATURES,
    along_k,
    flag,
    tile_map,
)
from gemmule.rungs._cuda.tiles import LARGEST_GRID, tiles

TILES = {"64x128": (64, 128), "64x64": (64, 64), "128x128": (128, 128)}
# Of stages: for two blocks that share a multiprocessor, and for one that has it for itself.
SHARED_RING_BYTES, OWN_RING_BYTES = 96 * 1024, 192 * 1024
# The share of the multiprocessors that clusters of so many blocks can occupy, one block each: a
# cluster lies within one of the GPU's parts of 16 or 18.
PLACED = {1: 1.0, 2: 1.0, 4: 0.84, 8: 0.72}


def _size(params: Params) -> tuple[int, int]:
    return TILES[params["tile"]]


def _blocks(problem: Problem, params: Params) -> int:
    return tiles(problem, *_size(params)) * int(params["parts"])


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    height, width = _size(params)
    a_along, b_along = along_k(problem)
    blocks = _blocks(problem, params)
    alone = blocks <= PLACED[params["parts"]] * machine.units
    ring = OWN_RING_BYTES if alone else SHARED_RING_BYTES
    stages = ring // ((height + width) * DEPTH * 2)
    return (
        Step(
            kernel=f"wgmma_split<{type_arguments(problem)}, {height}, {width}, {stages}, "
            f"{flag(a_along)}, {flag(b_along)}>",
            grid=(blocks, 1, 1),
            block=(128, 1, 1),
            smem=stages * (height + width) * DEPTH * 2,
            cluster=(params["parts"], 1, 1),
            maps=(tile_map("a", height, a_along), tile_map("b", width, b_along)),
        ),
    )


# Seconds, fitted on one H200 (November 2026) to 39 products of 4 us to 1.4 ms, which take 2 %
# longer by it than by the best parameters: a stage of a block that has its multiprocessor for
# itself, and of each of two; from the launch to the first stage; 2,048 sums on their way out; what
# each part of a cluster adds to the meeting. The last is what small products read of the ceiling,
# caches included.
ALONE_S = {"64x128": 0.186e-6, "64x64": 0.170e-6, "128x128": 0.380e-6}
SHARED_S = {"64x128": 0.281e-6, "64x64": 0.189e-6, "128x128": 0.482e-6}
START_S, OUT_S, MEETING_S, READ_SHARE = 2.07e-6, 0.74e-6, 0.49e-6, 1.15


def _expected_s(problem: Problem, params: Params, machine: Machine) -> float:
    (height, width), parts = _size(params), params["parts"]
    stages = ceil_div(ceil_div(problem.k, DEPTH), parts)
    waves = math.ceil(_blocks(problem, params) / (PLACED[parts] * machine.units))
    pairs = ceil_div(waves, 2)
    busy = stages * (
        ALONE_S[params["tile"]] if waves == 1 else 2 * pairs * SHARED_S[params["tile"]]
    )
    moved = problem.compulsory_bytes / (READ_SHARE * machine.read_bytes_per_s)
    stored = pairs * ceil_div(height * width, parts * 2048) * OUT_S
    met = parts * MEETING_S if parts > 1 else 0.0
    return machine.call_s + START_S + max(busy, moved) + stored + met


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    choices = [{"tile": tile, "parts": parts} for tile in TILES for parts in (1, 2, 4, 8)]
    times = [_expected_s(problem, params, machine) for params in choices]
    best = min(range(len(choices)), key=lambda which: times[which])
    return Suggestion(choices[best], times[best])


RUNG = CudaRung(
    title="Split reduction",
    idea="The blocks of a cluster each sum a part of the reduction, and read each other's sums.",
    source="split-K; sums that meet in distributed shared memory: DeepGEMM's pull request 186",
    op="matmul",
    signatures=SIGNATURES,
    arithmetic=lambda problem: ARITHMETIC,
    layouts=("row", "col"),
    layouts_b=("row", "col"),
    after="wgmma_tile",
    params={"tile": tuple(TILES), "parts": (1, 2, 4, 8)},
    constraints=(
        ALIGNED,
        COUNTED,
        Constraint(
            f"at most {LARGEST_GRID:,} blocks",
            lambda problem, params: _blocks(problem, params) <= LARGEST_GRID,
        ),
    ),
    batched=True,
    suggest=_suggest,
    steps=_steps,
    archs=("sm_90a",),
)
