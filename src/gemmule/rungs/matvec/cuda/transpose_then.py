"""Transpose, then block & multiply, document 004's third algorithm: A^T x, column-major storage.

Adds to `block_multiply_transposed`: a transposed copy of the matrix, made by tiles of 32 x 32
elements through shared memory so that both its reads and its writes are coalesced, and then the
coalesced product over the copy. A tile has one column more than it needs, so that a column of it
meets every bank. The requests become whole, and yet nothing is won for one product: the matrix
crosses the memory bus three times instead of once. The copy pays only where it is used again.

The workspace is the price: m x n elements of the matrix for each one of the batch that has its own,
besides batch x m sums of 4 bytes (8 for float64). Shared memory: a tile of 32 x 33 elements, then
width x itemsize of x.
"""

from __future__ import annotations

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.blocks import COMMON, around, product, sums_bytes
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, instance

TILE, TILE_ROWS = 32, 8  # kTile and kTileRows of the kernel


def _matrices(problem: Problem) -> int:
    return 1 if problem.shared_a else problem.batch


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    if problem.n == 0:
        return around(problem, ())
    tiles = ceil_div(problem.m, TILE) * ceil_div(problem.n, TILE) * _matrices(problem)
    turn = instance("transpose_tiles", CTYPE[problem.a], CTYPE[problem.out])
    transpose = Step(turn, (tiles, 1, 1), (TILE, TILE_ROWS, 1))
    return around(problem, (transpose, product("transpose_then", problem, params)))


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    copy = _matrices(problem) * problem.m * problem.n * ITEMSIZE[problem.a]
    return ceil_div(sums_bytes(problem), 256) * 256 + copy


RUNG = CudaRung(
    title="Transpose, then block and multiply",
    idea="Pay for a transposed copy once, then read it coalesced.",
    source="document 004, Transpose THEN Block & Multiply, with a transpose kernel of our own",
    after="block_multiply_transposed",
    workspace=_workspace,
    steps=_steps,
    **COMMON,
)
