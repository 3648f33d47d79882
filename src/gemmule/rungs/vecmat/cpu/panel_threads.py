"""Column panels on every core: each thread owns a share of y, so nothing is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.jit import kernel, unavailable
from gemmule.backends.cpu.pool import in_pool, share_count
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.vecmat.cpu.panels import (
    WIDTHS,
    batch_panels,
    columns_s,
    panels_entry,
    panels_kernel,
)

SHARE_MULTIPLE = 64  # a share of y begins on its own cache line
PAIR_BYTES = 128  # lines are fetched in pairs
SHARES_PER_THREAD = 2  # long shares: every column is a stretch of memory of its own


@kernel
def _one_share(
    part: int,
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
    total: int,
    share: int,
    width: int,
    item: int,
) -> None:
    """Call `batch_panels` for one share of y, of `share` elements, a multiple of 64."""
    first, last = part * share, min(total, (part + 1) * share)
    batch_panels(panels, A, A_batch, step, x, x_batch, y, y_batch, m, n, first, last, width, item)


_shared_panels = in_pool(_one_share, 14)


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``."""
    working = _cpu.problem_working_dtype(problem)
    panels = panels_entry(panels_kernel(problem.a, problem.b, problem.out, working))
    m, n, total = problem.m, problem.n, problem.batch * problem.m
    width: int = min(params["width"], max(m, 1))
    nbytes = problem.compulsory_bytes

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        if total == 0:
            return
        parts = share_count(nbytes, total // SHARE_MULTIPLE, SHARES_PER_THREAD)
        share = -(-total // (parts * SHARE_MULTIPLE)) * SHARE_MULTIPLE
        _shared_panels(
            -(-total // share),
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
            total,
            share,
            width,
            A.itemsize,
        )

    return run


def job(problem: Problem, params: Params, A: np.ndarray[Any, Any], x: Any) -> Job:
    """Return the product of one vector as what a builtin function is bound to."""
    working, m = _cpu.problem_working_dtype(problem), problem.m
    panels = panels_entry(panels_kernel(problem.a, problem.b, problem.out, working))
    parts = share_count(problem.compulsory_bytes, m // SHARE_MULTIPLE, SHARES_PER_THREAD)
    share, width = -(-m // (parts * SHARE_MULTIPLE)) * SHARE_MULTIPLE, min(params["width"], m)
    words = (panels, 0, 0, A.strides[-1], 0, 0, 0, 0, m, problem.n, m, share, width, A.itemsize)
    return _shared_panels.job(-(-m // share), words, (1, 4, 6))


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect nearly the read ceiling, once y is long enough for every thread's panel.

    In the cache panels may be narrow, and fewer than threads.
    """
    panels = problem.batch * problem.m // SHARE_MULTIPLE
    cached = problem.compulsory_bytes <= machine.cache_bytes // 2
    if panels < (2 if cached else 2 * machine.units):
        return None
    batches = min(problem.batch, machine.units)  # every thread passes all columns of one entry
    shares = min(panels, SHARES_PER_THREAD * machine.units)
    columns = -(-shares // machine.units) * columns_s(problem, machine) / batches
    # Pieces of 128 bytes of each column take twice as long as whole ones: 80 us, not 41, for 1024
    # columns of halves on one core of an EPYC, 21 where shared columns take 16 on 16 of a Xeon.
    piece = problem.batch * problem.m * ITEMSIZE[problem.a] / shares
    idle = max(1.0, machine.units / panels) * (1 + PAIR_BYTES / piece)
    moving = idle * _cpu.streaming_s(problem, machine, 0.95 * _cpu.unasked(piece))
    return Suggestion({}, _cpu.spread_s(machine, problem.compulsory_bytes) + columns + moving)


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
    job=job,
    available=unavailable,
)
