"""Few long rows: the threads share each row and their sums are added at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.intrinsics import enter
from gemmule.backends.cpu.jit import kernel, unavailable
from gemmule.backends.cpu.pool import SHARES_PER_THREAD, in_pool, share_count
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.matvec.cpu.four_rows import batch_rows, rows_entry, rows_kernel

SHORTEST = 256  # elements of a row in a share


@kernel
def _share(
    part: int,
    rows: int,
    A: int,
    step: int,
    x: int,
    partials: int,
    m: int,
    n: int,
    parts: int,
    item: int,
    x_item: int,
    number: int,
) -> None:
    """Call a rows kernel for one of `parts` shares of all rows; partials: (parts, m), working."""
    begin, end = part * n // parts, (part + 1) * n // parts
    sums = partials + part * m * number
    enter(rows, (A + begin * item, step, x + begin * x_item, sums, end - begin, 0, m))


_split = in_pool(_share, 11)


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``; rows too short to be shared are read whole."""
    working = _cpu.problem_working_dtype(problem)
    into_sums = rows_entry(rows_kernel(problem.a, problem.b, working, working))
    rows = rows_entry(rows_kernel(problem.a, problem.b, problem.out, working))
    sizes = ITEMSIZE[problem.a], ITEMSIZE[problem.b], ITEMSIZE[working]
    m, n, nbytes = problem.m, problem.n, problem.compulsory_bytes
    per_thread: int = params["shares_per_thread"]

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        operands = (_cpu.address(A), A.strides[0], _cpu.address(x))
        parts = share_count(nbytes, n // SHORTEST, per_thread)
        if parts == 1:
            A_at, step, x_at = operands
            batch_rows(rows, A_at, 0, step, x_at, 0, _cpu.address(y), 0, m, n, 0, m)
            return
        partials = np.empty((parts, m), working)
        _split(parts, into_sums, *operands, _cpu.address(partials), m, n, parts, *sizes)
        _cpu.sum_partials(partials, y)

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect nearly the read ceiling; for rows too few to go round and long enough to share."""
    if problem.batch > 1 or problem.m >= 8 * machine.units or problem.n < 1024 * machine.units:
        return None
    calls = _cpu.spread_s(machine, problem.compulsory_bytes) + 3 * machine.rates.blas_call
    return Suggestion({}, calls + _cpu.streaming_s(problem, machine, 0.90))


RUNG = CpuRung(
    title="Split rows",
    idea="Each thread takes a stretch of every row; one small sum joins the stretches.",
    source="split-K, textbook",
    op="matvec",
    signatures=_cpu.SIGNATURES,
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="threads",
    branch="few long rows",
    params={"shares_per_thread": SHARES_PER_THREAD},
    suggest=suggest,
    bind=bind,
    available=unavailable,
)
