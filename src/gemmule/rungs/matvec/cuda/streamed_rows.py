"""Streamed rows: enough independent 16-byte loads in flight to keep the memory busy.

Adds to `warp_vector`: as many lanes share a row, and as many loads are in flight, as the shape
needs to fill the chip. A matvec reads its matrix once and computes next to nothing, so its speed is
the number of bytes under way. By Little's law that is bandwidth times latency, about 25 KB per
multiprocessor with HBM3. Each lane issues `unroll` times `rows` loads before it uses the first,
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
from collections.abc import Iterable

from gemmule.core.problem import FLOAT8, ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda.geometry import (
    FLOAT8_SIGNATURES,
    STREAMED_SIGNATURES,
    ceil_div,
    instance,
    lies,
    modelled,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.stream import INDEXED, flags, overlapped, starting
from gemmule.storage.models import numbers


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


def _form(problem: Problem, machine: Machine, vectors: int, rows: int) -> tuple[int, int, int]:
    """Return the lanes and rows of a warp or block, and the loads in flight.

    The first of the model's rules that holds says so, each for so many vectors and rows of a
    multiprocessor: as many lanes as keep busy, four loads each where rows are long. Where there are
    waves of unaligned rows, warps may take several.
    """
    own = numbers(machine, "matvec/streamed_rows")
    if problem.alignment != 16 and ITEMSIZE[problem.a] > 1:
        least = own["several_from"]["short" if vectors <= 32 else "long"]
        if rows >= least * machine.units:
            return _many_unaligned(machine, vectors, rows)
    for rule in own["forms"][lies(problem)].values():
        below = rows < rule.get("rows_below", math.inf) * machine.units
        if (
            rule.get("vectors", 0) <= vectors <= rule.get("vectors_to", math.inf)
            and rule.get("rows", 0) * machine.units <= rows
            and below
        ):
            return rule["lanes"], rule["each"], rule["loads"]
    long = problem.a == "float32" and vectors > own["long_floats"]
    return 32, 1, 4 if long else 2


def _many_unaligned(machine: Machine, vectors: int, rows: int) -> tuple[int, int, int]:
    """Return the same where warps take several rows each, or a block of 128 threads one.

    The last wave of blocks decides; so do lanes without work in a turn of short rows, of 32 vectors
    by four rows a warp and of 64 by two.
    """
    if vectors <= 32:
        return 32, 4, 1
    own = numbers(machine, "matvec/streamed_rows")["several"]
    short = vectors <= own["short"]

    def cost(several: int) -> float:
        turn = 128 // several
        idle = own["idle"] * (ceil_div(vectors, turn) * turn / vectors - 1) if short else 0.0
        waves = rows / (8 * several) / (4 * machine.units)
        if waves > 1:
            return float((1 + own["uneven"] * (math.ceil(waves) / waves - 1)) * (1 + idle))
        less = own["unfilled"] * max(0.0, own["least_wave"][several] / waves - 1)
        return float((1 + less) * (1 + idle))

    block = own["block"]["usual" if vectors <= own["block"]["vectors"] else "long"]
    costs = {
        # Of long rows this goes first, where waves are as full; of short ones the next.
        (32, 4, 1): cost(4) * (own["four_short"] if short else 1.0),
        (32, 2, 2): cost(2),
        (128, 1, 2): math.inf if short else block,
    }
    return min(costs, key=costs.__getitem__)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Give a row as many lanes as its vectors keep busy, four loads each where it is long."""
    vectors = problem.n * ITEMSIZE[problem.a] // 16
    lanes, several, unroll = _form(problem, machine, vectors, problem.m * problem.batch)
    if problem.a in FLOAT8:
        several, unroll = 1, min(several * unroll, _most_of_float8(problem))
    yield {"lanes": lanes, "rows": several, "unroll": unroll}


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    """Add up a start, and the bytes or the turns, whichever takes longer."""
    own, lying = numbers(machine, "matvec/streamed_rows"), lies(problem)
    threads, lanes = _threads(params), params["lanes"]
    turns = ceil_div(problem.n * ITEMSIZE[problem.a], 16 * lanes * params["unroll"])
    blocks = problem.batch * ceil_div(problem.m, threads // lanes * params["rows"])
    waves = blocks * threads / (machine.units * own["threads_of_a_unit"])
    # A block that has an unaligned row to itself reads as much of x as of A, twice.
    rate = own["block_rate"].get(lanes) if lying == "unaligned" else None
    reading = problem.compulsory_bytes / ((rate or own["rate"]) * machine.read_bytes_per_s)
    if lying == "unaligned" and lanes == 128:
        begun = blocks / (own["small_blocks"] * machine.units)
        reading *= 1 + own["uneven"] * (math.ceil(begun) / begun - 1) if begun > 1 else 1
    # Unaligned rows have heads and tails, each a load of its own, and those of several rows add up.
    ends_s = 0.0 if lying == "aligned" else own["ends_s"]["one" if params["rows"] == 1 else "more"]
    turn_s = own["turn_s"]["block" if lanes == 256 and lying == "aligned" else "usual"]
    waiting = turn_s * (turns * max(1.0, waves) - 1) + ends_s * waves
    together = overlapped if lanes == 256 else max
    return float(starting(problem, machine, own) + together(reading, waiting))


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
    steps=_steps,
    sends=True,
    **modelled(_choices, _seconds),
)
