"""Two steps: parts of a long sum are products of their own, and a second kernel adds them.

In `wgmma_split` the blocks that share a tile are a cluster, so that no more of them meet than a
part of the GPU holds, and none shares what it loads. Where C has few tiles and the sum is long that
leaves half of the multiprocessors idle, and the L2 hands out each operand once for every tile.
Here each part of the sum is a product like those of `wgmma_specialized`, by pairs of blocks that
load half of B each for both, and its float32 sums go to the workspace. The second kernel adds them
in the order of the parts, so that the bits are the same in every run; it is launched early and
waits on the device. What limits is the L2, for tiles and more so for planes of floats, so that 16
parts take longer again, and products of many tiles gain nothing.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.packing import SumsMap
from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import half_tiles
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, instance, modelled
from gemmule.rungs._cuda.terms import rounds
from gemmule.rungs._cuda.tiles import LARGEST_GRID
from gemmule.rungs.matmul.cuda import wgmma_specialized

CLUSTER = 2
TILES = {"128x128": (128, 128), "128x256": (128, 256)}


def _turned(problem: Problem) -> bool:
    return problem.layout_out != "row"


def _sides(problem: Problem) -> tuple[int, int]:
    """Return the rows and columns of C as tiles see it."""
    return (problem.n, problem.m) if _turned(problem) else (problem.m, problem.n)


def _pairs(problem: Problem, params: Params) -> int:
    """Return how many pairs of tiles one part of the sum has."""
    (height, width), (m, n) = TILES[params["tile"]], _sides(problem)
    return ceil_div(m, height * CLUSTER) * ceil_div(n, width)


def _plane_bytes(problem: Problem) -> int:
    m, n = _sides(problem)
    return m * ceil_div(n, 4) * 16


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    return int(params["parts"]) * _plane_bytes(problem)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    (height, width), parts = TILES[params["tile"]], params["parts"]
    ring, turned = wgmma_specialized.stages(height, width), _turned(problem)
    pairs = min(max(1, machine.units // CLUSTER // parts), _pairs(problem, params))
    flags, maps = half_tiles.turned_maps(problem, (height, width), CLUSTER, turned=turned)
    types = CTYPE[problem.a], CTYPE[problem.b]
    multiply = Step(
        kernel=instance("multiply_parts", *types, height, width, ring, *flags),
        grid=(pairs * CLUSTER, parts, 1),
        block=(384, 1, 1),
        smem=ring * (height + width) * half_tiles.DEPTH * 2 + wgmma_specialized.OUT_BYTES,
        cluster=(CLUSTER, 1, 1),
        maps=(*maps, SumsMap("c", (32, 16), packed_at=0, planes=parts)),
    )
    add = Step(
        kernel=instance("add_parts", CTYPE[problem.out], parts, turned),
        grid=(ceil_div(_plane_bytes(problem), 256 * 16), 1, 1),
        block=(256, 1, 1),
        pdl=True,
    )
    return multiply, add


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Wait for arithmetic, the L2's tiles and the memory, then move the planes."""
    (height, width), parts = TILES[params["tile"]], int(params["parts"])
    blocks = _pairs(problem, params) * CLUSTER * parts
    steps = ceil_div(ceil_div(problem.k, half_tiles.DEPTH), parts)
    loaded = blocks * steps * (height + width / CLUSTER) * half_tiles.DEPTH / machine.units
    more = {"planes": 2.0 * parts * _plane_bytes(problem) / machine.read_bytes_per_s}
    shape = blocks, 1, steps
    return rounds(problem, machine, shape, params["tile"], more, {}, {}, {"loaded_s": loaded})


RUNG = CudaRung(
    title="Two steps",
    idea="Parts of the sum are products of their own, and a second kernel adds them.",
    source="split-K; pairs of blocks that share loads, as in pranjalssh/fast.cu",
    after="wgmma_specialized",
    branch="few tiles, longer sums",
    params={"tile": tuple(TILES), "parts": (8, 4, 16)},
    constraints=(
        half_tiles.ALIGNED,
        half_tiles.COUNTED,
        half_tiles.UNIT_STRIDE,
        Constraint("one product", lambda problem, params: problem.batch == 1),
        Constraint(
            f"at most {LARGEST_GRID:,} blocks of either kernel",
            lambda problem, params: _plane_bytes(problem) <= LARGEST_GRID * 4096,
        ),
    ),
    steps=_steps,
    workspace=_workspace,
    **half_tiles.COMMON,
    **modelled("matmul/wgmma_two_step", _terms),
)
