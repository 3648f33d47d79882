"""What the rungs share that stream a matrix once."""

from __future__ import annotations

from gemmule.problem import ITEMSIZE, Problem
from gemmule.rung import Constraint
from gemmule.rungs._cuda import ceil_div

FITS = Constraint(
    "m and n below 2^31, at most 65,535 products in a batch",
    lambda problem, params: max(problem.m, problem.n) < 2**31 and problem.batch < 65_536,
)


def flags(problem: Problem) -> str:
    """Return the template arguments ALIGNED and BATCHED."""
    return ", ".join(str(f).lower() for f in (problem.alignment == 16, problem.batch > 1))


def strips(problem: Problem, lanes: int) -> int:
    """Return how many strips of columns a matrix has: `lanes` vectors of 16 bytes each.

    Unaligned elements of 4 and 8 bytes go one by one (see column_stream.cuh).
    """
    size = ITEMSIZE[problem.a]
    vector = 16 // size if problem.alignment == 16 or size <= 2 else 1
    return ceil_div(problem.m, lanes * vector)
