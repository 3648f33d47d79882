"""Column panels on every core: each thread owns a share of y, so nothing is shared."""

from __future__ import annotations

from gemmule.backends.cpu.jit import unavailable
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import Build, by_plan, in_rows
from gemmule.rungs.vecmat.cpu.panels import WIDTHS, columns_s, panels_of

SHARE_MULTIPLE = 64  # a share of y begins on its own cache line
PAIR_BYTES = 128  # lines are fetched in pairs
SHARES_PER_THREAD = 2  # long shares: every column is a stretch of memory of its own


def plan(problem: Problem, params: Params) -> Build:
    """Return the product whose shares are stretches of y."""
    panels = panels_of(problem, params)
    return in_rows(problem, panels, SHARES_PER_THREAD, unit=SHARE_MULTIPLE, across=True)


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
    layouts=("col",),
    after="panels",
    params={"width": WIDTHS},
    batched=True,
    suggest=suggest,
    available=unavailable,
    **by_plan(plan),
    **_cpu.OF_VECTORS,
)
