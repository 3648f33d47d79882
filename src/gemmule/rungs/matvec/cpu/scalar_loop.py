"""The definition: one multiplication after another, whatever the strides.

One kernel serves every pair of strides, so the compiler has to compute addresses and gather; one
row at a time keeps one stream of memory in flight. Across the rows (vecmat) it still walks along
the sum, element by element.
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
from gemmule.rungs._cpu import OF_VECTORS, address, working_dtype


@functools.cache
def scalar_kernel(a: str, x: str, y: str) -> Kernel:
    """Return the kernel for one signature; steps are in bytes and of any sign."""
    working = working_dtype(a, x, y)
    load_a, load_x, store_y = load(a, working), load(x, working), store(y, working)
    zero = np.dtype(working).type(0)

    @kernel
    def scalar(A: int, row_step: int, col_step: int, x: int, y: int, m: int, n: int) -> None:
        for i in range(m):
            total = zero
            for j in range(n):
                a = load_a(A + i * row_step + j * col_step, 0)
                total = multiply_add(total, a, load_x(x, j))
            store_y(y, i, total)

    return scalar


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``."""
    scalar = scalar_kernel(problem.a, problem.b, problem.out)
    m, n = problem.m, problem.n

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        scalar(address(A), *A.strides, address(x), address(y), m, n)

    return run


RUNG = CpuRung(
    title="Scalar loop",
    idea="Two nested loops over rows and columns, as the formula says.",
    source="textbook",
    layouts=("row", "col", "strided"),
    bind=bind,
    available=unavailable,
    **OF_VECTORS,
)
