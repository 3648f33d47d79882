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

from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import ceil_div, instance, modelled, type_arguments
from gemmule.rungs._cuda.rows import FLOAT_SIGNATURES, sums
from gemmule.rungs._cuda.stream import FITS
from gemmule.rungs._cuda.terms import streaming

MOST_ROWS = 400
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


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    return RUNG.space(problem) if problem.n <= MOST_ROWS else ()


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Ask for the rows of a turn, one after another, and wait; warps that share columns meet."""
    share, each, size = params["share"], params["each"], ITEMSIZE[problem.a]
    blocks = ceil_div(problem.m, 128 * each if share == 1 else 32) * problem.batch
    turns = problem.n / (params["unroll"] * share)
    shape = blocks, 2048 // _threads(params), turns
    more = {f"row_s {size}": min(problem.n, ROWS), f"meeting_s {share} {each}": 1.0}
    return streaming(problem, machine, shape, f"{size} {share}", more)


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
    **modelled("vecmat/few_rows", _terms, _choices),
)
