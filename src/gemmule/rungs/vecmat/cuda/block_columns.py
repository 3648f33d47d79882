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

import math
from collections.abc import Iterable

from gemmule.core.device_model import Numbers
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import stream
from gemmule.rungs._cuda.geometry import (
    STREAMED_SIGNATURES,
    ceil_div,
    instance,
    modelled,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums
from gemmule.storage.models import numbers

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


def _fill(problem: Problem, params: Params, machine: Machine, own: Numbers) -> tuple[float, float]:
    """Return which share of the chip's speed the blocks have, and their waves.

    A multiprocessor must have so many bytes under way, and goes so far beyond its fair share of the
    memory's where others are idle.
    """
    lanes, threads = params["lanes"], params["threads"]
    there = stream.strips(problem, lanes) * problem.batch / machine.units
    at_once = max(1, THREADS_OF_A_UNIT // threads)
    under_way = min(max(1.0, there), at_once) * min(threads, problem.n * lanes)
    under_way *= 16 * _in_flight(threads)
    waves, beyond = there / at_once, own["beyond"]
    wide = lanes == 32 and problem.matrix_bytes > own["wide_bytes"]
    fill = min(1.0, beyond["wide" if wide else "narrow" if lanes == 1 else "usual"] * there)
    if waves >= 1:  # the last blocks have the memory to themselves, and cannot use all of it
        part = waves % 1
        fill = waves / (waves - part + (max(part, 1 / beyond["usual"]) if part else 0))
    return min(fill, under_way / own["under_way_bytes"]), waves if waves > 4 else math.ceil(waves)


def _rate(problem: Problem, params: Params, own: Numbers) -> float:
    """Return the share of the read ceiling that strips reach where they fill the chip."""
    lanes, threads, rate = params["lanes"], params["threads"], own["rate"][params["lanes"]]
    if problem.alignment != 16:
        several = lanes == 32 and threads < 1024 and problem.n >= own["several_rows"]
        wide = "doubles" if stream.unaligned_doubles(problem, own) else "wide"
        rate *= own["unaligned"][wide if several else "usual"]
    elif lanes <= 8 and problem.matrix_bytes > own["large_bytes"]:
        rate *= own["large_narrow"]
    return float(rate)


def _start_s(problem: Problem, params: Params, machine: Machine, own: Numbers) -> float:
    """Return what is beside reading: large blocks start later, wide strips fold less."""
    threads, folds = params["threads"], math.log2(max(1.0, 32 / params["lanes"]))
    later = own["fold_s"] * folds + own["later_s"].get(threads, 0.0)
    if problem.alignment != 16:
        later += own["unaligned_s"]
        if ITEMSIZE[problem.a] == 8 and threads == 512:
            later -= own["fewer_doubles_s"]
    narrow = stream.narrow_s(problem, own)
    if problem.m * ITEMSIZE[problem.a] >= 16:  # a turn or two of small matrices hide it
        narrow *= min(1.0, problem.matrix_bytes / own["hidden_bytes"])
    return float(stream.starting(problem, machine, own) + later + narrow)


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    """Add up a start, and the bytes or the turns, whichever takes longer."""
    own = numbers(machine, "vecmat/block_columns")
    lanes, threads = params["lanes"], params["threads"]
    fill, waves = _fill(problem, params, machine, own)
    rate = _rate(problem, params, own) * fill * machine.read_bytes_per_s
    one_wave = waves <= 1 and problem.alignment == 16
    if threads == 1024 and one_wave and ITEMSIZE[problem.a] == 2:
        rate *= own["large_blocks_of_halves"]
    turns = ceil_div(problem.n * lanes, threads * _in_flight(threads))
    alone = 2 * threads > THREADS_OF_A_UNIT  # nothing is under way between a block and the next
    between = own["between_s"] * max(0, math.ceil(waves) - 1) if alone else 0.0
    turn_s = own["turn_s"]["wide" if lanes == 32 else "usual"]
    reading = max(problem.compulsory_bytes / rate, turn_s * (turns * waves - 1))
    return _start_s(problem, params, machine, own) + between + float(reading)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    return RUNG.space(problem)


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
    **modelled(_choices, _seconds),
)
