"""Column panels on every core: each thread owns a share of y, so nothing is shared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.jit import Kernel, kernel, prange, thread_count, unavailable
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.vecmat.cpu.panels import WIDTHS, batch_kernel, columns_s

SHARE_MULTIPLE = 64  # a share of y begins on its own cache line


@functools.cache
def parallel_kernel(a: str, x: str, y: str, working: str) -> Kernel:
    """Return `batch_kernel` spread over `parts` shares of y, each a multiple of 64 elements."""
    batch_panels = batch_kernel(a, x, y, working)

    @kernel(parallel=True)
    def parallel_panels(
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
        share: int,
        parts: int,
        width: int,
        item: int,
    ) -> None:
        for part in prange(parts):
            first, last = part * share, min(total, (part + 1) * share)
            batch_panels(A, A_batch, step, x, x_batch, y, y_batch, m, n, first, last, width, item)

    return parallel_panels


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``; the serial form runs where only one thread may."""
    names = (problem.a, problem.b, problem.out, _cpu.problem_working_dtype(problem))
    serial, parallel = batch_kernel(*names), parallel_kernel(*names)
    m, n, total = problem.m, problem.n, problem.batch * problem.m
    width: int = min(params["width"], max(m, 1))

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        operands = (
            _cpu.address(A),
            _cpu.batch_step(A, 2),
            A.strides[-1],
            _cpu.address(x),
            _cpu.batch_step(x, 1),
            _cpu.address(y),
            _cpu.batch_step(y, 1),
            m,
            n,
        )
        threads = thread_count()
        if threads == 1:
            serial(*operands, 0, total, width, A.itemsize)
            return
        share = -(-total // (threads * SHARE_MULTIPLE)) * SHARE_MULTIPLE
        parts = -(-total // max(share, 1))
        parallel(*operands, total, share, parts, width, A.itemsize)

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect nearly the read ceiling, once y is long enough for every thread's panel."""
    if problem.batch * problem.m < 2 * SHARE_MULTIPLE * machine.units:
        return None
    batches = min(problem.batch, machine.units)  # every thread passes all columns of one entry
    moving = _cpu.streaming_s(problem, machine, 0.95, 3.3)  # EPYC Zen 5, 2 cores, 2026-11
    return Suggestion({}, _cpu.PARALLEL_CALL_S + columns_s(problem) / batches + moving)


RUNG = CpuRung(
    title="Column panels, threads",
    idea="Each thread owns a share of y and reads only that part of every column.",
    source="textbook",
    op="matvec",
    signatures=_cpu.SIGNATURES,
    layouts=("col",),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="panels",
    params={"width": WIDTHS},
    batched=True,
    suggest=suggest,
    bind=bind,
    available=unavailable,
)
