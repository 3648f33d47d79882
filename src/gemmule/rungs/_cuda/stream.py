"""What CUDA rungs that stream a matrix once share: constraints, strips, models of their time."""

from __future__ import annotations

import math

from gemmule.core.device_model import Numbers
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, Machine
from gemmule.rungs._cuda.geometry import ceil_div, lies

FITS = Constraint(
    "m and n below 2^31, at most 65,535 products in a batch",
    lambda problem, params: max(problem.m, problem.n) < 2**31 and problem.batch < 65_536,
)

INDEXED = Constraint(
    "m and n below 2^31", lambda problem, params: max(problem.m, problem.n) < 2**31
)
ALONE = Constraint("one product at a time", lambda problem, params: problem.batch == 1)

FILLED_BYTES = 1_000_000  # of a matrix that is as large as what the chip has under way

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


def narrow_s(problem: Problem, own: Numbers) -> float:
    """Return the seconds that strips of 16-byte vectors lose on rows that fill few lanes."""
    row, lying = problem.m * ITEMSIZE[problem.a], lies(problem)
    least = 32 if lying == "aligned" else 16
    return float(own["narrow_s"][lying]) if row < least else 0.0


def unaligned_doubles(problem: Problem, own: Numbers) -> bool:
    """Tell whether sums over many unaligned rows of doubles are better off by two launches."""
    double = ITEMSIZE[problem.a] == 8 and problem.alignment != 16
    many = problem.n >= own["doubles_from_rows"]
    return bool(double and many and problem.matrix_bytes <= own["large_bytes"])


def starting(problem: Problem, machine: Machine, own: Numbers) -> float:
    """Return the seconds that a product takes besides reading its matrix.

    beyond_s, or less earlier_s: a plain launch, at the smallest sizes. filling_s: what is added
    until the matrix is as large as what the chip has under way.
    """
    filled = min(1.0, problem.compulsory_bytes / FILLED_BYTES)
    begin = own.get("beyond_s", 0.0) - own.get("earlier_s", 0.0) + own["filling_s"] * filled
    return float(machine.call_s + begin)


def overlapped(*seconds: float) -> float:
    """Return what takes these seconds at the same time: where two are alike, neither is free."""
    return float(sum(one**4 for one in seconds) ** 0.25)


def shared_rows_s(
    problem: Problem,
    machine: Machine,
    own: Numbers,
    shape: tuple[int, int],
    *,
    turn_s: float,
    rate: float,
    at_once: float,
) -> float:
    """Return the seconds of reading rows that `parts` blocks of 256 threads share each.

    shape: the parts, and the loads a thread of a turn, which takes turn_s at least. rate: the share
    of the memory's that many blocks reach. at_once: the blocks that a multiprocessor holds. A wave
    that is not full costs part of what its blocks take alone, and every wave something beside.
    """
    parts, unroll = shape
    turns = ceil_div(problem.n * ITEMSIZE[problem.a], 16 * 256 * parts * unroll)
    waiting = turn_s * turns
    reading = problem.compulsory_bytes / (rate * machine.read_bytes_per_s)
    waves = problem.m * problem.batch * parts / (at_once * machine.units)
    if waves <= 1:
        return overlapped(reading, waiting)
    begun = math.ceil(waves)
    beside = own["second_wave_s"] + own["wave_s"] * (begun - 2)
    return float(reading + beside + own["uneven"] * (begun - waves) * waiting)
