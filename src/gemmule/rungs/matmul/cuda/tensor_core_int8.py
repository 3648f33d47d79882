"""Tensor core for bytes: int8 and uint8 by `mma.sync`, summed in int32, exact.

The structure is that of the halves: a ring of stages, `ldmatrix`, permuted chunks. One instruction
takes 32 steps of the reduction, and all four bytes of a register lie along it, while `ldmatrix` can
transpose pairs of bytes only. So shared memory always holds lines along the reduction: an operand
with that unit stride is copied by `cp.async`, any other passes registers, where 4 x 4 bytes are
transposed; its stores to shared memory are where bank conflicts are left. A row-major A and a
column-major B are the fastest pair.

The hardware multiplies u8 by s8 but not s8 by u8, which is computed as its transpose.
"""

from __future__ import annotations

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import instance, lies, type_arguments
from gemmule.rungs._cuda.half_tiles import along_k
from gemmule.rungs._cuda.tiles import by_square, fits_grid, launch, square

DEPTH, STAGES = 64, 4


_size = square("tile")


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    tile = params["tile"]
    kernel = instance("tensor_core_int8", type_arguments(problem), tile, *along_k(problem))
    return launch(kernel, problem, _size(params), (2 * tile, 1), STAGES * 2 * tile * DEPTH)


def _kind(problem: Problem) -> str:
    """Tell how many operands lie across the sum, and where rows begin."""
    across = (problem.layout_a != "row") + (problem.layout_b != "col")
    return f"{across} {lies(problem)}"


RUNG = CudaRung(
    title="Tensor core for bytes",
    idea="The same ring of stages for 8-bit integers; bytes are transposed on the way in.",
    archs=SINCE_AMPERE,
    source="PTX ISA: mma.sync m16n8k32; byte transposition by prmt",
    signatures=tuple((a, b, "int32") for a in ("int8", "uint8") for b in ("int8", "uint8")),
    arithmetic=lambda problem: Arithmetic(accumulator="int32", chain=lambda p, params: p.k),
    layouts=("row", "col"),
    after="tensor_core",
    branch="bytes",
    params={"tile": (128, 64)},
    constraints=(fits_grid(_size),),
    batched=True,
    steps=_steps,
    **by_square("matmul/tensor_core_int8", "tile", kind=_kind),
)
