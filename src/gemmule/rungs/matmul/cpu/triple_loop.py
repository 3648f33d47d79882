"""Three nested loops, as the formula says: C[i, j] is the dot product of a row and a column.

The column of B is read across its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.intrinsics import load, multiply_add, store
from gemmule.backends.cpu.jit import Kernel, kernel, unavailable
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Params
from gemmule.rungs import _cpu


@functools.cache
def triple_kernel(a: str, b: str, c: str, working: str) -> Kernel:
    """Return the kernel for one signature; steps are in bytes and of any sign."""
    load_a, load_b, store_c = load(a, working), load(b, working), store(c, working)
    zero = np.dtype(working).type(0)

    @kernel
    def triple(
        A: int,
        A_row: int,
        A_col: int,
        B: int,
        B_row: int,
        B_col: int,
        C: int,
        C_row: int,
        m: int,
        n: int,
        k: int,
    ) -> None:
        for i in range(m):
            for j in range(n):
                total = zero
                for p in range(k):
                    left = load_a(A + i * A_row + p * A_col, 0)
                    right = load_b(B + p * B_row + j * B_col, 0)
                    total = multiply_add(total, left, right)
                store_c(C + i * C_row, j, total)

    return triple


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, B, C)``."""
    working = _cpu.problem_working_dtype(problem)
    triple = triple_kernel(problem.a, problem.b, problem.out, working)
    m, n, k = problem.m, problem.n, problem.k

    def run(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> None:
        triple(*_cpu.placed(A), *_cpu.placed(B), *_cpu.placed(C)[:2], m, n, k)

    return run


RUNG = CpuRung(
    title="Triple loop",
    idea="One dot product after another; a column of B is read across its rows.",
    source="textbook",
    bind=bind,
    available=unavailable,
    **_cpu.OF_MATRICES,
)
