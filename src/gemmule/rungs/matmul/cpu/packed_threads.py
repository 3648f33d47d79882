"""Packed blocks on every core: a thread owns whole blocks of C and packs what they need."""

from __future__ import annotations

import functools
from collections.abc import Callable

from gemmule.backends.cpu.jit import unavailable
from gemmule.core.packing import HostPacking
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_rows import job_of_plan
from gemmule.rungs.matmul.cpu._packed_operands import pack
from gemmule.rungs.matmul.cpu.packed import NEITHER, Sides, bind_shares, plan


def bind(problem: Problem, params: Params, ready: Sides = NEITHER) -> Callable[..., None]:
    """Return ``run(A, B, C)``; `ready` operands come packed."""
    return bind_shares(problem, params, ready, alone=False)


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the rate of a core times the cores."""
    calls = problem.batch * _cpu.spread_s(machine)
    return Suggestion({}, calls + _cpu.packed_s(problem, machine, machine.units))


RUNG = CpuRung(
    title="Packed blocks, threads",
    idea="Blocks of C are independent: every thread computes its own, with its own packed copies.",
    source="BLIS, parallel in the loops over blocks of C",
    op="matmul",
    signatures=(*_cpu.SIGNATURES, *_cpu.FLOAT8_SIGNATURES),
    layouts=("row", "col", "strided"),
    layouts_b=("row", "col", "strided"),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    after="packed",
    params={"columns": (1024, 512, 2048)},
    suggest=suggest,
    bind=bind,
    job=job_of_plan(functools.partial(plan, alone=False)),
    available=unavailable,
    packing=HostPacking(pack, bind),
    rows_apart=True,
)
