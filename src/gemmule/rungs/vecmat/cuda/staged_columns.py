"""Staged columns: rows of a few columns, whose sums one thread keeps for all columns.

`split_columns` gives each lane a 16-byte vector of columns. Where a stored row is shorter than
that, or little longer, its lanes go element by element or find nothing to do. Here a block copies
256 rows and more to shared memory as the stretch of memory that they are together (`staged_rows`
does the same); each thread takes rows of its own with their element of x, which is read once and
by neighbours, and adds to the sums of all columns in its registers. Warps, blocks and then a second
kernel, started early, add these up in a fixed order: the same bits on every run.
"""

from __future__ import annotations

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    ceil_div,
    instance,
    starts_early,
    type_arguments,
)
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums, sums_of
from gemmule.rungs._cuda.short_rows import ROOM, THREADS, conflicts, unit, wide_row
from gemmule.rungs._cuda.stream import starting

LARGEST_GRID = 2**31 - 1
MOST_BYTES = 128  # of a row


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


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Give every block one turn, of two rows a thread where there would be many blocks.

    One H200 (November 2026), 37 shapes of 2 to 32 columns and 1,387 to 235,536 rows. Bringing the
    sums of 32 columns together takes 1.3 us more than those of 4, and more where several blocks of
    a multiprocessor do it: 65833 x 22 bfloat16 6.8 us by 258 blocks, 5.9 by half as many.
    """
    columns = next((c for c in COLUMNS if c >= problem.m), None)
    row, passes = wide_row(problem.m, problem.a), conflicts(problem.m, problem)
    if columns is None or row > MOST_BYTES or passes > 4:
        return None
    rows = 2 if problem.n > THREADS * 256 and 2 * row <= TWO_ROWS_BYTES else 1
    tiles = ceil_div(problem.n, THREADS * rows)
    most = 256 if rows == 2 and columns == 32 else SPLITS[-1]
    splits = next((s for s in SPLITS if s >= min(tiles, most)), SPLITS[-1])
    rate = 0.8 if passes == 1 or ITEMSIZE[problem.a] < 8 else 0.6
    reading = problem.compulsory_bytes / (rate * machine.read_bytes_per_s)
    sums_us = columns * (0.047 + 1e-4 * min(tiles, splits))
    seconds = starting(problem, machine, 1.05 + sums_us, 0.4) + reading
    return Suggestion({"columns": columns, "rows": rows, "splits": splits}, seconds)


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
    suggest=_suggest,
    steps=_steps,
)
