"""Another order of the loops, i-k-j: the inner loop reads B and writes C along their rows.

So the compiler can use vectors.
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
def row_order_kernel(a: str, b: str, c: str, working: str) -> Kernel:
    """Return the kernel for one signature; `sums` has room for n numbers of the working dtype."""
    load_a, load_b, store_c = load(a, working), load(b, working), store(c, working)
    load_sum, store_sum = load(working, working), store(working, working)
    zero = np.dtype(working).type(0)

    @kernel
    def row_order(
        A: int,
        A_row: int,
        A_col: int,
        B: int,
        B_row: int,
        C: int,
        C_row: int,
        sums: int,
        m: int,
        n: int,
        k: int,
    ) -> None:
        for i in range(m):
            for j in range(n):
                store_sum(sums, j, zero)
            for p in range(k):
                left = load_a(A + i * A_row + p * A_col, 0)
                row = B + p * B_row
                for j in range(n):
                    store_sum(sums, j, multiply_add(load_sum(sums, j), left, load_b(row, j)))
            for j in range(n):
                store_c(C + i * C_row, j, load_sum(sums, j))

    return row_order


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, B, C)``."""
    working = _cpu.problem_working_dtype(problem)
    row_order = row_order_kernel(problem.a, problem.b, problem.out, working)
    m, n, k = problem.m, problem.n, problem.k

    def run(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> None:
        sums = np.empty(n, working)
        places = *_cpu.placed(A), *_cpu.placed(B)[:2], *_cpu.placed(C)[:2]
        row_order(*places, _cpu.address(sums), m, n, k)

    return run


RUNG = CpuRung(
    title="Loop order",
    idea="With the loops in the order i, k, j, all of memory is read along its rows.",
    source="textbook",
    after="triple_loop",
    bind=bind,
    available=unavailable,
    **_cpu.OF_MATRICES | {"layouts_b": ("row",)},
)
