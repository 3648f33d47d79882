"""Few rows by bytes: narrow tiles, of which there are enough for every multiprocessor.

A model's weights of 8 bits by the activations of one to some dozen users: the memory limits, if the
whole chip reads. A tile of 128 rows of 8,192 leaves half of it idle, so tiles here have 64, and two
blocks share a multiprocessor, one multiplying while the other stores. Where that is still too few a
cluster's two blocks each sum half of the steps, and meet as in `wgmma_split`, whose frame this is.
Sums of float8 leave the tensor cores every 128 steps as in `wgmma_float8`, those of integers are
exact. Both operands lie along the sum, as weights and activations do.
"""

from __future__ import annotations

from dataclasses import replace

from gemmule.core.device_model import Terms
from gemmule.core.packing import TensorMap
from gemmule.core.problem import BYTES, Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import half_tiles
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, instance, modelled
from gemmule.rungs._cuda.terms import rounds
from gemmule.rungs._cuda.tiles import LARGEST_GRID, tiles
from gemmule.rungs.matmul.cuda import wgmma_float8, wgmma_int8

HEIGHT, DEEP, THREADS = 64, 2, 160  # as in the kernel
ROOM = 113 * 1024 - 1024  # bytes of shared memory of one of two blocks
LINE = 128  # bytes of a line of a tile, as many steps


def _turned(problem: Problem) -> bool:
    """Tell whether C^T = B^T A^T is computed: the longer side goes along an instruction's rows."""
    return problem.m < problem.n


def _blocks(problem: Problem, params: Params) -> int:
    width = params["width"]
    sides = (width, HEIGHT) if _turned(problem) else (HEIGHT, width)
    return tiles(problem, *sides) * int(params["parts"])


def _ring(width: int) -> tuple[int, int]:
    """Return the stages, and the bytes of shared memory with the place where sums meet."""
    stage, sums = DEEP * (HEIGHT + width) * LINE, HEIGHT * width * 4
    stages = (ROOM - sums) // stage
    return stages, stages * stage + sums


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    width, turned = params["width"], _turned(problem)
    stages, smem = _ring(width)
    types, names = [CTYPE[problem.a], CTYPE[problem.b]], "ba" if turned else "ab"
    types = [*(types[::-1] if turned else types), CTYPE[problem.out]]
    return (
        Step(
            kernel=instance("wgmma_split_bytes", *types, width, stages, turned),
            grid=(_blocks(problem, params), 1, 1),
            block=(THREADS, 1, 1),
            smem=smem,
            cluster=(params["parts"], 1, 1),
            maps=(TensorMap(names[0], (LINE, HEIGHT)), TensorMap(names[1], (LINE, width))),
        ),
    )


def _arithmetic(problem: Problem) -> Arithmetic:
    """Sum as the rungs of whole tiles do, and once more where two blocks meet."""
    if problem.a in BYTES:
        return wgmma_int8.RUNG.arithmetic(problem)
    own = wgmma_float8.ARITHMETIC
    return replace(own, chain=lambda asked, params: own.chain(asked, params) + 1)


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    width, parts = params["width"], params["parts"]
    turns = ceil_div(problem.k, DEEP * LINE * parts)
    shape = _blocks(problem, params), 2, turns
    more = {f"out_s {width}": 1.0, "meeting_s": float(parts > 1)}
    return rounds(problem, machine, shape, str(width), more)


RUNG = CudaRung(
    title="Split bytes",
    idea="Few rows by bytes in tiles of 64 rows, two blocks a multiprocessor.",
    source="wgmma_split's frame; promotion as in DeepSeek-V3, section 3.3.2",
    signatures=(*wgmma_int8.RUNG.signatures, *wgmma_float8.RUNG.signatures),
    scaled=(*wgmma_int8.RUNG.scaled, *wgmma_float8.RUNG.scaled),
    finished=(*wgmma_int8.RUNG.finished, *wgmma_float8.RUNG.finished),
    arithmetic=_arithmetic,
    after="wgmma_split",
    branch="bytes, few rows",
    layouts=("row",),
    layouts_b=("col",),
    params={"width": (16, 32, 64), "parts": (1, 2)},
    constraints=(
        half_tiles.ALIGNED,
        half_tiles.COUNTED,
        Constraint(
            f"at most {LARGEST_GRID:,} blocks",
            lambda problem, params: _blocks(problem, params) <= LARGEST_GRID,
        ),
    ),
    batched=True,
    steps=_steps,
    archs=("sm_90a",),
    **modelled("matmul/wgmma_split_bytes", _terms),
)
