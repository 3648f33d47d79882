"""Products of a matrix with one vector, all derived from one micro-kernel.

**The contract.** ``rows(A, step, x, y, n, first, last)`` sets ``y[first:last]`` to those results of
``A x``. A, x, y: addresses of the first element; n: terms of a result. x and y are contiguous, A
has a unit stride along the rows or across them, and `step` bytes between what lies along it.
All else is derived here: threads, batches, and sums that several threads share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import Pooled, in_pool, share_count
from gemmule.backends.cpu.steps import A, Place, Step, Steps, Words, X, Y, buffer, per_team
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Params
from gemmule.rungs._cpu import address, problem_working_dtype

Array = np.ndarray[Any, Any]
Strides = tuple[int, ...]  # in bytes
Build = Callable[[Strides, Strides, Strides], Steps]  # of A, of x or B, of the result
Plan = Callable[[Problem, Params], Build]

FEWEST = 64  # results that a share adds up at least


def bind_plan(plan: Plan) -> Callable[[Problem, Params], Callable[..., None]]:
    """Return the `bind` of a rung whose products `plan` describes."""

    def bind(problem: Problem, params: Params) -> Callable[..., None]:
        build = per_team(plan(problem, params))

        def run(A: Array, x: Array, y: Array) -> None:
            build(A.strides, x.strides, y.strides)(address(A), address(x), address(y))

        return run

    return bind


def job_of_plan(plan: Plan) -> Callable[[Problem, Params, Array, Any], Job]:
    """Return the `job` of such a rung: what a builtin function is bound to."""

    def job(problem: Problem, params: Params, A: Array, B: Any) -> Job:
        item = ITEMSIZE[problem.out]
        out = (item,) if problem.op == "matvec" else (item * problem.n, item)
        return plan(problem, params)(A.strides, B.strides, out).job()

    return job


def by_plan(plan: Plan) -> dict[str, Any]:
    """Return how a rung runs whose products `plan` describes."""
    return {"bind": bind_plan(plan), "job": job_of_plan(plan)}


@kernel
def _share(
    part: int,
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
    total: int,
    unit: int,
    parts: int,
) -> None:
    """Compute a share of the results of all batch entries, laid end to end; unit: of a share."""
    units = (total + unit - 1) // unit
    at, last = part * units // parts * unit, min((part + 1) * units // parts * unit, total)
    while at < last:
        entry = at // m
        begin = at - entry * m
        end = min(m, begin + last - at)
        A_at, x_at, y_at = A + entry * A_batch, x + entry * x_batch, y + entry * y_batch
        enter(rows, (A_at, step, x_at, y_at, n, begin, end))
        at += end - begin


_shares = in_pool(_share, 13)


def rows_entry(rows: Kernel) -> int:
    """Return the address by which shares call a micro-kernel."""
    return rows.entry(*[int] * 7)


def in_rows(
    problem: Problem, rows: Kernel, per_thread: int = 0, *, unit: int = 1, across: bool = False
) -> Build:
    """Return the product whose shares are `unit` results or more, each summed by one thread.

    per_thread: shares of a thread at most; 0: the calling thread computes all. across: A's unit
    stride is across the rows.
    """
    m, n, total = problem.m, problem.n, problem.batch * problem.m

    def build(of_A: Strides, of_x: Strides, of_y: Strides) -> Steps:
        parts = 1
        if per_thread > 0:
            parts = share_count(problem.compulsory_bytes, total // unit, per_thread)
        batch = (strides[0] if len(strides) > k else 0 for strides, k in ((of_A, 2), (of_x, 1)))
        A_batch, x_batch = batch
        y_batch, step = of_y[0] if len(of_y) > 1 else 0, of_A[-1 if across else -2]
        places = (rows_entry(rows), A, A_batch, step, X, x_batch, Y, y_batch)
        words = (*places, m, n, total, unit, parts)
        return Steps([Step(_shares.address, parts, alone=per_thread == 0)], words)

    return build


@kernel
def _stretch(
    part: int,
    rows: int,
    A: int,
    step: int,
    x: int,
    sums: int,
    m: int,
    n: int,
    parts: int,
    term: int,
    x_item: int,
    number: int,
) -> None:
    """Sum a stretch of all results' terms; sums: (parts, m); term: bytes between A's terms."""
    begin, end = part * n // parts, (part + 1) * n // parts
    sums_at = sums + part * m * number
    enter(rows, (A + begin * term, step, x + begin * x_item, sums_at, end - begin, 0, m))


_stretches = in_pool(_stretch, 11)


def in_stretches(
    problem: Problem,
    kernels: Callable[[str], Kernel],
    parts_of: Callable[[], int],
    *,
    across: bool = False,
) -> Build:
    """Return the product whose shares sum a part of all results' terms; the parts are added.

    kernels: makes the micro-kernel whose results have a dtype.
    """
    working = problem_working_dtype(problem)
    whole = in_rows(problem, kernels(problem.out), across=across)
    sizes = ITEMSIZE[problem.b], ITEMSIZE[working]

    def build(of_A: Strides, of_x: Strides, of_y: Strides) -> Steps:
        parts = parts_of()
        if parts == 1:
            return whole(of_A, of_x, of_y)
        step, term = (of_A[1], of_A[1]) if across else (of_A[0], ITEMSIZE[problem.a])
        places = (rows_entry(kernels(working)), A, step, X, buffer())
        words = (*places, problem.m, problem.n, parts, term, *sizes)
        return joined(_stretches, parts, words, problem)

    return build


def joined(spread: Pooled, parts: int, words: Words, problem: Problem, more: int = 0) -> Steps:
    """Return the product whose parts' sums begin the buffer, `more` bytes behind them.

    spread: the first step, in shares of `words`; the second adds the parts up.
    """
    working = problem_working_dtype(problem)
    join, told = join_step(working, problem.out, buffer(), problem.m, parts, len(words))
    nbytes = parts * problem.m * ITEMSIZE[working] + more
    steps = Step(spread.address, parts), join
    return Steps(steps, (*words, *told), buffer_bytes=nbytes)


def join_step(
    working: str, out: str, sums: Place, m: int, parts: int, first: int
) -> tuple[Step, Words]:
    """Return the step that sets y to the sum of parts, and its words, of number `first` on."""
    joins = share_count(parts * m * ITEMSIZE[working], m // FEWEST, 1)
    return Step(_join_of(working, out).address, joins, first), (sums, Y, m, parts, joins)


@functools.cache
def _join_of(working: str, y: str) -> Pooled:
    """Return the shares of `join_step`.

    One part after another is added to the first, which is rounded once to y's dtype.
    """
    get, put, put_y = load(working, working), store(working, working), store(y, working)
    size = ITEMSIZE[working]

    @kernel
    def join(number: int, sums: int, y: int, m: int, parts: int, joins: int) -> None:
        first, end = number * m // joins, (number + 1) * m // joins
        for part in range(1, parts):
            other = sums + part * m * size
            for i in range(first, end):
                put(sums, i, get(sums, i) + get(other, i))
        for i in range(first, end):
            put_y(y, i, get(sums, i))

    return in_pool(join, 5)
