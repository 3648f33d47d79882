"""Register tile: each thread computes a small square of C, so that a value read is used often.

With one element of C a thread, two reads of shared memory feed one product, and shared memory is
the limit. Here 16 x 16 threads hold `micro` x `micro` sums each: 2 `micro` reads feed `micro`^2
products, 16 reads 64 products by default, and the passes over shared memory fall to a fifth. The
panels are stored with the reduction outermost, so that the threads of a warp read neighbours or the
same element. Every stride is taken: the threads that stage a panel follow whichever stride is 1.
"""

from __future__ import annotations

from gemmule.core.problem import COMPLEX, FLOAT8, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import (
    ALL_SIGNATURES,
    COMPLEX_SIGNATURES,
    FLOAT8_SIGNATURES,
    accumulator,
    instance,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.tiles import ANY_ORDER, WIDE_INTEGERS, by_square, fits_grid, launch, square

SIDE = 16  # threads along each side of a block
DEPTH = 8


def _is_wide(problem: Problem) -> bool:
    return accumulator(problem) in (*WIDE_INTEGERS, *COMPLEX)


_size = square("micro", SIDE)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    kernel = instance("register_tile", type_arguments(problem), params["micro"])
    return launch(kernel, problem, _size(params), (SIDE * SIDE, 1))


RUNG = CudaRung(
    title="Register tile",
    idea="Each thread keeps a micro-tile of C in registers: few reads of shared memory a product.",
    source="the register blocking of BLAS kernels, on a GPU since Volkov and Demmel (2008)",
    signatures=(
        *ALL_SIGNATURES,
        *FLOAT8_SIGNATURES,
        *((b, a, out) for a, b, out in FLOAT8_SIGNATURES if b not in FLOAT8),
        *COMPLEX_SIGNATURES,
    ),
    arithmetic=sums(lambda problem, params: problem.k + DEPTH),
    after="rectangular_tile",
    params={"micro": (8, 4)},
    constraints=(
        Constraint(
            "micro=8 needs sums of floats or of int32: 64 of complex numbers or 64 bits spill",
            lambda problem, params: params["micro"] == 4 or not _is_wide(problem),
        ),
        fits_grid(_size),
    ),
    steps=_steps,
    **ANY_ORDER,
    **by_square("matmul/register_tile", "micro", SIDE),
)
