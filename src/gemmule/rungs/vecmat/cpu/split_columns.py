"""A short y: the threads share the columns and their panels are added at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import enter
from gemmule.backends.cpu.jit import kernel, unavailable
from gemmule.backends.cpu.pool import in_pool, share_count
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs.vecmat.cpu._joined import Sums, join_of, joined_job
from gemmule.rungs.vecmat.cpu.panels import (
    WIDTHS,
    batch_panels,
    columns_s,
    panels_entry,
    panels_kernel,
    unasked_columns,
)

SHARES_PER_THREAD = 4
LONGEST = 8192  # results to which every share may have sums of its own
SUMS_SHARE = 16  # a share reads so many times the bytes of its own sums


@kernel
def _share(
    part: int,
    panels: int,
    A: int,
    step: int,
    x: int,
    partials: int,
    m: int,
    n: int,
    parts: int,
    width: int,
    item: int,
    x_item: int,
    number: int,
) -> None:
    """Call a panels kernel for one of `parts` shares of the columns; partials: (parts, m)."""
    begin, end = part * n // parts, (part + 1) * n // parts
    A_at, x_at, sums = A + begin * step, x + begin * x_item, partials + part * m * number
    enter(panels, (A_at, step, x_at, sums, end - begin, 0, m, width, item))


_split = in_pool(_share, 12)


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``; columns too few to be shared are read by the caller."""
    working = _cpu.problem_working_dtype(problem)
    into_sums = panels_entry(panels_kernel(problem.a, problem.b, working, working))
    panels = panels_entry(panels_kernel(problem.a, problem.b, problem.out, working))
    sizes = ITEMSIZE[problem.a], ITEMSIZE[problem.b], ITEMSIZE[working]
    m, n, join = problem.m, problem.n, join_of(working, problem.out)
    width: int = min(params["width"], max(m, 1))

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        operands = (_cpu.address(A), A.strides[1], _cpu.address(x))
        parts = _parts_of(problem)
        if parts == 1:
            A_at, step, x_at = operands
            y_at, item = _cpu.address(y), A.itemsize
            batch_panels(panels, A_at, 0, step, x_at, 0, y_at, 0, m, n, 0, m, width, item)
            return
        sums = Sums(parts, m, working)
        room = np.empty(sums.nbytes, np.uint8)
        place = _cpu.address(room)
        _split(parts, into_sums, *operands, place, m, n, parts, width, *sizes)
        join(sums.joins, place, _cpu.address(y), m, parts, sums.joins)

    return run


def _parts_of(problem: Problem) -> int:
    fewest = SUMS_SHARE * ITEMSIZE[_cpu.problem_working_dtype(problem)] // ITEMSIZE[problem.a]
    return share_count(problem.compulsory_bytes, problem.n // fewest, SHARES_PER_THREAD)


def job(problem: Problem, params: Params, A: np.ndarray[Any, Any], x: Any) -> Job:
    """Return the product of one vector as what a builtin function is bound to."""
    working, m, parts = _cpu.problem_working_dtype(problem), problem.m, _parts_of(problem)
    into_sums = panels_entry(panels_kernel(problem.a, problem.b, working, working))
    sizes = ITEMSIZE[problem.a], ITEMSIZE[problem.b], ITEMSIZE[working]
    width: int = min(params["width"], m)
    words = (into_sums, 0, A.strides[1], 0, 0, m, problem.n, parts, width, *sizes)
    return joined_job(_split, words, (1, 3, 4), Sums(parts, m, working), problem.out)


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect nearly the read ceiling; for a y too short to share, and columns enough."""
    if (
        problem.batch > 1
        or problem.m > max(1024 * machine.units, LONGEST)
        or problem.n < 64 * machine.units
    ):
        return None
    calls = 2 * _cpu.spread_s(machine, problem.compulsory_bytes) - machine.rates.call
    columns = columns_s(problem, machine) / machine.units
    return Suggestion(
        {}, calls + columns + _cpu.streaming_s(problem, machine, 0.90 * unasked_columns(problem))
    )


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
    job=job,
    available=unavailable,
)
