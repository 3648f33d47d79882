"""Block columns: the product across the rows of a row-major matrix, without copy or atomics.

Adds to `block_multiply`: vectors instead of single values, and sums that meet within a block
instead of by atomics. Results that lie side by side are summed over rows a whole leading dimension
apart. Each lane keeps the sums of one 16-byte vector of columns, so every load is coalesced and
brings eight halves; the threads of a block walk the rows of its strip, 4 or 8 loads in flight each,
and their sums meet in shared memory, always in the same order. A strip is as wide as leaves the
chip one wave of blocks: from 32 bytes, which is what the memory fetches at least, or half of it
where the chip would be idle otherwise, to 4 KB. x is asked for before the rows: it is cold too,
every block wants it at once, and behind a megabyte of matrix it would arrive last.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import stream
from gemmule.rungs._cuda.geometry import (
    STREAMED_SIGNATURES,
    instance,
    lies,
    modelled,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.terms import narrow, streaming

THREADS_OF_A_UNIT = 768  # that registers leave room for


def _in_flight(threads: int) -> int:
    """Return the loads in flight a thread: 1024 threads have 64 registers each."""
    return 4 if threads == 1024 else 8


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    threads, lanes = params["threads"], params["lanes"]
    template = type_arguments(problem), threads, lanes, _in_flight(threads), stream.flags(problem)
    grid = (stream.strips(problem, lanes), problem.batch, 1)
    return (Step(instance("block_columns", *template), grid, (threads, 1, 1)),)


def _chain(problem: Problem, params: Params) -> int:
    threads, lanes = int(params["threads"]), int(params["lanes"])
    return (
        stream.rows_of_a_thread(problem, threads // lanes, _in_flight(threads)) + 5 + threads // 32
    )


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    lanes, threads = params["lanes"], params["threads"]
    blocks = stream.strips(problem, lanes) * problem.batch
    turns = problem.n * lanes / (threads * _in_flight(threads))
    shape = blocks, max(1, THREADS_OF_A_UNIT // threads), turns
    more = {f"threads_s {threads}": 1.0, f"narrow_s {lies(problem)}": narrow(problem)}
    rounds = max(1.0, blocks / (shape[1] * machine.units)) * turns
    added = {f"added_s {ITEMSIZE[problem.a]}": rounds}
    return streaming(problem, machine, shape, f"{lies(problem)} {lanes}", more, {}, added)


RUNG = CudaRung(
    title="Block columns",
    idea="A lane sums one 16-byte vector of columns; a block walks all rows of its strip.",
    source="column panels as in BLAS",
    signatures=STREAMED_SIGNATURES,
    arithmetic=sums(_chain),
    layouts=("col",),
    after="block_multiply",
    params={"lanes": (8, 2, 4, 32, 1, 256), "threads": (512, 256, 1024)},
    constraints=(
        stream.FITS,
        stream.UNITS_OF_ROWS,
        Constraint(
            "256 threads for 256 lanes",
            lambda problem, params: params["lanes"] != 256 or params["threads"] == 256,
        ),
        Constraint(
            "512 threads for unaligned rows of bytes, not 1024 for any bytes",
            lambda problem, params: (
                ITEMSIZE[problem.a] > 1
                or params["threads"] == 512
                or (params["threads"] == 256 and problem.alignment == 16)
            ),
        ),
    ),
    batched=True,
    steps=_steps,
    **modelled("vecmat/block_columns", _terms),
)
