"""Warp specialisation: one thread loads, two warpgroups multiply, and nobody waits for the other.

Blocks stay for many tiles of C. One thread of each fills a ring of stages through TMA, as far ahead
as the ring is long, also into the next tile; two warpgroups empty it, each with its own half of the
tile's rows, and keep one wgmma group under way while the next begins. `setmaxnreg` moves the
loader's registers to them: a tile of 128 x 256 takes 128 of a thread for its sums alone. Sums go
out through shared memory (`stmatrix`) and TMA as well. All this takes the tile before
from 0.74-0.89 of cuBLAS to 0.99-1.05, at 4096 to 16384 cubed and in every layout. What limits it
now is power: on random data the clock falls while the tensor cores work without a pause. So
`cluster=2`, where two blocks take tiles one below the other and load half of B each for both, gains
nothing but at 16384.
"""

from __future__ import annotations

from gemmule.core.device_model import Numbers, Terms
from gemmule.core.packing import TensorMap
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step, same
from gemmule.rungs._cuda import half_tiles
from gemmule.rungs._cuda.geometry import ceil_div, instance, modelled, type_arguments
from gemmule.rungs._cuda.terms import rounds, settled
from gemmule.rungs._cuda.tiles import left

SHARED_BYTES = 227 * 1024
OUT_BYTES = 8 * 2 * 16 * 128  # two buffers of 16 rows for each of 8 warps
BARRIERS_BYTES = 1024
TILES = {"128x256": (128, 256), "128x192": (128, 192), "128x128": (128, 128)}


def stages(height: int, width: int, most: int = 6) -> int:
    """Return how many stages a block has room for, `most` of them at most."""
    room = SHARED_BYTES - OUT_BYTES - BARRIERS_BYTES
    return min(room // ((height + width) * half_tiles.DEPTH * 2), most)


def clusters(problem: Problem, size: tuple[int, int], cluster: int) -> int:
    """Return how many clusters' worth of tiles of a size there are."""
    m, n = (problem.m, problem.n) if problem.layout_out == "row" else (problem.n, problem.m)
    return ceil_div(m, size[0] * cluster) * ceil_div(n, size[1]) * problem.batch


def _clusters(problem: Problem, params: Params) -> int:
    return clusters(problem, TILES[params["tile"]], params["cluster"])


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    height, width = TILES[params["tile"]]
    cluster, ring = params["cluster"], stages(height, width)
    turned = problem.layout_out != "row"
    blocks = min(machine.units // cluster, _clusters(problem, params)) * cluster
    flags, maps = half_tiles.turned_maps(problem, (height, width), cluster, turned=turned)
    template = type_arguments(problem), height, width, ring, cluster, *flags
    return (
        Step(
            kernel=instance("wgmma_specialized", *template),
            grid=(blocks, 1, 1),
            block=(384, 1, 1),
            smem=ring * (height + width) * half_tiles.DEPTH * 2 + OUT_BYTES,
            cluster=(cluster, 1, 1),
            maps=(*maps, TensorMap("c", (128 // ITEMSIZE[problem.out], 16))),
        ),
    )


def tiled(
    problem: Problem, machine: Machine, size: tuple[int, int], cluster: int, *more: Numbers
) -> Terms:
    """Return the terms of a product by tiles of a size."""
    shape = clusters(problem, size, cluster) * cluster, 1, ceil_div(problem.k, half_tiles.DEPTH)
    kind, (first, reading, loaded) = f"{size[0]}x{size[1]} {cluster}", (*more, {}, {}, {})[:3]
    last = {**settled(problem, machine), **loaded}
    out = left(problem, machine, shape[0])
    return rounds(problem, machine, shape, kind, first, reading, out, last)


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    return tiled(problem, machine, TILES[params["tile"]], params["cluster"])


RUNG = CudaRung(
    title="Warp specialisation",
    idea="One thread loads by TMA, two warpgroups multiply, and tiles follow without a pause.",
    source="CUTLASS' cooperative kernels for Hopper; steps and gains as in pranjalssh/fast.cu",
    after="wgmma_tile",
    params={"tile": tuple(TILES), "cluster": (1, 2)},
    constraints=(
        half_tiles.ALIGNED,
        half_tiles.COUNTED,
        half_tiles.UNIT_STRIDE,
        Constraint(
            "pairs of blocks share the widest tile alone",
            lambda problem, params: params["cluster"] == 1 or params["tile"] == "128x256",
        ),
        Constraint(
            "at most 2^31 tiles",
            lambda problem, params: _clusters(problem, params) < 2**31 - 2**16,
        ),
    ),
    batched=True,
    steps=_steps,
    finished=same("float16", "bfloat16"),
    **half_tiles.COMMON,
    **modelled("matmul/wgmma_specialized", _terms),
)
