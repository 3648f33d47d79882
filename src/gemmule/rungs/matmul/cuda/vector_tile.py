"""Vector tile: the register tile with 16-byte accesses and loads that overlap arithmetic.

Panels move from global memory to registers to shared memory in pieces of 16 bytes along whichever
stride is 1, and the micro-tiles read them back in 16-byte vectors: a quarter of the instructions.
Shared memory holds two buffers: while the block computes on one, the next panels are on their way
to registers, and one barrier a step is enough. The multiply-add pipe is busy most of the time: this
is about what ordinary arithmetic can give. Pieces that are not aligned or reach past the edge are
read element by element, so any size, stride and address is taken.

Products are plain fused multiply-adds in the accumulator's type: what `precision="ieee"` means.
"""

from __future__ import annotations

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step, Suggestion, same
from gemmule.rungs._cuda.geometry import accumulator, instance, type_arguments
from gemmule.rungs._cuda.half_tiles import along_k
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.tiles import fits_grid, launch, quickest_square, square

SIDE = 16  # threads along each side of a block
# Flops per second of one multiprocessor, by accumulator: estimates from the instruction rates of
# compute capability 9.0 at 1.7 GHz, not measured.
UNIT_FLOPS = {"float32": 3.0e11, "float64": 1.6e11}


_size = square("micro", SIDE)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    kernel = instance("vector_tile", type_arguments(problem), params["micro"], *along_k(problem))
    return launch(kernel, problem, _size(params), (SIDE * SIDE, 1))


def _chain(problem: Problem, params: Params) -> int:
    return problem.k + 64 // ITEMSIZE[accumulator(problem)]


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    flops = UNIT_FLOPS[accumulator(problem)] * (1.0 if problem.alignment == 16 else 0.75)
    return quickest_square(problem, machine, "micro", ((8, 1, 1.0), (4, 3, 0.7)), flops, SIDE)


RUNG = CudaRung(
    title="Vector tile",
    idea="16-byte loads and shared reads; two buffers, so that loading overlaps computing.",
    source="double-buffered SGEMM kernels, as in BLAS libraries for GPUs since about 2010",
    signatures=(
        *same("float32", "float64"),
        ("float16", "float32", "float32"),
        ("bfloat16", "float32", "float32"),
    ),
    arithmetic=sums(_chain),
    layouts=("row", "col"),
    after="register_tile",
    params={"micro": (8, 4)},
    constraints=(fits_grid(_size),),
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
