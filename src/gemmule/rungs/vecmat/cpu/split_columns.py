"""A short y: the threads share the columns and their panels are added at the end."""

from __future__ import annotations

import functools

from gemmule.backends.cpu.jit import unavailable
from gemmule.backends.cpu.pool import share_count
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, by_plan, in_stretches
from gemmule.rungs.vecmat.cpu.panels import WIDTHS, columns_s, panels_of, unasked_columns

SHARES_PER_THREAD = 4
LONGEST = 8192  # results to which every share may have sums of its own
SUMS_SHARE = 16  # a share reads so many times the bytes of its own sums


def plan(problem: Problem, params: Params) -> Build:
    """Return the product whose shares are some columns; few columns are read by the caller."""
    fewest = SUMS_SHARE * ITEMSIZE[_cpu.problem_working_dtype(problem)] // ITEMSIZE[problem.a]

    def parts() -> int:
        return share_count(problem.compulsory_bytes, problem.n // fewest, SHARES_PER_THREAD)

    return in_stretches(problem, functools.partial(panels_of, problem, params), parts, across=True)


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
    layouts=("col",),
    after="panel_threads",
    params={"width": WIDTHS},
    suggest=suggest,
    available=unavailable,
    **by_plan(plan),
    **_cpu.OF_VECTORS,
)
