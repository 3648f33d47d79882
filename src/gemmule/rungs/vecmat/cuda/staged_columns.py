"""Staged columns: rows of a few columns, whose sums one thread keeps for all columns.

`split_columns` gives each lane a 16-byte vector of columns. Where a stored row is shorter than
that, or little longer, its lanes go element by element or find nothing to do. Here a block copies
256 rows and more to shared memory as the stretch of memory that they are together (`staged_rows`
does the same); each thread takes rows of its own with their element of x, which is read once and
by neighbours, and adds to the sums of all columns in its registers. Warps, blocks and then a second
kernel, started early, add these up in a fixed order: the same bits on every run.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    ceil_div,
    instance,
    modelled,
    starts_early,
    type_arguments,
)
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums, sums_of
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
    return 16 + THREADS * int(params["rows"]) * wide_row(problem.m, problem.a)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    splits = params["splits"]
    shape = params["columns"], params["rows"], splits
    read = instance("staged_columns", type_arguments(problem), unit(problem), *shape)
    grid, smem = (splits * problem.batch, 1, 1), _smem(problem, params)
    add = instance("add_staged", CTYPE[problem.out], splits)
    return (
        Step(read, grid, (THREADS, 1, 1), smem),
        Step(add, (problem.m * problem.batch, 1, 1), (64, 1, 1), pdl=starts_early(machine)),
    )


def _chain(problem: Problem, params: Params) -> int:
    turns = ceil_div(problem.n, THREADS * params["rows"] * params["splits"])
    return int(turns * params["rows"] + 5 + 8 + params["splits"] // 64 + 6)


COLUMNS, SPLITS = (4, 8, 16, 32), (64, 128, 256, 512)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    return RUNG.space(problem) if worth_staging(problem.m, problem) else ()


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Bring sums together for longer where there are more columns, and blocks that do it."""
    columns, splits, tiles = params["columns"], params["splits"], _tiles(problem, params)
    shape = min(splits, tiles) * problem.batch, 3, ceil_div(tiles, splits)
    more = {"column_s": columns, "adding_s": columns * min(splits, tiles)}
    passes = shape[2] * params["rows"] * columns * conflicts(problem.m, problem)
    kind = str(ITEMSIZE[problem.a])
    return streaming(problem, machine, shape, kind, more, {}, {"pass_s": passes})


def _tiles(problem: Problem, params: Params) -> int:
    return ceil_div(problem.n, THREADS * params["rows"])


RUNG = CudaRung(
    title="Staged columns",
    idea="Rows of few columns come to shared memory as one stretch; a thread sums all columns.",
    archs=SINCE_AMPERE,
    source="staged_rows; split-K, deterministic, as in split_columns",
    signatures=FLOAT_SIGNATURES,
    arithmetic=sums(_chain),
    layouts=("col",),
    after="split_columns",
    params={"columns": (8, 4, 16, 32), "rows": (1, 2, 4), "splits": (128, 64, 256, 512)},
    constraints=(
        Constraint(
            "m and n below 2^31 and at most 2^31 - 1 blocks",
            lambda problem, params: (
                max(problem.m, problem.n) < 2**31
                and max(params["splits"], problem.m) * problem.batch <= LARGEST_GRID
            ),
        ),
        Constraint(
            "at most 32 columns, the fewest of the declared numbers that hold them",
            lambda problem, params: (
                params["columns"] == next((c for c in COLUMNS if c >= problem.m), None)
            ),
        ),
        Constraint(
            f"the rows of a block fit {ROOM:,} bytes of shared memory",
            lambda problem, params: _smem(problem, params) <= ROOM,
        ),
    ),
    workspace=sums_of("splits"),
    batched=True,
    steps=_steps,
    **modelled("vecmat/staged_columns", _terms, _choices),
)
