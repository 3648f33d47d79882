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
from gemmule.core.rung import CudaRung, Machine, Params, Step, same
from gemmule.rungs._cuda.geometry import accumulator, instance, lies, type_arguments
from gemmule.rungs._cuda.half_tiles import along_k
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.tiles import by_square, fits_grid, launch, square

SIDE = 16  # threads along each side of a block


_size = square("micro", SIDE)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    kernel = instance("vector_tile", type_arguments(problem), params["micro"], *along_k(problem))
    return launch(kernel, problem, _size(params), (SIDE * SIDE, 1))


def _chain(problem: Problem, params: Params) -> int:
    return problem.k + 64 // ITEMSIZE[accumulator(problem)]


def _kind(problem: Problem) -> str:
    return f"{problem.a} {lies(problem)}"


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
    steps=_steps,
    **by_square("matmul/vector_tile", "micro", SIDE, _kind),
)
