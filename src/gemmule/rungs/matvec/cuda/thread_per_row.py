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

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Suggestion
from gemmule.rungs._cuda.geometry import ALL_SIGNATURES, FLOAT8_SIGNATURES
from gemmule.rungs._cuda.rows import sums, thread_steps
from gemmule.rungs._cuda.stream import starting

MOST_COLUMNS, MOST_BYTES = 19, 48  # of a row that it suggests itself for


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Take rows of a few bytes that most of the chip's threads have room for.

    One H200 (November 2026), 37 shapes of 1 to 19 columns: 0.2 to 0.7 us less than `staged_rows`,
    which passes shared memory, up to 200,000 rows (58846 x 9 floats 2.8 us instead of 3.2, 136011 x
    19 halves 4.1 instead of 4.9); 218,999 x 2 floats 3.1 instead of 2.95.
    """
    row = problem.n * ITEMSIZE[problem.a]
    wide = problem.n > MOST_COLUMNS or row > MOST_BYTES
    if wide or problem.layout_a != "row" or problem.batch > 1 or problem.m > 1600 * machine.units:
        return None
    # What stays in the L2 between calls, to which the shorter start was fitted, is among these.
    few = problem.n <= 8 and row <= 40 and problem.m <= 1024 * machine.units
    rate = 0.9 if few or ITEMSIZE[problem.a] > 2 else 0.65  # one load an element
    reading = problem.compulsory_bytes / (rate * machine.read_bytes_per_s)
    start = starting(problem, machine, -0.65 + 0.008 * row if few else 0.3, 0.3)
    return Suggestion({"block": 128}, start + reading)


RUNG = CudaRung(
    title="Thread per row",
    idea="One thread computes one element of y: it walks its row of A and all of x.",
    source="document 000, basic kernel; document 004, naive kernel over column-major storage",
    signatures=(*ALL_SIGNATURES, *FLOAT8_SIGNATURES),
    arithmetic=sums(lambda problem, params: problem.n),
    layouts=("row", "col", "strided"),
    params={"block": (128, 32, 64, 256, 512, 1024)},
    batched=True,
    suggest=_suggest,
    steps=thread_steps("thread_per_row"),
)
