"""Tensor core: float16 and bfloat16 by `mma.sync`, fed through a ring of shared-memory stages.

One instruction of a warp multiplies 16 x 16 by 16 x 8 halves and adds to float32 sums: a twelfth of
the instructions do the same products. To keep it fed, `cp.async` copies the next three stages from
global to shared memory without passing registers, while the warps read fragments of the present one
by `ldmatrix`. Chunks of 16 bytes are permuted within their line, so that neither copies nor reads
collide in a bank. Shared memory keeps the orientation of global memory and `ldmatrix` transposes
where the reduction is not the unit stride: all four layouts run at one speed. Unaligned operands
are copied by single elements: right, but several times slower. Kernels by the wider instructions of
Hopper (`wgmma`), such as PyTorch's, are faster still.
"""

from __future__ import annotations

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import instance, lies, type_arguments
from gemmule.rungs._cuda.half_tiles import SIGNATURES, along_k
from gemmule.rungs._cuda.tiles import by_square, fits_grid, launch, square

DEPTH, STAGES = 32, 4


_size = square("tile")


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    tile = params["tile"]
    kernel = instance("tensor_core", type_arguments(problem), tile, *along_k(problem))
    return launch(kernel, problem, _size(params), (2 * tile, 1), STAGES * 2 * tile * DEPTH * 2)


RUNG = CudaRung(
    title="Tensor core",
    idea="Warps multiply 16 x 16 x 8 fragments in one instruction; cp.async keeps stages coming.",
    archs=SINCE_AMPERE,
    source="PTX ISA: mma.sync, ldmatrix, cp.async; multistage kernels since compute capability 8.0",
    signatures=SIGNATURES,
    # Tensor cores align the products of an instruction and cut off: twice the unit roundoff an add.
    arithmetic=lambda problem: Arithmetic(
        accumulator="float32", chain=lambda p, params: p.k + DEPTH, per_add=2.0
    ),
    layouts=("row", "col"),
    after="vector_tile",
    params={"tile": (128, 64)},
    constraints=(fits_grid(_size),),
    batched=True,
    steps=_steps,
    **by_square("matmul/tensor_core", "tile", kind=lies),
)
