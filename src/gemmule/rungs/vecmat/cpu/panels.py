"""Column panels: a slice of y stays in the first-level cache while eight columns at a time pass.

y is loaded and stored once for eight multiply-adds. The slice, in the working dtype, is as long as
that cache allows, because short runs leave the memory's prefetchers cold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import enter, load, multiply_add, store
from gemmule.backends.cpu.jit import Kernel, kernel, unavailable
from gemmule.backends.cpu.pool import in_pool
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu

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
def panels_kernel(a: str, x: str, y: str, working: str) -> Kernel:
    """Return ``panels(A, step, x, y, n, first, last, width, item)``: y[first:last] = (A x)[...].

    item: bytes of one element of A. The sums of a panel lie on the kernel's own heap.
    """
    add_columns = add_columns_kernel(a, x, working)
    load_sum, store_sum = load(working, working), store(working, working)
    store_y = store(y, working)
    zero = np.dtype(working).type(0)
    number = np.dtype(working).type

    @kernel
    def panels(
        A: int, step: int, x: int, y: int, n: int, first: int, last: int, width: int, item: int
    ) -> None:
        panel = np.empty(width, number)
        sums = panel.ctypes.data
        for begin in range(first, last, width):
            size = min(width, last - begin)
            for i in range(size):
                store_sum(sums, i, zero)
            add_columns(A + begin * item, step, x, sums, size, 0, n)
            for i in range(size):
                store_y(y, begin + i, load_sum(sums, i))
        panel[0] = zero  # Numba frees it behind the place that names it last

    return panels


def panels_entry(panels: Kernel) -> int:
    """Return the address by which `batch_panels` and others call a panels kernel."""
    return panels.entry(*[int] * 9)


@kernel
def batch_panels(
    panels: int,
    A: int,
    A_batch: int,
    step: int,
    x: int,
    x_batch: int,
    y: int,
    y_batch: int,
    m: int,
    n: int,
    first: int,
    last: int,
    width: int,
    item: int,
) -> None:
    """Call a panels kernel for elements ``first:last`` of all batch entries laid end to end.

    panels: its `panels_entry`; the batch steps are in bytes.
    """
    at = first
    while at < last:
        entry = at // m
        begin = at - entry * m
        end = min(m, begin + last - at)
        A_at, x_at, y_at = A + entry * A_batch, x + entry * x_batch, y + entry * y_batch
        enter(panels, (A_at, step, x_at, y_at, n, begin, end, width, item))
        at += end - begin


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``."""
    working = _cpu.problem_working_dtype(problem)
    panels = panels_entry(panels_kernel(problem.a, problem.b, problem.out, working))
    m, n, total = problem.m, problem.n, problem.batch * problem.m
    width: int = min(params["width"], max(m, 1))

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        batch_panels(
            panels,
            _cpu.address(A),
            _cpu.batch_step(A, 2),
            A.strides[-1],
            _cpu.address(x),
            _cpu.batch_step(x, 1),
            _cpu.address(y),
            _cpu.batch_step(y, 1),
            m,
            n,
            0,
            total,
            width,
            A.itemsize,
        )

    return run


@kernel
def _share(
    part: int, panels: int, A: int, step: int, x: int, y: int, m: int, n: int, width: int, item: int
) -> None:
    """Call a panels kernel for all of y."""
    enter(panels, (A, step, x, y, n, 0, m, width, item))


_whole = in_pool(_share, 9)


def job(problem: Problem, params: Params, A: np.ndarray[Any, Any], x: Any) -> Job:
    """Return the product of one vector as what a builtin function is bound to."""
    working, m = _cpu.problem_working_dtype(problem), problem.m
    panels = panels_entry(panels_kernel(problem.a, problem.b, problem.out, working))
    width = min(params["width"], m)
    words = (panels, 0, A.strides[-1], 0, 0, m, problem.n, width, A.itemsize)
    return _whole.job(1, words, (1, 3, 4))


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
    op="matvec",
    signatures=_cpu.SIGNATURES,
    layouts=("col",),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="axpy_columns",
    params={"width": WIDTHS},
    batched=True,
    suggest=suggest,
    bind=bind,
    job=job,
    available=unavailable,
)
