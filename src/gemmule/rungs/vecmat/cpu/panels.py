"""Column panels: a slice of y stays in the first-level cache while eight columns at a time pass.

y is loaded and stored once for eight multiply-adds. The slice, in the working dtype, is as long as
that cache allows, because short runs leave the memory's prefetchers cold.
"""

from __future__ import annotations

import functools

import numpy as np

from gemmule.backends.cpu.intrinsics import load, multiply_add, store
from gemmule.backends.cpu.jit import Kernel, kernel, unavailable
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, by_plan, in_rows

WIDTHS = (4096, 2048, 1024, 512)  # elements of y in a panel; 4096 float32 are 16 KiB


@functools.cache
def add_columns_kernel(a: str, x: str, working: str) -> Kernel:
    """Return ``add_columns(A, step, x, sums, width, first, last)``: sums += A[:, first:last] x.

    A: address of the panel's first element in column 0; step: bytes between columns; sums: address
    of `width` numbers of the working dtype.
    """
    load_a, load_x = load(a, working), load(x, working)
    load_sum, store_sum = load(working, working), store(working, working)

    @kernel
    def add_columns(
        A: int, step: int, x: int, sums: int, width: int, first: int, last: int
    ) -> None:
        eights = first + (last - first) // 8 * 8
        for j in range(first, eights, 8):
            c0 = A + j * step
            c1, c2, c3 = c0 + step, c0 + 2 * step, c0 + 3 * step
            c4, c5, c6, c7 = c0 + 4 * step, c0 + 5 * step, c0 + 6 * step, c0 + 7 * step
            v0, v1, v2, v3 = load_x(x, j), load_x(x, j + 1), load_x(x, j + 2), load_x(x, j + 3)
            v4, v5, v6, v7 = load_x(x, j + 4), load_x(x, j + 5), load_x(x, j + 6), load_x(x, j + 7)
            for i in range(width):
                total = load_sum(sums, i)
                total = multiply_add(total, load_a(c0, i), v0)
                total = multiply_add(total, load_a(c1, i), v1)
                total = multiply_add(total, load_a(c2, i), v2)
                total = multiply_add(total, load_a(c3, i), v3)
                total = multiply_add(total, load_a(c4, i), v4)
                total = multiply_add(total, load_a(c5, i), v5)
                total = multiply_add(total, load_a(c6, i), v6)
                total = multiply_add(total, load_a(c7, i), v7)
                store_sum(sums, i, total)
        for j in range(eights, last):
            v = load_x(x, j)
            for i in range(width):
                store_sum(sums, i, multiply_add(load_sum(sums, i), load_a(A + j * step, i), v))

    return add_columns


@functools.cache
def panels_kernel(a: str, x: str, y: str, working: str, width: int) -> Kernel:
    """Return the micro-kernel of `_cpu_rows` across the rows, in panels of `width` results.

    The sums of a panel lie on the kernel's own heap.
    """
    add_columns = add_columns_kernel(a, x, working)
    load_sum, store_sum = load(working, working), store(working, working)
    store_y = store(y, working)
    zero = np.dtype(working).type(0)
    number, item = np.dtype(working).type, ITEMSIZE[a]

    @kernel
    def panels(A: int, step: int, x: int, y: int, n: int, first: int, last: int) -> None:
        panel = np.empty(min(width, last - first + 1), number)
        sums = panel.ctypes.data
        for begin in range(first, last, width):
            size = min(width, last - begin)
            for i in range(size):
                store_sum(sums, i, zero)
            add_columns(A + begin * item, step, x, sums, size, 0, n)
            for i in range(size):
                store_y(y, begin + i, load_sum(sums, i))

    return panels


def panels_of(problem: Problem, params: Params, out: str | None = None) -> Kernel:
    """Return the panels kernel of a problem, whose results have its dtype or another."""
    working = _cpu.problem_working_dtype(problem)
    return panels_kernel(problem.a, problem.b, out or problem.out, working, params["width"])


def plan(problem: Problem, params: Params) -> Build:
    """Return the product of all panels on the calling thread."""
    return in_rows(problem, panels_of(problem, params), across=True)


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect what one core reads."""
    moving = _cpu.streaming_s(problem, machine, unasked_columns(problem), alone=True)
    return Suggestion({}, machine.rates.call + columns_s(problem, machine) + moving)


def unasked_columns(problem: Problem) -> float:
    """Return the share of a rate at which whole columns come, up to a panel of each."""
    return _cpu.unasked(min(problem.m, WIDTHS[0]) * ITEMSIZE[problem.a])


def columns_s(problem: Problem, machine: Machine) -> float:
    """Return the loop overhead of all columns of all panels, on one core."""
    columns = problem.batch * problem.n * -(-problem.m // WIDTHS[0])
    return columns * _cpu.COLUMN_FMAS / machine.rates.fma


RUNG = CpuRung(
    title="Column panels",
    idea="A slice of y stays in the cache, in the working dtype, while eight columns pass at once.",
    source="cache blocking of the axpy form; eight read streams by our measurement",
    layouts=("col",),
    after="axpy_columns",
    params={"width": WIDTHS},
    batched=True,
    suggest=suggest,
    available=unavailable,
    **by_plan(plan),
    **_cpu.OF_VECTORS,
)
