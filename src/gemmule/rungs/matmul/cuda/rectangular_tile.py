"""Rectangular tile, document 002's third kernel: one tile of A serves two tiles of B.

A block of `tile` x `tile` threads computes `tile` rows and twice as many columns of C, two elements
a thread. Each element of A that a thread reads from shared memory meets two of B, so three reads
feed two products where the square tile needs four. The two tiles of B lie side by side: a row is 2
`tile` long, and the three tiles take 3 `tile`^2 elements.
"""

from __future__ import annotations

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES, instance, type_arguments
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.tiles import ANY_ORDER, fits_grid, launch


def _size(params: Params) -> tuple[int, int]:
    return params["tile"], 2 * params["tile"]


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    tile = params["tile"]
    kernel = instance("rectangular_tile", type_arguments(problem), tile)
    smem = tile * tile * (ITEMSIZE[problem.a] + 2 * ITEMSIZE[problem.b])
    return launch(kernel, problem, _size(params), (tile, tile), smem)


RUNG = CudaRung(
    title="Rectangular tile",
    idea="One staged tile of A meets two tiles of B: two elements of C per thread.",
    source="document 002, rectangular tiles",
    signatures=ALL_SIGNATURES,
    arithmetic=sums(lambda problem, params: problem.k + params["tile"]),
    after="shared_tile",
    params={"tile": (32, 16, 8)},
    constraints=(fits_grid(_size),),
    steps=_steps,
    **ANY_ORDER,
)
