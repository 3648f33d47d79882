"""Thread per row, document 000's first kernel.

The simplest parallel matvec: rows are independent, so each thread takes one. It walks the row and
all of x and writes one result; nothing is shared and nothing is staged.

Along a row-major matrix the 32 threads of a warp read 32 different rows, so one request touches 32
sectors (a counter shows half of that, since every other request is the one for x, a broadcast).
That does not waste the memory's bandwidth: each sector stays in the L1 until its values are used.
What is missing is work under way: 4096 rows are 4096 threads, a few percent of what the chip holds,
each with no more than four loads of A on their way, for the compiler unrolls the loop by four.

Down a column-major one (a product across the rows) the threads of a warp read neighbours and the
same code is coalesced. Yet it is slower there: every step of every thread goes to the memory, while
along rows a sector that has arrived serves sixteen steps out of the L1.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Params
from gemmule.rungs._cuda.geometry import (
    ALL_SIGNATURES,
    COMPLEX_SIGNATURES,
    FLOAT8_SIGNATURES,
    ceil_div,
    modelled,
)
from gemmule.rungs._cuda.rows import sums, thread_steps
from gemmule.rungs._cuda.terms import streaming

MOST_BYTES, MOST_ROWS = 48, 1600  # of a row; of a multiprocessor


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take rows of a few bytes that the chip's threads have room for, each a thread's own."""
    short = problem.n * ITEMSIZE[problem.a] <= MOST_BYTES
    few = problem.m * problem.batch <= MOST_ROWS * machine.units
    return [{"block": 128}] if short and few and problem.layout_a == "row" else []


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    size = ITEMSIZE[problem.a]
    shape = ceil_div(problem.m, params["block"]) * problem.batch, 2048 // params["block"], problem.n
    return streaming(problem, machine, shape, "halves" if size <= 2 else "words")


RUNG = CudaRung(
    title="Thread per row",
    idea="One thread computes one element of y: it walks its row of A and all of x.",
    source="document 000, basic kernel; document 004, naive kernel over column-major storage",
    signatures=(*ALL_SIGNATURES, *FLOAT8_SIGNATURES, *COMPLEX_SIGNATURES),
    arithmetic=sums(lambda problem, params: problem.n),
    layouts=("row", "col", "strided"),
    params={"block": (128, 32, 64, 256, 512, 1024)},
    batched=True,
    steps=thread_steps("thread_per_row"),
    **modelled("matvec/thread_per_row", _terms, _choices),
)
