"""Four rows at a time: x is loaded once for four products, and four streams keep memory busy.

One stream waits for the memory most of the time. The loop shows it: sixteen multiply-adds, twelve
of them straight from memory, beside four loads of x. Halves pay one conversion for each vector of
weights.
"""

from __future__ import annotations

import functools

import numpy as np

from gemmule.backends.cpu.intrinsics import load, multiply_add, store
from gemmule.backends.cpu.jit import Kernel, kernel, unavailable
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, by_plan, in_rows


@functools.cache
def rows_kernel(a: str, x: str, y: str, working: str) -> Kernel:
    """Return the micro-kernel of `_cpu_rows` along the rows.

    Dtypes: of the matrix, the vector, the result and the running sums. LLVM makes vector code of
    the loops over j.
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


def rows_of(problem: Problem, out: str | None = None) -> Kernel:
    """Return the rows kernel of a problem, whose results have its dtype or another."""
    working = _cpu.problem_working_dtype(problem)
    return rows_kernel(problem.a, problem.b, out or problem.out, working)


def plan(problem: Problem, params: Params) -> Build:
    """Return the product of all rows on the calling thread."""
    return in_rows(problem, rows_of(problem))


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect what one core reads."""
    rows_s = problem.batch * problem.m * _cpu.ROW_FMAS / machine.rates.fma
    moving = _cpu.streaming_s(problem, machine, 1.0, alone=True)
    return Suggestion({}, machine.rates.call + rows_s + moving)


RUNG = CpuRung(
    title="Four rows",
    idea="Four rows share each load of x, and four read streams hide the memory's latency.",
    source="our measurement: one row at a time leaves half of the DRAM bandwidth unused",
    after="scalar_loop",
    batched=True,
    suggest=suggest,
    available=unavailable,
    rows_apart=True,
    **by_plan(plan),
    **_cpu.OF_VECTORS,
)
