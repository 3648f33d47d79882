"""Products panel by panel: those whose operands must be copied, and those that take long.

Every row of ``A x`` and every block of ``A B`` is a product of its own, so a matrix that a rung
cannot read as it lies (a stepped view, another dtype) is converted panel by panel, and a view far
larger than the memory behind it, as broadcasting makes, needs no more than any other. Between
panels Python handles signals: a kernel that ran for minutes would not be ended by Ctrl-C.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from gemmule.core.choice import Choice
from gemmule.core.memory import check_map
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung

Array = np.ndarray[Any, Any]
Product = Callable[[Any, Array, Array], None]

LEAST_BYTES, MOST_BYTES = 2**20, 64 * 2**20

PIECE_S = 0.5  # what a piece of a long product takes, as far as can be told before,
AGAIN = 20  # and how many times as long as to read B, which may be packed anew for each
PIECE_ROWS = 64  # to whole multiples of which a piece is rounded up


def pieces(choice: Choice) -> tuple[int, int] | None:
    """Return the rows of A and columns of B in a piece of a product that takes long, else None.

    Only of rungs that compute the same bits piece by piece.
    """
    problem, rung = choice.problem, choice.rung
    if not isinstance(rung, CpuRung) or not rung.rows_apart or problem.batch != 1:
        return None
    of_b = problem.reduction * ITEMSIZE[problem.b] * (problem.n if problem.op == "matmul" else 1)
    piece_s = max(PIECE_S, AGAIN * of_b / choice.machine.read_bytes_per_s)
    count = math.ceil((choice.expected_s or 0.0) / piece_s)
    rows = -(-problem.m // max(count, 1) // PIECE_ROWS) * PIECE_ROWS
    if count < 2 or rows >= problem.m or problem.quant is not None:
        return None
    split = (rows, problem.n)
    return split if all(rung.refusal(one) is None for one in _kinds(problem, split)) else None


def sizes(choice: Choice) -> tuple[int, int] | None:
    """Return the rows of A and columns of B that a panel has; None where whole copies are small."""
    problem = choice.problem
    of_a, of_b = MOST_BYTES, 4 * MOST_BYTES  # A is copied again for each panel of B
    if problem.op == "matvec":  # read once, straight after it was copied: out of the cache
        of_a = min(MOST_BYTES, max(LEAST_BYTES, choice.machine.cache_bytes // 8))
    rows, columns = _fitting(choice, "A", of_a), _fitting(choice, "B", of_b)
    if problem.quant is not None or (rows >= problem.m and columns >= problem.n):
        return None
    split = (min(rows, problem.m), min(columns, problem.n))
    for size in _kinds(problem, split):
        if choice.rung.refusal(size) is not None:
            return None
    return split


def _fitting(choice: Choice, name: str, nbytes: int) -> int:
    """Return how many rows of A, or columns of B, an operand's copy may have."""
    problem, given = choice.problem, choice.call.problem
    whole = problem.m if name == "A" else problem.n
    if name == "B" and problem.op == "matvec":
        return whole
    mine = (problem.a, problem.layout_a) if name == "A" else (problem.b, problem.layout_b)
    theirs = (given.a, given.layout_a) if name == "A" else (given.b, given.layout_b)
    copied = mine != theirs
    return max(1, nbytes // max(1, problem.reduction * ITEMSIZE[mine[0]])) if copied else whole


def _kinds(problem: Problem, split: tuple[int, int]) -> set[Problem]:
    """Return the problems of the panels: the full ones and those at the edges."""
    single = problem.alone()
    rows = {split[0], problem.m % split[0] or split[0]}
    if problem.op == "matvec":
        return {replace(single, m=m) for m in rows}
    columns = {split[1], problem.n % split[1] or split[1]}
    return {replace(single, m=m, n=n) for m in rows for n in columns}


def in_panels(
    choice: Choice, split: tuple[int, int], build: Callable[[Problem], Product]
) -> Product:
    """Return the product of one canonical call, each panel of it converted and multiplied alone.

    `build` returns the rung for a problem, on operands as the call has them.
    """
    problem, panel = choice.problem, functools.cache(build)

    def one(a: Array, b: Array, out: Array) -> None:
        for batch in range(problem.batch):
            entry = batch if problem.batch > 1 else ...
            _each(problem, split, panel, (a[entry], b[entry], out[entry]))

    return one


def _each(
    problem: Problem,
    split: tuple[int, int],
    panel: Callable[[Problem], Product],
    arrays: tuple[Array, Array, Array],
) -> None:
    a, b, out = arrays
    single = problem.alone()
    if problem.op == "matvec":
        for rows in _ranges(problem.m, split[0]):
            check_map(a[rows])
            panel(replace(single, m=rows.stop - rows.start))(a[rows], b, out[rows])
        return
    for columns in _ranges(problem.n, split[1]):
        width = columns.stop - columns.start
        for rows in _ranges(problem.m, split[0]):
            product = panel(replace(single, m=rows.stop - rows.start, n=width))
            check_map(a[rows])
            check_map(b[:, columns])
            product(a[rows], b[:, columns], out[rows, columns])


def _ranges(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
