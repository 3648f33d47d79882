"""Four rows at a time: x is loaded once for four products, and four streams keep memory busy.

One stream waits for the memory most of the time. The loop shows it: sixteen multiply-adds, twelve
of them straight from memory, beside four loads of x. Halves pay one conversion for each vector of
weights.
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
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu


@functools.cache
def rows_kernel(a: str, x: str, y: str, working: str) -> Kernel:
    """Return ``rows(A, step, x, y, n, first, last)``: y[first:last] = A[first:last] x.

    A, x, y: addresses; step: bytes between rows; n: row length. Dtypes: of the matrix, the vector,
    the result and the running sums. LLVM makes vector code of the loops over j.
    """
    load_a, load_x, store_y = load(a, working), load(x, working), store(y, working)
    zero = np.dtype(working).type(0)

    @kernel
    def rows(A: int, step: int, x: int, y: int, n: int, first: int, last: int) -> None:
        fours = first + (last - first) // 4 * 4
        for i in range(first, fours, 4):
            r0 = A + i * step
            r1, r2, r3 = r0 + step, r0 + 2 * step, r0 + 3 * step
            s0, s1, s2, s3 = zero, zero, zero, zero
            for j in range(n):
                v = load_x(x, j)
                s0 = multiply_add(s0, load_a(r0, j), v)
                s1 = multiply_add(s1, load_a(r1, j), v)
                s2 = multiply_add(s2, load_a(r2, j), v)
                s3 = multiply_add(s3, load_a(r3, j), v)
            store_y(y, i, s0)
            store_y(y, i + 1, s1)
            store_y(y, i + 2, s2)
            store_y(y, i + 3, s3)
        for i in range(fours, last):
            total = zero
            for j in range(n):
                total = multiply_add(total, load_a(A + i * step, j), load_x(x, j))
            store_y(y, i, total)

    return rows


def rows_entry(rows: Kernel) -> int:
    """Return the address by which `batch_rows` and others call a rows kernel."""
    return rows.entry(*[int] * 7)


@kernel
def batch_rows(
    rows: int,
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
) -> None:
    """Call a rows kernel for the rows ``first:last`` of all batch entries laid end to end.

    rows: its `rows_entry`; the batch steps are in bytes.
    """
    at = first
    while at < last:
        entry = at // m
        begin = at - entry * m
        end = min(m, begin + last - at)
        A_at, x_at, y_at = A + entry * A_batch, x + entry * x_batch, y + entry * y_batch
        enter(rows, (A_at, step, x_at, y_at, n, begin, end))
        at += end - begin


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``."""
    working = _cpu.problem_working_dtype(problem)
    rows = rows_entry(rows_kernel(problem.a, problem.b, problem.out, working))
    m, n, total = problem.m, problem.n, problem.batch * problem.m

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        batch_rows(
            rows,
            _cpu.address(A),
            _cpu.batch_step(A, 2),
            A.strides[-2],
            _cpu.address(x),
            _cpu.batch_step(x, 1),
            _cpu.address(y),
            _cpu.batch_step(y, 1),
            m,
            n,
            0,
            total,
        )

    return run


@kernel
def _share(part: int, rows: int, A: int, step: int, x: int, y: int, m: int, n: int) -> None:
    """Call a rows kernel for all rows."""
    enter(rows, (A, step, x, y, n, 0, m))


_whole = in_pool(_share, 7)


def job(problem: Problem, params: Params, A: np.ndarray[Any, Any], x: Any) -> Job:
    """Return the product of one vector as what a builtin function is bound to."""
    working = _cpu.problem_working_dtype(problem)
    rows = rows_entry(rows_kernel(problem.a, problem.b, problem.out, working))
    words = (rows, 0, A.strides[-2], 0, 0, problem.m, problem.n)
    return _whole.job(1, words, (1, 3, 4))


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect what one core reads."""
    rows_s = problem.batch * problem.m * _cpu.ROW_FMAS / machine.rates.fma
    moving = _cpu.streaming_s(problem, machine, 1.0, alone=True)
    return Suggestion({}, machine.rates.call + rows_s + moving)


RUNG = CpuRung(
    title="Four rows",
    idea="Four rows share each load of x, and four read streams hide the memory's latency.",
    source="our measurement: one row at a time leaves half of the DRAM bandwidth unused",
    op="matvec",
    signatures=_cpu.SIGNATURES,
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="scalar_loop",
    batched=True,
    suggest=suggest,
    bind=bind,
    job=job,
    available=unavailable,
    rows_apart=True,
)
