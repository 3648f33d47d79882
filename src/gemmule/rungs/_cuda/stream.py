"""What CUDA rungs that stream a matrix once share: constraints, strips, models of their time."""

from __future__ import annotations

import math

from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, Machine
from gemmule.rungs._cuda.geometry import ceil_div

FITS = Constraint(
    "m and n below 2^31, at most 65,535 products in a batch",
    lambda problem, params: max(problem.m, problem.n) < 2**31 and problem.batch < 65_536,
)

INDEXED = Constraint(
    "m and n below 2^31", lambda problem, params: max(problem.m, problem.n) < 2**31
)
ALONE = Constraint("one product at a time", lambda problem, params: problem.batch == 1)

LARGE_BYTES = 100_000_000  # of a matrix whose narrow strips of columns no longer come at full rate

UNITS_OF_ROWS = Constraint(
    "8 or 32 lanes for unaligned rows",
    lambda problem, params: problem.alignment == 16 or params["lanes"] in (8, 32),
)


def flags(problem: Problem) -> str:
    """Return the template arguments ALIGNED and BATCHED."""
    return ", ".join(str(f).lower() for f in (problem.alignment == 16, problem.batch > 1))


def strips(problem: Problem, lanes: int) -> int:
    """Return how many strips of columns a matrix has: `lanes` vectors of 16 bytes each.

    Where rows are unaligned, less what may lie before a row's begin (see column_stream.cuh).
    """
    vector = 16 // ITEMSIZE[problem.a]
    return ceil_div(problem.m, lanes * vector - (vector - 1) * (problem.alignment != 16))


def rows_of_a_thread(problem: Problem, walkers: int, in_flight: int) -> int:
    """Return the most rows that one thread adds up: whole turns of `in_flight` neighbouring rows.

    walkers: the threads that walk different rows of a strip, of all blocks that share it.
    """
    return ceil_div(problem.n, walkers * in_flight) * in_flight


def narrow_s(problem: Problem) -> float:
    """Return the seconds that strips of 16-byte vectors lose on rows that fill few lanes.

    One H200 (November 2026): unaligned rows of less than a vector take 1.2 to 2 us more than their
    bytes, of 20 to 60 bytes nothing; aligned ones of 16 bytes 0.8, of 48 bytes nothing.
    """
    row = problem.m * ITEMSIZE[problem.a]
    if problem.alignment == 16:
        return 0.8e-6 if row < 32 else 0.0
    return 1.4e-6 if row < 16 else 0.0


def unaligned_doubles(problem: Problem) -> bool:
    """Tell whether sums over many unaligned rows of doubles are better off by two launches.

    One H200 (November 2026): 594 rows of 10271 15.2 us, by wide strips in one launch 16.0; 211 of
    16077 10.1 and 9.4, and above 100 MB both are as fast.
    """
    double = ITEMSIZE[problem.a] == 8 and problem.alignment != 16
    return double and problem.n >= 500 and problem.matrix_bytes <= LARGE_BYTES


def starting(problem: Problem, machine: Machine, beyond_us: float, filling_us: float) -> float:
    """Return the seconds that a product takes besides reading its matrix.

    beyond_us: beyond a plain launch, at the smallest sizes. filling_us: what is added until the
    matrix is as large as what the chip has under way, a megabyte.
    """
    filled = min(1.0, problem.compulsory_bytes / 1e6)
    return machine.call_s + 1e-6 * (beyond_us + filling_us * filled)


def overlapped(*seconds: float) -> float:
    """Return what takes these seconds at the same time: where two are alike, neither is free."""
    return float(sum(one**4 for one in seconds) ** 0.25)


def shared_rows_s(
    problem: Problem,
    machine: Machine,
    parts: int,
    unroll: int,
    *,
    turn_us: float,
    rate: float,
    at_once: float,
) -> float:
    """Return the seconds of reading rows that `parts` blocks of 256 threads share each.

    turn_us: what a turn of `unroll` loads a thread takes at least. rate: the share of the memory's
    that many blocks reach. at_once: the blocks that a multiprocessor holds. One H200 (November
    2026), 106 shapes of 2 to 2,038 rows: a wave that is not full costs part of what its blocks take
    alone, and every wave after the first 0.8 us.
    """
    turns = ceil_div(problem.n * ITEMSIZE[problem.a], 16 * 256 * parts * unroll)
    waiting = 1e-6 * turn_us * turns
    reading = problem.compulsory_bytes / (rate * machine.read_bytes_per_s)
    waves = problem.m * problem.batch * parts / (at_once * machine.units)
    if waves <= 1:
        return overlapped(reading, waiting)
    begun = math.ceil(waves)
    return reading + 1e-6 * (1.7 + 0.8 * (begun - 2)) + 0.45 * (begun - waves) * waiting
