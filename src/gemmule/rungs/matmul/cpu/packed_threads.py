"""Packed blocks on every core: a thread owns whole blocks of C and packs what they need."""

from __future__ import annotations

import functools
from dataclasses import replace

from gemmule.core.packing import HostPacking
from gemmule.core.problem import Problem
from gemmule.core.rung import Machine, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import job_of_plan
from gemmule.rungs.matmul.cpu import packed
from gemmule.rungs.matmul.cpu._packed_operands import pack

bind = functools.partial(packed.bind, alone=False)


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the rate of a core times the cores."""
    calls = problem.batch * _cpu.spread_s(machine)
    return Suggestion({}, calls + _cpu.packed_s(problem, machine, machine.units))


RUNG = replace(
    packed.RUNG,
    title="Packed blocks, threads",
    idea="Blocks of C are independent: every thread computes its own, with its own packed copies.",
    source="BLIS, parallel in the loops over blocks of C",
    after="packed",
    suggest=suggest,
    bind=bind,
    job=job_of_plan(functools.partial(packed.plan, alone=False)),
    packing=HostPacking(pack, bind),
)
