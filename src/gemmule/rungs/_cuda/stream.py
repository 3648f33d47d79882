"""What CUDA rungs that stream a matrix once share: constraints, strips, models of their time."""

from __future__ import annotations

from gemmule.core.problem import COMPLEX, ITEMSIZE, Problem
from gemmule.core.rung import Constraint
from gemmule.rungs._cuda.geometry import ceil_div

FITS = Constraint(
    "m and n below 2^31, at most 65,535 products in a batch",
    lambda problem, params: max(problem.m, problem.n) < 2**31 and problem.batch < 65_536,
)

INDEXED = Constraint(
    "m and n below 2^31", lambda problem, params: max(problem.m, problem.n) < 2**31
)
WHOLE = Constraint(
    "complex numbers at whole ones of them",
    lambda problem, params: problem.a not in COMPLEX or problem.alignment >= ITEMSIZE[problem.a],
)
ALONE = Constraint("one product at a time", lambda problem, params: problem.batch == 1)

UNITS_OF_ROWS = Constraint(
    "8 or 32 lanes for unaligned rows",
    lambda problem, params: problem.alignment == 16 or params["lanes"] in (8, 32),
)


def flags(problem: Problem) -> str:
    """Return the template arguments ALIGNED and BATCHED."""
    return ", ".join(str(f).lower() for f in (problem.alignment == 16, problem.batch > 1))


def strips(problem: Problem, lanes: int) -> int:
    """Return how many strips of columns a matrix has: `lanes` vectors of 16 bytes each.

    Where rows are unaligned, less what may lie before a row's begin (see column_stream.cuh).
    """
    vector = 16 // ITEMSIZE[problem.a]
    return ceil_div(problem.m, lanes * vector - (vector - 1) * (problem.alignment != 16))


def rows_of_a_thread(problem: Problem, walkers: int, in_flight: int) -> int:
    """Return the most rows that one thread adds up: whole turns of `in_flight` neighbouring rows.

    walkers: the threads that walk different rows of a strip, of all blocks that share it.
    """
    return ceil_div(problem.n, walkers * in_flight) * in_flight
