"""Repacked operands: where rows begin anywhere, one pass lines them up for TMA.

TMA reads rows that begin at multiples of 16 bytes. Sizes that are no multiple of eight halves, or
slices that begin in the middle, have others; copying both operands once, into lines that begin
where TMA wants them, costs their bytes twice and is soon earned back by a product of some hundred
rows: 4093 cubed takes a third of cuBLAS' time. The order of an operand stays as it was,
so that all four layouts go on to run alike. Sums go to shared memory and from there to C one by
one, for C lies as it may.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.packing import Packing, TensorMap
from gemmule.core.problem import Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step, same
from gemmule.rungs._cuda import half_tiles
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, instance, modelled, type_arguments
from gemmule.rungs._cuda.tiles import fits_grid, tiles
from gemmule.rungs.matmul.cuda import wgmma_specialized

TILES = {"128x256": (128, 256), "128x128": (128, 128)}
PACK_THREADS, PACK_BLOCKS = 256, 8  # blocks of a multiprocessor


def _size(params: Params) -> tuple[int, int]:
    return TILES[params["tile"]]


def _packed_bytes(problem: Problem) -> tuple[int, int]:
    """Return the bytes of the copies of A and of B, each rounded up to 256."""
    sizes = []
    for rows, cols, layout, shared in (
        (problem.m, problem.k, problem.layout_a, problem.shared_a),
        (problem.k, problem.n, problem.layout_b, problem.shared_b),
    ):
        inner, outer = (cols, rows) if layout == "row" else (rows, cols)
        lines = outer * (1 if shared else problem.batch)
        sizes.append(ceil_div(ceil_div(inner, 8) * 16 * lines, 256) * 256)
    return sizes[0], sizes[1]


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    return sum(_packed_bytes(problem))


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    height, width = _size(params)
    stages = wgmma_specialized.stages(height, width)
    a_along, b_along = half_tiles.along_k(problem)
    of_a, of_b = half_tiles.tile_map("a", height, a_along), half_tiles.tile_map("b", width, b_along)
    pack = Step(
        kernel=instance("pack_operands", CTYPE[problem.a], a_along, b_along),
        grid=(PACK_BLOCKS * machine.units, 1, 1),
        block=(PACK_THREADS, 1, 1),
    )
    template = type_arguments(problem), height, width, stages, a_along, b_along
    multiply = Step(
        kernel=instance("wgmma_repacked", *template),
        grid=(min(machine.units, tiles(problem, height, width)), 1, 1),
        block=(384, 1, 1),
        smem=stages * (height + width) * half_tiles.DEPTH * 2 + wgmma_specialized.OUT_BYTES,
        maps=(
            TensorMap("a", of_a.box, packed_at=0),
            TensorMap("b", of_b.box, packed_at=_packed_bytes(problem)[0]),
        ),
    )
    return pack, multiply


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Read and write the copies, then multiply."""
    copied = sum(_packed_bytes(problem)) / machine.read_bytes_per_s
    return wgmma_specialized.tiled(problem, machine, _size(params), 1, {"copied": copied})


RUNG = CudaRung(
    title="Repacked operands",
    idea="One pass copies both operands into lines that begin where TMA wants them.",
    source="packing, as BLAS libraries for CPUs do since GotoBLAS",
    after="wgmma_specialized",
    branch="operands that TMA cannot copy",
    params={"tile": tuple(TILES)},
    constraints=(half_tiles.COUNTED, fits_grid(_size)),
    batched=True,
    steps=_steps,
    finished=same("float16", "bfloat16"),
    workspace=_workspace,
    packing=Packing(passes=1, begins=lambda problem: sum(_packed_bytes(problem)), is_copy=True),
    **half_tiles.COMMON,
    **modelled("matmul/wgmma_repacked", _terms),
)
