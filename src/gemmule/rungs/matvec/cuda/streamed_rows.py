"""Streamed rows: enough independent 16-byte loads in flight to keep the memory busy.

Adds to `warp_vector`: as many lanes share a row, and as many loads are in flight, as the shape
needs to fill the chip. A matvec reads its matrix once and computes next to nothing, so its speed is
the number of bytes under way. By Little's law that is bandwidth times latency, about 25 KB per
multiprocessor on an H200. Each lane issues `unroll` times `rows` loads before it uses the first,
past the L1 (nothing is read twice); loads past the end of a row are predicated off rather than
branched around, so that the last turn too has all of its loads in flight at once. From 8 lanes to a
whole block share a row, by its length; lanes, threads and rows are chosen so that the grid covers
the chip whatever the shape is. Indices are 32 bits, because every instruction before the first load
delays a whole wave of blocks.

Rows of any alignment are read by the aligned vectors inside them, and x is shifted to match; a warp
takes rows that begin at the same place of a vector, so that one shifted x serves all of them.
"""

from __future__ import annotations

import math

from gemmule.core.problem import FLOAT8, ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda.geometry import (
    FLOAT8_SIGNATURES,
    STREAMED_SIGNATURES,
    ceil_div,
    instance,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.stream import INDEXED, flags, overlapped, starting

THREADS_OF_A_UNIT = 1024
# Blocks on a multiprocessor that have a row each: of 128 threads for unaligned rows, of 256 for
# aligned ones, where a few rows more than a wave begin while others end.
SMALL_BLOCKS, LARGE_BLOCKS = 9, 4.3
SHORT = 320  # vectors of unaligned rows, in whose turns idle lanes count


def _threads(params: Params) -> int:
    return 128 if params["lanes"] == 128 else 256


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    threads, lanes, rows = _threads(params), params["lanes"], params["rows"]
    template = type_arguments(problem), threads, lanes, rows, params["unroll"], flags(problem)
    grid = (ceil_div(problem.m, threads // lanes * rows), min(problem.batch, 65_535), 1)
    return (Step(instance("streamed_rows", *template), grid, (threads, 1, 1)),)


def _most_of_float8(problem: Problem) -> int:
    """Return the most loads in flight of float8, whose x takes registers, and so do its halves."""
    return 4 if ITEMSIZE[problem.b] <= 2 else 2


def _may_be(problem: Problem, params: Params) -> bool:
    """Whether a lane has 2 or 4 loads in flight, of rows that it can keep apart.

    Unaligned rows are shared by warps or blocks; a warp takes several that begin at the same place
    of a vector, whose neighbours go to the other warps of its block: 8 of halves, not 16 of bytes.
    """
    shape = (params["rows"], params["unroll"])
    if problem.a in FLOAT8 and (shape[0] > 1 or shape[1] > _most_of_float8(problem)):
        return False
    if problem.alignment == 16:
        return shape in ((1, 2), (1, 4)) or (params["lanes"], *shape) == (32, 4, 1)
    if shape == (1, 2):
        return bool(params["lanes"] >= 32)
    several = shape in ((2, 2), (4, 1)) and ITEMSIZE[problem.a] > 1
    return bool(params["lanes"] == 32 and (several or (shape == (1, 4) and problem.a == "float32")))


def _chain(problem: Problem, params: Params) -> int:
    vector = 16 // ITEMSIZE[problem.a]
    turns = ceil_div(problem.n, vector * params["lanes"]) + 2
    return turns * vector + 5 + int(params["lanes"]) // 32


def _unaligned(problem: Problem, machine: Machine, vectors: int, rows: int) -> tuple[int, int, int]:
    """Return lanes, rows and loads in flight for rows that are not aligned to 16 bytes.

    One H200 (November 2026), us, one row a warp and several: 8191 x 1025 halves 6.7 and 5.9, floats
    10.5 and 9.7; 20001 x 129 halves 7.6 and 4.2. 4095 x 4095 floats by 2 loads 18.4, by 4 17.9. A
    row a warp and a row a block of 128: 2200 x 8002 halves 13.4 and 11.0, floats 700 x 4001 9.9 and
    5.2, 4095 x 10001 40.7 and 41.7. By 128 and by 256 threads: 991 x 20707 halves 12.6 and 13.7,
    575 x 38391 16.3 and 14.1. By a warp and by 128: 277 x 905 bfloat16 2.5 and 2.2.
    """
    if vectors > 128 and rows < 16 * machine.units:
        return _block_of_unaligned(machine, vectors, rows), 1, 2
    if vectors > 64 and rows <= 4 * machine.units:
        return 128, 1, 2
    if ITEMSIZE[problem.a] > 1 and rows >= (16 if vectors <= 32 else 32) * machine.units:
        return _many_unaligned(machine, vectors, rows)
    if (vectors > 512 and rows < 20 * machine.units) or (
        vectors >= 1000 and rows < 26 * machine.units
    ):
        return 128, 1, 2
    return 32, 1, 4 if problem.a == "float32" and vectors > 512 else 2


def _block_of_unaligned(machine: Machine, vectors: int, rows: int) -> int:
    """Return the threads of a block that has an unaligned row to itself.

    One H200 (November 2026), us by 128 and by 256 threads, of which nine and four blocks are on a
    multiprocessor: 87 x 2634 bfloat16 2.6 and 2.2, 616 x 11979 6.7 and 6.1, 740 x 22399 floats 19.9
    and 21.0, 890 x 23745 halves 13.5 and 14.7, 1174 x 64314 floats 76 and 84, 1200 x 45235, one
    wave and twelve blocks more, 73 and 61.
    """
    units = machine.units
    few = (rows <= 4 * units and vectors >= 256) or (rows <= 5 * units and vectors > 1024)
    beyond_a_wave = SMALL_BLOCKS * units < rows <= (SMALL_BLOCKS + 1) * units and vectors > 2048
    return 256 if few or beyond_a_wave else 128


def _many_unaligned(machine: Machine, vectors: int, rows: int) -> tuple[int, int, int]:
    """Return the same where warps take several rows each, or a block of 128 threads one.

    The last wave of blocks decides: 9000 x 5531 halves take 31.1 us by two rows a warp, a wave and
    a bit, 27.4 by four; 6000 x 2401 floats 15.7 and 18.2, 17.9 by blocks; 19345 x 2495 doubles
    94.5, 102 and 91. So do lanes without work in a turn, of 32 vectors by four rows a warp and of
    64 by two: 38391 x 575 bfloat16 15.6 by four rows, 17.7 by two; 23575 x 331 7.6 and 7.1.
    """
    if vectors <= 32:
        return 32, 4, 1

    def cost(several: int) -> float:
        turn = 128 // several
        idle = ceil_div(vectors, turn) * turn / vectors - 1 if vectors <= SHORT else 0.0
        waves = rows / (8 * several) / (4 * machine.units)
        if waves > 1:
            return (1 + 0.25 * (math.ceil(waves) / waves - 1)) * (1 + 0.4 * idle)
        least = 0.6 if several == 2 else 0.5
        return (1 + 0.4 * max(0.0, least / waves - 1)) * (1 + 0.4 * idle)

    costs = {
        # Of long rows this goes first: where waves are as full, 30000 x 1121 halves take 19.4 us
        # and 21.2; of short ones the next: 42215 x 349 halves take 11.7 and 11.0.
        (32, 4, 1): cost(4) * (1.04 if vectors <= SHORT else 1.0),
        (32, 2, 2): cost(2),
        (128, 1, 2): math.inf if vectors <= SHORT else 1.13 if vectors <= 800 else 1.02,
    }
    return min(costs, key=costs.__getitem__)


def _aligned(machine: Machine, vectors: int, rows: int) -> tuple[int, int, int]:
    """Return lanes, rows and loads in flight for rows that are aligned to 16 bytes.

    One H200 (November 2026), us by 128 and by 256 lanes, four loads each: 6 x 1478 doubles 2.4 and
    1.9, 55 x 6864 bfloat16 2.6 and 2.1; 715 x 3538 doubles, more than a wave of large blocks, 6.8
    and 7.1, 689 x 252640 halves 83.6 and 99.8; 2422 x 8008 doubles 38.7 and 36.8. By 32 lanes and
    by 8: 256783 x 72 doubles 46.3 and 37.4, 23022 x 44 4.3 and 3.7. By four loads and by two, which
    leave fewer lanes without work: 5800 x 1104 halves 6.4 and 5.6, 74242 x 352 doubles 51 and 48.
    """
    units = machine.units
    if vectors <= 16:
        return 8, 1, 2
    if vectors <= 64 and rows < 64 * units:
        return 32, 1, 2
    if vectors <= 24 or 32 < vectors <= 40:
        return 8, 1, 4 if vectors <= 32 else 2
    if vectors <= 64:
        return 32, 4, 1
    if vectors <= 128 or (vectors <= 340 and rows >= 12 * units):
        idle = ceil_div(vectors, 128) * 128 > 1.3 * vectors
        return 32, 1, 2 if vectors > 128 and idle and rows >= 40 * units else 4
    one_wave = rows <= LARGE_BLOCKS * units
    if one_wave or (vectors > 2048 and rows > 8 * units):
        return 256 if vectors >= 512 else 128, 1, 4
    return 128, 1, 4


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Give a row as many lanes as its vectors keep busy, four loads each where it is long."""
    vectors = problem.n * ITEMSIZE[problem.a] // 16
    rows = problem.m * problem.batch
    # One H200 (November 2026), the best of all sets over 60 shapes and dtypes; what this picks is
    # within 1 % of that in the geometric mean.
    if problem.alignment != 16:
        lanes, several, unroll = _unaligned(problem, machine, vectors, rows)
    else:
        lanes, several, unroll = _aligned(machine, vectors, rows)
    if problem.a in FLOAT8:
        several, unroll = 1, min(several * unroll, _most_of_float8(problem))
    params = {"lanes": lanes, "rows": several, "unroll": unroll}
    return Suggestion(params, _seconds(problem, machine, params))


TURN_US = 0.58


def _seconds(problem: Problem, machine: Machine, params: Params) -> float:
    """Return the modelled time: a start, and the bytes or the turns, whichever takes longer.

    One H200 (November 2026), fitted to 264 shapes from 4 x 4 to 131,072 rows or columns: what plans
    choose by this and its likes is 0.5 % (A x) behind the best of all measured.
    """
    threads = _threads(params)
    turns = ceil_div(problem.n * ITEMSIZE[problem.a], 16 * params["lanes"] * params["unroll"])
    blocks = problem.batch * ceil_div(problem.m, threads // params["lanes"] * params["rows"])
    waves = blocks * threads / (machine.units * THREADS_OF_A_UNIT)
    # A block that has an unaligned row to itself reads as much of x as of A, twice.
    slower = {128: 0.88, 256: 0.82} if problem.alignment != 16 else {}
    rate = slower.get(params["lanes"], 0.977)
    reading = problem.compulsory_bytes / (rate * machine.read_bytes_per_s)
    if problem.alignment != 16 and params["lanes"] == 128:
        begun = blocks / (SMALL_BLOCKS * machine.units)
        reading *= 1 + 0.25 * (math.ceil(begun) / begun - 1) if begun > 1 else 1
    # Unaligned rows have heads and tails, each a load of its own, and those of several rows add up.
    ends_us = 0.0 if problem.alignment == 16 else 0.65 if params["rows"] == 1 else 1.2
    turn_us = 0.66 if params["lanes"] == 256 and problem.alignment == 16 else TURN_US
    waiting = 1e-6 * (turn_us * (turns * max(1.0, waves) - 1) + ends_us * waves)
    together = overlapped if params["lanes"] == 256 else max
    return starting(problem, machine, -0.32, 0.75) + together(reading, waiting)


RUNG = CudaRung(
    title="Streamed rows",
    idea="Several 16-byte loads in flight a lane; from 8 lanes to a block share a row.",
    source="Little's law; Hopper GEMV kernels of SGLang and vLLM",
    signatures=(*STREAMED_SIGNATURES, *FLOAT8_SIGNATURES),
    arithmetic=sums(_chain),
    after="warp_vector",
    params={"lanes": (256, 128, 32, 8), "rows": (1, 4, 2), "unroll": (2, 4, 1)},
    constraints=(
        INDEXED,
        Constraint(
            "rows x unroll is 1 x 2, 1 x 4, or 4 x 1 by 32 lanes; for unaligned rows 1 x 2, "
            "or 2 x 2, 4 x 1, of floats 1 x 4 by 32 lanes; of float8 one row, by float32 1 x 2",
            _may_be,
        ),
    ),
    batched=True,
    suggest=suggest,
    steps=_steps,
    sends=True,
)
