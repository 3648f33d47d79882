"""Few long rows: the threads share each row and their sums are added at the end."""

from __future__ import annotations

import functools

from gemmule.backends.cpu.jit import unavailable
from gemmule.backends.cpu.pool import SHARES_PER_THREAD, share_count
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, by_plan, in_stretches
from gemmule.rungs.matvec.cpu.four_rows import rows_of

SHORTEST = 256  # elements of a row in a share


def plan(problem: Problem, params: Params) -> Build:
    """Return the product whose shares are stretches of all rows; short rows are read whole."""

    def parts() -> int:
        units, per_thread = problem.n // SHORTEST, params["shares_per_thread"]
        return share_count(problem.compulsory_bytes, units, per_thread)

    return in_stretches(problem, functools.partial(rows_of, problem), parts)


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
    after="threads",
    branch="few long rows",
    params={"shares_per_thread": SHARES_PER_THREAD},
    suggest=suggest,
    available=unavailable,
    **by_plan(plan),
    **_cpu.OF_VECTORS,
)
