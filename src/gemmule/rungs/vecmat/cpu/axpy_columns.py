"""One column after another is added to y: unit-stride reads, but y moves once per column."""

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
def axpy_kernel(a: str, x: str, y: str, working: str) -> Kernel:
    """Return ``axpy(A, step, x, sums, y, m, n)``; `sums` holds m numbers of the working dtype."""
    load_a, load_x, store_y = load(a, working), load(x, working), store(y, working)
    load_sum, store_sum = load(working, working), store(working, working)
    zero = np.dtype(working).type(0)

    @kernel
    def axpy(A: int, step: int, x: int, sums: int, y: int, m: int, n: int) -> None:
        for i in range(m):
            store_sum(sums, i, zero)
        for j in range(n):
            v = load_x(x, j)
            for i in range(m):
                store_sum(sums, i, multiply_add(load_sum(sums, i), load_a(A + j * step, i), v))
        for i in range(m):
            store_y(y, i, load_sum(sums, i))

    return axpy


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``."""
    working = _cpu.problem_working_dtype(problem)
    axpy = axpy_kernel(problem.a, problem.b, problem.out, working)
    m, n = problem.m, problem.n

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        sums = np.empty(m, working)
        vectors = (_cpu.address(one) for one in (x, sums, y))
        axpy(_cpu.address(A), A.strides[1], *vectors, m, n)

    return run


RUNG = CpuRung(
    title="Columns, one by one",
    idea="y is a sum of columns of A scaled by x: each column is read along its memory.",
    source="textbook (axpy form of gemv)",
    layouts=("col",),
    after="scalar_loop",
    bind=bind,
    available=unavailable,
    **_cpu.OF_VECTORS,
)
