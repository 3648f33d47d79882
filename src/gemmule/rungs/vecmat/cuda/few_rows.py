"""Few rows: long results of a matrix of a few rows, each thread summing its own columns.

`block_columns` shares the rows of a strip among threads and brings their sums together. Of a few
rows there is little to share: its threads, which of unaligned rows take every eighth, stand idle.
Here a thread keeps the sums of single columns from the first row to the last, eight rows under way;
its neighbours read the elements beside, so that a warp's request is as wide as a line whatever the
alignment. It needs no shared memory, no barrier and no workspace. Where there are dozens of rows,
the warps of a block take eight each instead, and meet once.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import ceil_div, instance, modelled, type_arguments
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums
from gemmule.rungs._cuda.stream import FITS, starting
from gemmule.storage.models import numbers

ROWS = 8  # of a warp's turn
LINE = 64  # bytes; shorter rows share what the memory fetches


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


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take four columns a thread where single ones would be more than a wave of blocks."""
    own = numbers(machine, "vecmat/few_rows")
    if problem.n > own["most_rows"]:
        return
    several = ceil_div(problem.m, 128) * problem.batch > own["blocks_of_a_unit"] * machine.units
    yield {"share": 1, "each": 4 if several else 1, "unroll": 4 if problem.n <= 4 else 8}
    if problem.n > ROWS:
        yield from ({"share": share, "each": 1, "unroll": 8} for share in (4, 16))


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    """Add up the rows of the first turn, the meeting of warps, and bytes that hide most turns."""
    own, share = numbers(machine, "vecmat/few_rows"), params["share"]
    size = ITEMSIZE[problem.a]
    of_size = own["doubles" if size == 8 else "floats"]
    rate = own["rate"]["halves" if size == 2 else "usual"] * machine.read_bytes_per_s
    turns = ceil_div(problem.n, ROWS * share)
    threads = problem.batch * problem.m * share / params["each"]
    waves = max(1.0, threads / (own["threads_of_a_unit"] * machine.units))
    waiting = of_size["turn_s"] * (turns * waves - 1)
    start = starting(problem, machine, own[share]) - of_size["earlier_s"]
    start += of_size["row_s"] * min(problem.n, ROWS) + of_size["meeting_s"].get(share, 0.0)
    if problem.m * size < LINE:
        waiting /= 2
    else:
        start += own["long_rows_s"].get(share, 0.0)
    reading = problem.compulsory_bytes / rate
    return float(start + max(reading + own["not_hidden"] * waiting, waiting))


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
    steps=_steps,
    **modelled(_choices, _seconds),
)
