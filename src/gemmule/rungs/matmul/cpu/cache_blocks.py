"""Cache blocks: a block of B stays in the second-level cache while all rows of A pass over it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.intrinsics import load, multiply_add, store
from gemmule.backends.cpu.jit import Kernel, kernel, unavailable
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Params
from gemmule.rungs import _cpu


@functools.cache
def block_kernel(a: str, b: str, c: str, working: str) -> Kernel:
    """Return the kernel for one signature.

    `sums` has room for m rows of `width` numbers of the working dtype: the strip of C in work.
    Four rows of B are added at a time, so that a sum moves once for four products.
    """
    load_a, load_b, store_c = load(a, working), load(b, working), store(c, working)
    load_sum, store_sum = load(working, working), store(working, working)
    zero = np.dtype(working).type(0)
    item, number = ITEMSIZE[b], ITEMSIZE[working]

    @kernel
    def add_rows(
        A: int, A_col: int, B: int, B_row: int, sums: int, size: int, first: int, last: int
    ) -> None:
        fours = first + (last - first) // 4 * 4
        for p in range(first, fours, 4):
            r0 = B + p * B_row
            r1, r2, r3 = r0 + B_row, r0 + 2 * B_row, r0 + 3 * B_row
            v0, v1 = load_a(A + p * A_col, 0), load_a(A + (p + 1) * A_col, 0)
            v2, v3 = load_a(A + (p + 2) * A_col, 0), load_a(A + (p + 3) * A_col, 0)
            for j in range(size):
                total = multiply_add(load_sum(sums, j), v0, load_b(r0, j))
                total = multiply_add(total, v1, load_b(r1, j))
                total = multiply_add(total, v2, load_b(r2, j))
                store_sum(sums, j, multiply_add(total, v3, load_b(r3, j)))
        for p in range(fours, last):
            v = load_a(A + p * A_col, 0)
            for j in range(size):
                store_sum(sums, j, multiply_add(load_sum(sums, j), v, load_b(B + p * B_row, j)))

    @kernel
    def blocked(
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
        depth: int,
        width: int,
    ) -> None:
        for j in range(0, n, width):
            size = min(width, n - j)
            for i in range(m * width):
                store_sum(sums, i, zero)
            for p in range(0, k, depth):
                last = min(k, p + depth)
                for i in range(m):
                    row = sums + i * width * number
                    add_rows(A + i * A_row, A_col, B + j * item, B_row, row, size, p, last)
            for i in range(m):
                for jj in range(size):
                    store_c(C + i * C_row, j + jj, load_sum(sums, i * width + jj))

    return blocked


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, B, C)``."""
    working = _cpu.problem_working_dtype(problem)
    blocked = block_kernel(problem.a, problem.b, problem.out, working)
    m, n, k = problem.m, problem.n, problem.k
    width: int = min(params["width"], max(n, 1))

    def run(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> None:
        sums = np.empty(m * width, working)
        places = *_cpu.placed(A), *_cpu.placed(B)[:2], *_cpu.placed(C)[:2]
        blocked(*places, _cpu.address(sums), m, n, k, params["depth"], width)

    return run


RUNG = CpuRung(
    title="Cache blocks",
    idea="A block of B is used by every row of A before it leaves the cache.",
    source="textbook (loop tiling)",
    after="loop_order",
    params={"depth": (256, 64, 128), "width": (512, 256, 1024)},
    bind=bind,
    available=unavailable,
    **_cpu.OF_MATRICES | {"layouts_b": ("row",)},
)
