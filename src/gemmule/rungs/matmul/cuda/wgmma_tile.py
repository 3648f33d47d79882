"""Warpgroup tile: Hopper's own matrix instruction, fed by its copy engine.

`mma.sync` takes its operands from registers, so each warp loads every fragment first; `wgmma` lets
four warps together multiply 64 x 16 by 16 x 128 halves straight from shared memory and goes on
while it runs. The copies need no thread either: one thread asks TMA for a tile by its coordinates,
and an mbarrier tells when its bytes are there. Rows and columns outside a matrix arrive as zeros.
TMA wants 16-byte aligned rows, so other operands are left to other rungs. All four layouts run
alike, for wgmma reads either orientation. What limits it now: the four warps that multiply also
wait, store their sums one by one, and load nothing for the next tile while they do.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import half_tiles
from gemmule.rungs._cuda.geometry import instance, type_arguments
from gemmule.rungs._cuda.tiles import by_square, fits_grid, square, tiles

STAGES = 3


_size = square("tile")


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    tile = params["tile"]
    a_along, b_along = half_tiles.along_k(problem)
    return (
        Step(
            kernel=instance("wgmma_tile", type_arguments(problem), tile, a_along, b_along),
            grid=(tiles(problem, *_size(params)), 1, 1),
            block=(128, 1, 1),
            smem=STAGES * 2 * tile * half_tiles.DEPTH * 2,
            maps=(half_tiles.tile_map("a", tile, a_along), half_tiles.tile_map("b", tile, b_along)),
        ),
    )


RUNG = CudaRung(
    title="Warpgroup tile",
    idea="Four warps multiply tiles where they lie in shared memory; one thread has TMA copy them.",
    source="PTX ISA: wgmma, cp.async.bulk.tensor, mbarrier; Hopper kernels since 2022",
    after="tensor_core",
    params={"tile": (128, 64)},
    constraints=(half_tiles.ALIGNED, half_tiles.COUNTED, fits_grid(_size)),
    batched=True,
    steps=_steps,
    **half_tiles.COMMON,
    **by_square("matmul/wgmma_tile", "tile"),
)
