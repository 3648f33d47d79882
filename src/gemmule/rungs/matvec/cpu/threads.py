"""Four rows at a time on every core.

One core fills about two thirds of the memory's pipe on the machine of the table below; two fill it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.jit import Kernel, kernel, prange, thread_count, unavailable
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matvec.cpu.four_rows import batch_kernel


def parallel_kernel(a: str, x: str, y: str, working: str) -> Kernel:
    """Return `in_shares` of the batch kernel of these dtypes."""
    return in_shares(batch_kernel(a, x, y, working))


@functools.cache
def in_shares(batch_rows: Kernel) -> Kernel:
    """Return a batch kernel spread over `parts` equal shares of the rows."""

    @kernel(parallel=True)
    def parallel_rows(
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
        for part in prange(parts):
            first, last = part * total // parts, (part + 1) * total // parts
            batch_rows(A, A_batch, step, x, x_batch, y, y_batch, m, n, first, last)

    return parallel_rows


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``; the serial form runs where only one thread may."""
    names = (problem.a, problem.b, problem.out, _cpu.problem_working_dtype(problem))
    serial, parallel = batch_kernel(*names), parallel_kernel(*names)
    return bind_rows(problem, serial, parallel, params["shares_per_thread"])


def bind_rows(
    problem: Problem, serial: Kernel, parallel: Kernel, shares: int
) -> Callable[..., None]:
    """Return ``run(A, x, y)`` by the two forms of a batch kernel, `shares` a thread."""
    m, n, total = problem.m, problem.n, problem.batch * problem.m

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        operands = (
            _cpu.address(A),
            _cpu.batch_step(A, 2),
            A.strides[-2],
            _cpu.address(x),
            _cpu.batch_step(x, 1),
            _cpu.address(y),
            _cpu.batch_step(y, 1),
        )
        threads = thread_count()
        if threads == 1:
            serial(*operands, m, n, 0, total)
        else:
            parallel(*operands, m, n, total, threads * shares)

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect nearly the read ceiling, once there are rows enough for every thread."""
    if problem.batch * problem.m < 8 * machine.units:
        return None
    rows_s = problem.batch * problem.m * _cpu.ROW_S / machine.units
    moving = _cpu.streaming_s(problem, machine, 0.95, 3.3)  # EPYC Zen 5, 2 cores, 2026-11
    return Suggestion({}, _cpu.PARALLEL_CALL_S + rows_s + moving)


RUNG = CpuRung(
    title="Four rows, threads",
    idea="Each thread takes a share of the rows; together they fill the memory's pipe.",
    source="textbook",
    op="matvec",
    signatures=_cpu.SIGNATURES,
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="four_rows",
    params={"shares_per_thread": (1, 2, 4, 8)},
    batched=True,
    suggest=suggest,
    bind=bind,
    available=unavailable,
)
