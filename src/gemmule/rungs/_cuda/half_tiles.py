"""What the matmul rungs on wgmma share: what TMA needs, and the maps of tiles."""

from __future__ import annotations

from typing import Any

from gemmule.core.packing import TensorMap
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, Constraint

DEPTH = 64  # steps of the reduction in a stage
SIGNATURES = tuple((t, t, out) for t in ("float16", "bfloat16") for out in (t, "float32"))
# Tensor cores align the products of an instruction and cut off: twice the unit roundoff an add.
ARITHMETIC = Arithmetic(
    accumulator="float32", chain=lambda problem, params: problem.k + DEPTH, per_add=2.0
)

# What all rungs on wgmma that multiply halves as they are say of themselves.
COMMON: dict[str, Any] = {
    "signatures": SIGNATURES,
    "arithmetic": lambda problem: ARITHMETIC,
    "layouts": ("row", "col"),
    "archs": ("sm_90a",),
}

ALIGNED = Constraint(
    "bases and leading strides are multiples of 16 bytes, as TMA wants",
    lambda problem, params: problem.alignment == 16,
)
COUNTED = Constraint(
    "sizes from 1 to 2^31 - 1, which TMA's coordinates hold",
    lambda problem, params: (
        problem.k > 0 and max(problem.m, problem.n, problem.k, problem.batch) < 2**31 - 512
    ),
)

TENSOR_SUMS = Constraint(
    "no precision='ieee', which means plain multiply-adds",
    lambda problem, params: problem.precision != "ieee",
)
ROWS_TOGETHER = Constraint(
    "no promise of equal bits for a row alone",
    lambda problem, params: not problem.batch_invariant,
)
UNIT_STRIDE = Constraint(
    "C has a unit stride", lambda problem, params: problem.layout_out in ("row", "col")
)


def along_k(problem: Problem) -> tuple[bool, bool]:
    """Tell of A and of B whether the reduction is the unit stride."""
    return problem.layout_a == "row", problem.layout_b == "col"


def tile_map(operand: str, rows: int, along: bool, parts: int = 1) -> TensorMap:
    """Return the map of `rows` rows of A or columns of B, of which each copy moves a part."""
    return TensorMap(operand, (64, rows // parts if along else DEPTH // parts))


def turned_maps(
    problem: Problem, size: tuple[int, int], parts: int, *, turned: bool
) -> tuple[tuple[bool, bool, bool], tuple[TensorMap, TensorMap]]:
    """Return template arguments and maps of a product that may be computed as C^T = B^T A^T.

    The arguments: of the first operand and the second whether they lie along the reduction, and
    whether the product is turned. size: the tile's; parts: copies of the second's.
    """
    along = along_k(problem)
    names, (first, second) = ("ba", along[::-1]) if turned else ("ab", along)
    maps = tile_map(names[0], size[0], first), tile_map(names[1], size[1], second, parts)
    return (first, second, turned), maps
