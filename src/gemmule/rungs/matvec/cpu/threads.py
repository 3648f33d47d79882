"""Four rows at a time on every core that comes: small shares of the rows, claimed in turn.

One core fills about two thirds of the memory's pipe on the machine of the table below; two fill it.
"""

from __future__ import annotations

from gemmule.backends.cpu.jit import unavailable
from gemmule.backends.cpu.pool import SHARES_PER_THREAD
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, by_plan, in_rows
from gemmule.rungs.matvec.cpu.four_rows import rows_of


def plan(problem: Problem, params: Params) -> Build:
    """Return the product whose shares are some rows, four by four.

    The last rows, fewer than four, may be summed in another order: they are those of the product,
    not of a share, so that a row's bits depend on nothing but its place.
    """
    return in_rows(problem, rows_of(problem), params["shares_per_thread"], unit=4)


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
    after="four_rows",
    params={"shares_per_thread": SHARES_PER_THREAD},
    batched=True,
    suggest=suggest,
    available=unavailable,
    rows_apart=True,
    **by_plan(plan),
    **_cpu.OF_VECTORS,
)
