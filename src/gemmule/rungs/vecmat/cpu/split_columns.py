"""A short y: the threads share the columns and their panels are added at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.jit import Kernel, kernel, prange, thread_count, unavailable
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.vecmat.cpu.panels import WIDTHS, columns_s, panels_kernel


@functools.cache
def split_kernel(a: str, x: str, working: str) -> Kernel:
    """Return ``split(A, step, x, partials, m, n, parts, width)``; partials: (parts, m), working."""
    panels = panels_kernel(a, x, working, working)
    item, x_item, number = ITEMSIZE[a], ITEMSIZE[x], ITEMSIZE[working]

    @kernel(parallel=True)
    def split(
        A: int, step: int, x: int, partials: int, m: int, n: int, parts: int, width: int
    ) -> None:
        for part in prange(parts):
            begin, end = part * n // parts, (part + 1) * n // parts
            sums = partials + part * m * number
            panels(A + begin * step, step, x + begin * x_item, sums, end - begin, 0, m, width, item)

    return split


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``; the serial form runs where only one thread may."""
    working = _cpu.problem_working_dtype(problem)
    split = split_kernel(problem.a, problem.b, working)
    panels = panels_kernel(problem.a, problem.b, problem.out, working)
    m, n = problem.m, problem.n
    width: int = min(params["width"], max(m, 1))

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        threads = thread_count()
        operands = (_cpu.address(A), A.strides[1], _cpu.address(x))
        if threads == 1:
            panels(*operands, _cpu.address(y), n, 0, m, width, A.itemsize)
            return
        partials = np.empty((threads, m), working)
        split(*operands, _cpu.address(partials), m, n, threads, width)
        _cpu.sum_partials(partials, y)

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect nearly the read ceiling; for a y too short to share, and columns enough."""
    if problem.batch > 1 or problem.m >= 1024 * machine.units or problem.n < 64 * machine.units:
        return None
    calls = _cpu.PARALLEL_CALL_S + 3e-6 + columns_s(problem) / machine.units
    return Suggestion({}, calls + _cpu.streaming_s(problem, machine, 0.90, 3.0))


RUNG = CpuRung(
    title="Split columns",
    idea="Each thread takes a share of the columns; one small sum joins the threads' results.",
    source="split-K, textbook",
    op="matvec",
    signatures=_cpu.SIGNATURES,
    layouts=("col",),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="panel_threads",
    params={"width": WIDTHS},
    suggest=suggest,
    bind=bind,
    available=unavailable,
)
