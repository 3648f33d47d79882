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
from gemmule.rungs._cuda.short_rows import ROOM, THREADS, conflicts, unit, wide_row
from gemmule.rungs._cuda.stream import starting
from gemmule.storage.models import numbers

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


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Give every block one turn, of two rows a thread where there would be many blocks."""
    own = numbers(machine, "vecmat/staged_columns")
    columns = next((c for c in COLUMNS if c >= problem.m), None)
    row, passes = wide_row(problem.m, problem.a), conflicts(problem.m, problem)
    if columns is None or row > own["most_bytes"] or passes > own["most_passes"]:
        return
    rows = 2 if problem.n > own["many_rows"] and 2 * row <= TWO_ROWS_BYTES else 1
    most = own["most_splits_of_two"] if rows == 2 and columns == 32 else SPLITS[-1]
    wanted = min(ceil_div(problem.n, THREADS * rows), most)
    splits = next((s for s in SPLITS if s >= wanted), SPLITS[-1])
    yield {"columns": columns, "rows": rows, "splits": splits}


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    """Bring sums together for longer where there are more columns, and blocks that do it."""
    own, passes = numbers(machine, "vecmat/staged_columns"), conflicts(problem.m, problem)
    tiles = ceil_div(problem.n, THREADS * params["rows"])
    rate = own["rate"]["usual" if passes == 1 or ITEMSIZE[problem.a] < 8 else "conflicts"]
    reading = problem.compulsory_bytes / (rate * machine.read_bytes_per_s)
    adding = own["column_s"] + own["column_of_a_split_s"] * min(tiles, params["splits"])
    return float(starting(problem, machine, own) + params["columns"] * adding + reading)


COLUMNS, SPLITS = (4, 8, 16, 32), (64, 128, 256, 512)
TWO_ROWS_BYTES = 128  # of shared memory that leave room for as many blocks

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
    **modelled(_choices, _seconds),
)
