"""Naive, the first kernel of documents 001 and 002: one thread an element of C, no shared memory.

Each thread walks a row of A and a column of B. Neighbouring threads hold neighbouring columns, so a
warp reads one element of a row-major A (a broadcast, one sector for 32 threads) and 32 neighbours
of a row-major B. The caches catch nearly all of it, and DRAM is read once: the memory is not what
limits it. Two loads for every multiply-add are; the arithmetic units are busy for a tenth to a
quarter of the time.

`accumulate="global"` keeps the running sum in C itself, as the document's first version does: two
more trips to memory for each product. `fma=False` rounds product and sum apart. `width` is the side
of the square block: 1 launches a block per element, which leaves 31 lanes of every warp idle.

Every stride of A, B and C is taken, so every problem has a right rung.
"""

from __future__ import annotations

from gemmule.core.problem import FLOATS, Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES, accumulator, instance, type_arguments
from gemmule.rungs._cuda.tiles import ANY_ORDER, FMA_ROUNDS, fits_grid, launch, square

_size = square("width")


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    in_c = params["accumulate"] == "global"
    kernel = instance("naive", type_arguments(problem), in_c, params["fma"])
    return launch(kernel, problem, _size(params), _size(params))


def _arithmetic(problem: Problem) -> Arithmetic:
    # Products are fused unless fma=False, and then rounded like the sum: the wider bound is stated.
    acc = accumulator(problem)
    return Arithmetic(acc, chain=lambda p, params: p.k, product=acc if acc in FLOATS else None)


RUNG = CudaRung(
    title="Naive",
    idea="One thread computes one element of C from global memory.",
    source="document 001, naive GPU kernel; document 002, basic kernel",
    signatures=ALL_SIGNATURES,
    arithmetic=_arithmetic,
    params={"accumulate": ("register", "global"), "fma": (True, False), "width": (32, 16, 1)},
    constraints=(
        Constraint(
            "accumulate='global' needs a C of the accumulator's type",
            lambda problem, params: (
                params["accumulate"] == "register" or problem.out == accumulator(problem)
            ),
        ),
        FMA_ROUNDS,
        fits_grid(_size),
    ),
    steps=_steps,
    **ANY_ORDER,
)
