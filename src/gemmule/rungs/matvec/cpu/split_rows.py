"""Few long rows: the threads share each row and their sums are added at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.jit import Kernel, kernel, prange, thread_count, unavailable
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matvec.cpu.four_rows import rows_kernel


@functools.cache
def split_kernel(a: str, x: str, working: str) -> Kernel:
    """Return ``split(A, step, x, partials, m, n, parts)``; partials: (parts, m), working dtype."""
    rows = rows_kernel(a, x, working, working)
    item, x_item, number = ITEMSIZE[a], ITEMSIZE[x], ITEMSIZE[working]

    @kernel(parallel=True)
    def split(A: int, step: int, x: int, partials: int, m: int, n: int, parts: int) -> None:
        for part in prange(parts):
            begin, end = part * n // parts, (part + 1) * n // parts
            sums = partials + part * m * number
            rows(A + begin * item, step, x + begin * x_item, sums, end - begin, 0, m)

    return split


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``; the serial form runs where only one thread may."""
    working = _cpu.problem_working_dtype(problem)
    split = split_kernel(problem.a, problem.b, working)
    rows = rows_kernel(problem.a, problem.b, problem.out, working)
    m, n = problem.m, problem.n
    shares: int = params["shares_per_thread"]

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        threads = thread_count()
        operands = (_cpu.address(A), A.strides[0], _cpu.address(x))
        if threads == 1:
            rows(*operands, _cpu.address(y), n, 0, m)
            return
        partials = np.empty((threads * shares, m), working)
        split(*operands, _cpu.address(partials), m, n, threads * shares)
        _cpu.sum_partials(partials, y)

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect nearly the read ceiling; for rows too few to go round and long enough to share."""
    if problem.batch > 1 or problem.m >= 8 * machine.units or problem.n < 1024 * machine.units:
        return None
    calls = _cpu.PARALLEL_CALL_S + 3e-6
    return Suggestion({}, calls + _cpu.streaming_s(problem, machine, 0.90, 3.0))


RUNG = CpuRung(
    title="Split rows",
    idea="Each thread takes a stretch of every row; one small sum joins the stretches.",
    source="split-K, textbook",
    op="matvec",
    signatures=_cpu.SIGNATURES,
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="threads",
    params={"shares_per_thread": (1, 2, 4)},
    suggest=suggest,
    bind=bind,
    available=unavailable,
)
