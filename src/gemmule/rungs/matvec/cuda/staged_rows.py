"""Staged rows: rows of a few bytes, one a thread, brought to shared memory by the block.

The other rungs give a row 8 lanes at least, most of which have nothing to do where a row is shorter
than 128 bytes, and rows that begin off a vector cost them more still. Such rows lie side by side,
so a block copies 256 of them and more as what they are together, a stretch of memory: 16 bytes a
copy whatever the rows' length is, none of which passes the registers (`cp.async`). Each thread then
has rows of its own in shared memory, reads them by the widest access that their alignment allows,
and no sum has to be brought together. Rows of a wider matrix, which do not lie side by side, are
read where they lie, a thread each.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import (
    accumulator,
    ceil_div,
    instance,
    modelled,
    type_arguments,
)
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums
from gemmule.rungs._cuda.short_rows import (
    ROOM,
    THREADS,
    conflicts,
    unit,
    wide_row,
    worth_staging,
)
from gemmule.rungs._cuda.terms import streaming

LARGEST_GRID = 2**31 - 1


def _smem(problem: Problem, params: Params) -> int:
    x = ceil_div(problem.n * ITEMSIZE[accumulator(problem)], 16) * 16
    return x + 16 + THREADS * int(params["rows"]) * wide_row(problem.n, problem.a)


def _blocks(problem: Problem, params: Params) -> int:
    return ceil_div(problem.m, THREADS * params["rows"]) * problem.batch


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    kernel = instance("staged_rows", type_arguments(problem), unit(problem), params["rows"])
    grid = (_blocks(problem, params), 1, 1)
    return (Step(kernel, grid, (THREADS, 1, 1), _smem(problem, params)),)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    return RUNG.space(problem) if worth_staging(problem.n, problem) else ()


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    blocks, passes = _blocks(problem, params), problem.n * conflicts(problem.n, problem)
    shape, kind = (blocks, 3, 1), str(ITEMSIZE[problem.a])
    waves = max(1.0, blocks / (3 * machine.units)) * params["rows"]
    late = {"pass_s": waves * passes}
    return streaming(problem, machine, shape, kind, {"column_s": problem.n}, {}, late)


RUNG = CudaRung(
    title="Staged rows",
    idea="Short rows come to shared memory as one stretch; each thread has rows of its own there.",
    archs=SINCE_AMPERE,
    source="tiles of CSR-stream kernels (Greathouse and Daga 2014), for dense rows",
    signatures=FLOAT_SIGNATURES,
    arithmetic=sums(lambda problem, params: max(problem.n, 1)),
    after="streamed_rows",
    branch="short rows",
    params={"rows": (1, 2, 4, 8)},
    constraints=(
        Constraint(
            "m and n below 2^31 and at most 2^31 - 1 blocks",
            lambda problem, params: (
                max(problem.m, problem.n) < 2**31 and _blocks(problem, params) <= LARGEST_GRID
            ),
        ),
        Constraint(
            f"the rows of a block fit {ROOM:,} bytes of shared memory",
            lambda problem, params: _smem(problem, params) <= ROOM,
        ),
    ),
    batched=True,
    steps=_steps,
    **modelled("matvec/staged_rows", _terms, _choices),
)
