"""One by one: the experts with tokens in turn, each by the matrix product chosen for its size.

On the host the ends are known, so nothing is left to find out: a group is a slice of A, a matrix
and a slice of the result, and the ladder of matrix products has a rung for each shape. An expert
without tokens is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CpuRung, Params, floats

LANES = 64  # sums beside each other that meet in the end, at most


def _bind(problem: Problem, params: Params) -> Callable[..., None]:
    def run(A: Any, W: Any, ends: Any, C: Any, product: Callable[[Any, Any, Any], None]) -> None:
        """Set the rows of C up to the last end; product(a, w, c) sets c = a w."""
        begin = 0
        for expert in np.flatnonzero(np.diff(ends, prepend=0)):
            rows = slice(begin, int(ends[expert]))
            product(A[rows], W[expert], C[rows])
            begin = rows.stop

    return run


def _arithmetic(problem: Problem) -> Arithmetic:
    working = "float64" if problem.a == "float64" else "float32"
    return Arithmetic(working, chain=lambda p, params: p.k + LANES, product=working)


RUNG = CpuRung(
    title="One by one",
    idea="Each expert's rows are a matrix product of their own, by the rung chosen for its size.",
    source="textbook",
    signatures=tuple(
        s for s in floats("float64", "float32", "float16", "bfloat16") if s[0] == s[1]
    ),
    arithmetic=_arithmetic,
    layouts=("row", "col", "strided"),
    layouts_b=("row", "col", "strided"),
    bind=_bind,
)
