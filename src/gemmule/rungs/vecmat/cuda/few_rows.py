"""Few rows: long results of a matrix of a few rows, each thread summing its own columns.

`block_columns` shares the rows of a strip among threads and brings their sums together. Of a few
rows there is little to share: its threads, which of unaligned rows take every eighth, stand idle.
Here a thread keeps the sums of single columns from the first row to the last, eight rows under way;
its neighbours read the elements beside, so that a warp's request is as wide as a line whatever the
alignment. It needs no shared memory, no barrier and no workspace. Where there are dozens of rows,
the warps of a block take eight each instead, and meet once.
"""

from __future__ import annotations

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda.geometry import ceil_div, instance, quickest, type_arguments
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums
from gemmule.rungs._cuda.stream import FITS, starting

ROWS = 8  # of a warp's turn


def _threads(params: Params) -> int:
    return 128 if params["share"] == 1 else int(32 * params["share"])


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    share, each = params["share"], params["each"]
    columns = 128 * each if share == 1 else 32
    template = type_arguments(problem), share, each, params["unroll"], problem.batch > 1
    grid = (ceil_div(problem.m, columns), problem.batch, 1)
    return (Step(instance("few_rows", *template), grid, (_threads(params), 1, 1)),)


def _chain(problem: Problem, params: Params) -> int:
    share, unroll = int(params["share"]), int(params["unroll"])
    return ceil_div(problem.n, share * unroll) * unroll + (share if share > 1 else 0)


# One H200 (November 2026), 130 shapes of 2 to 400 rows: us beyond the smallest kernel, of each row
# of the first turn, of each turn more, of the meeting of the warps; and the share of the read
# ceiling, in which a quarter of the turns does not hide.
BEGINNING_US, ROW_US, TURN_US = -0.67, 0.03, 0.62
BEGINNING_DOUBLES_US, ROW_DOUBLES_US, TURN_DOUBLES_US = -0.62, 0.09, 0.95
MEETING_US, MEETING_DOUBLES_US = {1: 0.0, 4: 0.0, 16: 0.1}, {1: 0.0, 4: 0.8, 16: 1.5}
FILLING_US = {1: 0.4, 4: 0.4, 16: 1.0}  # until the chip has its bytes under way
LONG_ROWS_US = {1: 0.0, 4: 0.0, 16: 0.3}
RATE, RATE_OF_HALVES, NOT_HIDDEN = 0.96, 0.7, 0.25
THREADS_OF_A_UNIT = 1536
MOST_ROWS = 400  # that the model was fitted to
LINE = 64  # bytes; shorter rows share what the memory fetches


def _seconds(problem: Problem, machine: Machine, params: Params) -> float:
    size, share = ITEMSIZE[problem.a], params["share"]
    double = size == 8
    row_us, turn_us = (ROW_DOUBLES_US, TURN_DOUBLES_US) if double else (ROW_US, TURN_US)
    begin_us = BEGINNING_DOUBLES_US if double else BEGINNING_US
    begin_us += (MEETING_DOUBLES_US if double else MEETING_US)[share]
    rate = (RATE_OF_HALVES if size == 2 else RATE) * machine.read_bytes_per_s
    turns = ceil_div(problem.n, ROWS * share)
    threads = problem.batch * problem.m * share / params["each"]
    waves = max(1.0, threads / (THREADS_OF_A_UNIT * machine.units))
    waiting = 1e-6 * turn_us * (turns * waves - 1)
    if problem.m * size < LINE:
        waiting /= 2
    else:
        begin_us += LONG_ROWS_US[share]
    reading = problem.compulsory_bytes / rate
    start = starting(problem, machine, begin_us + row_us * min(problem.n, ROWS), FILLING_US[share])
    return float(start + max(reading + NOT_HIDDEN * waiting, waiting))


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Take four columns a thread where single ones would be more than a wave of blocks."""
    if problem.n > MOST_ROWS:
        return None
    several = ceil_div(problem.m, 128) * problem.batch > 8 * machine.units
    alone = {"share": 1, "each": 4 if several else 1, "unroll": 4 if problem.n <= 4 else 8}
    shared = ({"share": share, "each": 1, "unroll": 8} for share in (4, 16))
    choices = [alone, *shared] if problem.n > ROWS else [alone]
    return quickest(choices, lambda params: _seconds(problem, machine, params))


RUNG = CudaRung(
    title="Few rows",
    idea="A thread sums columns of its own; of few rows there is nothing to bring together.",
    source="thread per row of a column-major matrix, eight rows under way",
    signatures=FLOAT_SIGNATURES,
    arithmetic=sums(_chain),
    layouts=("col",),
    after="col_thread_per_row",
    branch="few rows",
    params={"share": (1, 4, 16), "each": (1, 4), "unroll": (8, 4)},
    constraints=(
        FITS,
        Constraint(
            "1 column of a thread and 8 rows under way where warps share columns",
            lambda problem, params: (
                params["share"] == 1 or (params["each"] == 1 and params["unroll"] == 8)
            ),
        ),
    ),
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
