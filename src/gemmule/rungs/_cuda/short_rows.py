"""What CUDA rungs that stage short rows in shared memory share (short_rows.cuh)."""

from __future__ import annotations

import math

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.rungs._cuda.geometry import ceil_div

THREADS = 256
ROOM = 64 * 1024  # shared memory that a block may have: three blocks on every multiprocessor
BANKS = 32  # of 4 bytes each
MOST_PASSES, MOST_BYTES = 4, {"row": 240, "col": 128}


def wide_row(length: int, dtype: str) -> int:
    """Return the bytes that a stored row of `length` elements may have from one to the next."""
    return ceil_div(length * ITEMSIZE[dtype], 16) * 16


def unit(problem: Problem) -> int:
    """Return the bytes of the widest access to rows in shared memory that alignment allows."""
    return max(problem.alignment, ITEMSIZE[problem.a])


def conflicts(length: int, problem: Problem) -> int:
    """Return how many passes an access takes for each that it would without bank conflicts.

    Lanes read `unit` bytes each, as many lanes at a time as 128 bytes make; rows lie packed.
    """
    pitch, width = length * ITEMSIZE[problem.a], unit(problem)
    lanes = min(32, 4 * BANKS // width)
    words = [lane * pitch // 4 for lane in range(lanes)]
    most = max(math.ceil(width / 4), 1)
    hits: dict[int, set[int]] = {}
    for word in words:
        for each in range(most):
            hits.setdefault((word + each) % BANKS, set()).add(word + each)
    return max(len(found) for found in hits.values())


def worth_staging(length: int, problem: Problem) -> bool:
    """Tell whether rows are as short, and lie as well in the banks, as is known to be quick."""
    few = conflicts(length, problem) <= MOST_PASSES
    return few and wide_row(length, problem.a) <= MOST_BYTES[problem.layout_a]
