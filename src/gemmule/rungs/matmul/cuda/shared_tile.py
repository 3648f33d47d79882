"""Shared tile, the tiled kernel of documents 001 and 002: what a block reads, it reads once.

A block of `tile` x `tile` threads computes a square tile of C. Phase by phase it stages one tile of
A and one of B in shared memory, then every thread takes its row of the one and its column of the
other. Each element is asked for once per tile instead of once per thread: `tile` times fewer loads.
What reaches the L2 hardly changes, for the naive kernel's reads are served by the L1. And the two
loads for a multiply-add remain; they now go to shared memory, whose passes become the limit.
`tile=1` is the naive kernel again, with a detour.

`fma=False` rounds product and sum apart, by two instructions in place of one.
"""

from __future__ import annotations

from gemmule.core.problem import FLOATS, Problem
from gemmule.core.rung import Arithmetic, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES, accumulator, instance, type_arguments
from gemmule.rungs._cuda.tiles import ANY_ORDER, FMA_ROUNDS, fits_grid, launch, square

_size = square("tile")


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    template = type_arguments(problem), params["tile"], params["fma"]
    return launch(instance("shared_tile", *template), problem, _size(params), _size(params))


def _arithmetic(problem: Problem) -> Arithmetic:
    acc = accumulator(problem)
    return Arithmetic(
        acc,
        chain=lambda p, params: p.k + params["tile"],
        product=acc if acc in FLOATS else None,  # the wider bound, of fma=False, as for `naive`
    )


RUNG = CudaRung(
    title="Shared tile",
    idea="A block stages square tiles of A and B in shared memory and reuses each element.",
    source="document 001, shared-memory kernel; document 002, square tiles",
    signatures=ALL_SIGNATURES,
    arithmetic=_arithmetic,
    after="naive",
    params={"tile": (32, 16, 8, 1), "fma": (True, False)},
    constraints=(FMA_ROUNDS, fits_grid(_size)),
    steps=_steps,
    **ANY_ORDER,
)
