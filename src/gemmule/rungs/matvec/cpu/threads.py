"""Four rows at a time on every core that comes: small shares of the rows, claimed in turn.

One core fills about two thirds of the memory's pipe on the machine of the table below; two fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.jit import Kernel, kernel, unavailable
from gemmule.backends.cpu.pool import SHARES_PER_THREAD, in_pool, share_count
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matvec.cpu.four_rows import batch_rows, rows_entry, rows_kernel


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
    parts: int,
) -> None:
    """Call `batch_rows` for one of `parts` equal shares of the rows."""
    first, last = part * total // parts, (part + 1) * total // parts
    batch_rows(rows, A, A_batch, step, x, x_batch, y, y_batch, m, n, first, last)


shared_rows = in_pool(_share, 12)


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``."""
    names = (problem.a, problem.b, problem.out, _cpu.problem_working_dtype(problem))
    return bind_rows(problem, rows_kernel(*names), params["shares_per_thread"])


def bind_rows(problem: Problem, kernel: Kernel, per_thread: int) -> Callable[..., None]:
    """Return ``run(A, x, y)`` by a rows kernel in shares, at most `per_thread` a thread."""
    rows = rows_entry(kernel)
    m, n, total = problem.m, problem.n, problem.batch * problem.m
    nbytes = problem.compulsory_bytes

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        parts = share_count(nbytes, total, per_thread)
        shared_rows(
            parts,
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
            total,
            parts,
        )

    return run


def job(problem: Problem, params: Params, A: np.ndarray[Any, Any], x: Any) -> Job:
    """Return the product of one vector as what a builtin function is bound to."""
    names = (problem.a, problem.b, problem.out, _cpu.problem_working_dtype(problem))
    return rows_job(problem, rows_kernel(*names), params["shares_per_thread"], A)


def rows_job(problem: Problem, kernel: Kernel, per_thread: int, A: np.ndarray[Any, Any]) -> Job:
    """Return `bind_rows` of one vector as what a builtin function is bound to."""
    m, rows = problem.m, rows_entry(kernel)
    parts = share_count(problem.compulsory_bytes, m, per_thread)
    words = (rows, 0, 0, A.strides[-2], 0, 0, 0, 0, m, problem.n, m, parts)
    return shared_rows.job(parts, words, (1, 4, 6))


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect nearly the read ceiling, once there are rows enough for every thread."""
    if problem.batch * problem.m < 8 * machine.units:
        return None
    rows_s = problem.batch * problem.m * _cpu.ROW_FMAS / (machine.rates.fma * machine.units)
    moving = _cpu.streaming_s(problem, machine, 0.95)
    return Suggestion({}, _cpu.spread_s(machine, problem.compulsory_bytes) + rows_s + moving)


RUNG = CpuRung(
    title="Four rows, threads",
    idea="Each thread claims one small share of the rows after another; together they fill the "
    "memory's pipe, and none waits for a thread that the system does not run.",
    source="textbook",
    op="matvec",
    signatures=_cpu.SIGNATURES,
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="four_rows",
    params={"shares_per_thread": SHARES_PER_THREAD},
    batched=True,
    suggest=suggest,
    bind=bind,
    job=job,
    available=unavailable,
    rows_apart=True,
)
