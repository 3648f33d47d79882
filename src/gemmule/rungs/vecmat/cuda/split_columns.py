"""Split columns: few columns and very many rows, split over the whole grid.

A cluster has eight blocks at most, too few for a tall matrix. Where it has too few columns for one
wave of strips, any number of blocks of the grid share the rows of a strip; each writes its partial
sums to the workspace, and a second kernel adds them up in a fixed order: no atomics, nothing to
zero, the same bits on every run. The second launch starts early (programmatic dependent launch).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gemmule.core.device_model import Numbers
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import stream
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    FLOAT8_SIGNATURES,
    STREAMED_SIGNATURES,
    accumulator,
    ceil_div,
    instance,
    lies,
    modelled,
    starts_early,
    type_arguments,
)
from gemmule.rungs._cuda.rows import sums, sums_of
from gemmule.storage.models import numbers


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    lanes, splits = params["lanes"], params["splits"]
    template = type_arguments(problem), lanes, params["unroll"], stream.flags(problem)
    read, add = (
        instance("split_columns", *template),
        instance("add_splits", CTYPE[problem.out], splits),
    )
    blocks, block = ceil_div(problem.m, 32) * problem.batch, (256, 1, 1)
    return (
        Step(read, (stream.strips(problem, lanes), splits, problem.batch), block),
        Step(add, (blocks, 1, 1), block, pdl=starts_early(machine)),
    )


def _chain(problem: Problem, params: Params) -> int:
    walkers = params["splits"] * (256 // params["lanes"])
    rows = stream.rows_of_a_thread(problem, walkers, params["unroll"])
    return rows + 5 + 8 + int(params["splits"]) // 8 + 9


HUGE_BYTES = 2**30
SPLITS = (8, *range(4, 8), *range(9, 33), 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def _splits(problem: Problem, own: Numbers, lanes: int) -> Iterable[int]:
    """Return the splits that have about a turn of rows for each of a block's threads.

    Fewer rows than a thread has loads under way are not worth a block.
    """
    most = int(problem.n * lanes / (256 * 4 * own["least_of_a_turn"]))
    even = problem.alignment != 16 and ITEMSIZE[problem.a] == 1
    return (s for s in SPLITS if s <= max(min(SPLITS), most) and not (even and s % 2))


def _is_small(problem: Problem, own: Numbers) -> bool:
    """Tell whether sums take longer than what was fitted to larger matrices says."""
    small = problem.batch * problem.matrix_bytes < own["small_bytes"]
    return bool(small and problem.n <= own["small_rows"])


def _is_large(problem: Problem, own: Numbers) -> bool:
    """Tell whether many waves of strips are best: of huge matrices, or large ones of doubles."""
    doubles = ITEMSIZE[problem.a] == 8 and problem.matrix_bytes > own["large_bytes"]
    return problem.alignment == 16 and (problem.matrix_bytes > HUGE_BYTES or doubles)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Split so that one wave of blocks fills the chip, where there are rows for all of them."""
    own = numbers(machine, "vecmat/split_columns")
    if _is_large(problem, own):  # narrow strips of huge ones are a little ahead
        lanes = 8 if problem.matrix_bytes > HUGE_BYTES else 32
        blocks, wanted = stream.strips(problem, lanes) * problem.batch, own["many_blocks_of_a_unit"]
        splits = min(SPLITS, key=lambda s: abs(s * blocks - wanted * machine.units))
        return [{"lanes": lanes, "unroll": 4, "splits": splits}]
    if _is_small(problem, own):
        splits = 8 if problem.n < own["few_rows"] else 16
        return [{"lanes": 8, "unroll": 4, "splits": splits}]
    wide = (32, 8) if stream.strips(problem, 8) > 1 else (8,)
    return [
        {"lanes": lanes, "unroll": 4, "splits": splits}
        for lanes in sorted(wide)
        for splits in sorted(_splits(problem, own, lanes))
    ]


def _fill(problem: Problem, params: Params, machine: Machine, own: Numbers) -> tuple[float, float]:
    """Return which share of the chip's speed the blocks have, and how often they fill it.

    Four blocks of aligned rows are on a multiprocessor at a time, three of unaligned ones.
    """
    blocks = stream.strips(problem, params["lanes"]) * problem.batch * params["splits"]
    full = blocks / (machine.units * own["at_once"][lies(problem)])
    fill = 1.0
    if full <= 1:
        fill = min(own["one_wave"] + (1 - own["one_wave"]) * full, 2 * full)
    elif full <= 4:
        fill = full / math.ceil(full)
    each = blocks / machine.units  # some multiprocessors have a block more
    if 1 < each <= 2:
        fill *= (each / math.ceil(each)) ** own["uneven"]
    return fill, full


def _rate(problem: Problem, params: Params, own: Numbers) -> float:
    """Return the share of the read ceiling that full waves of blocks reach."""
    rate, size = own["rate"], ITEMSIZE[problem.a]
    if problem.alignment != 16:
        doubles = stream.unaligned_doubles(problem, own)
        kind = "narrow" if params["lanes"] == 8 else "doubles" if doubles else "wide"
        rate *= own["unaligned"][kind]
        if problem.n < own["few_turns_rows"] and size == 2:
            rate *= own["heads_of_halves"]  # few turns, in which nothing hides the heads
    filled = min(1.0, problem.m * size / (16 * params["lanes"])) ** own["filled"]
    return float(rate * max(own["least_filled"], filled))


def _seconds(problem: Problem, params: Params, machine: Machine) -> float:
    """Add up a start, what bytes or turns take, and the sums of all splits."""
    own, splits = numbers(machine, "vecmat/split_columns"), params["splits"]
    start = stream.starting(problem, machine, own)
    if _is_small(problem, own) and not _is_large(problem, own):
        narrow = problem.m * ITEMSIZE[problem.a] < 16
        return float(start + own["small_s"] + (stream.narrow_s(problem, own) if narrow else 0.0))
    fill, full = _fill(problem, params, machine, own)
    rate = _rate(problem, params, own) * fill * machine.read_bytes_per_s
    turns = ceil_div(problem.n * params["lanes"], splits * 256 * 4)
    added = 2 * problem.m * problem.batch * splits * ITEMSIZE[accumulator(problem)]
    reading = problem.compulsory_bytes / rate + own["adding"] * added / machine.read_bytes_per_s
    start += own["two_launches_s"] + own["split_s"] * splits + stream.narrow_s(problem, own)
    if problem.compulsory_bytes < stream.FILLED_BYTES:
        start += own["unfilled_s"]
    return float(start + max(reading, own["turn_s"] * (turns * max(1, full) - 1)))


RUNG = CudaRung(
    title="Split columns",
    idea="Many blocks share the rows of a strip; a second kernel adds their sums in fixed order.",
    source="split-K, deterministic: a workspace and a fixed-order reduction",
    signatures=(*STREAMED_SIGNATURES, *FLOAT8_SIGNATURES),
    arithmetic=sums(_chain),
    layouts=("col",),
    after="block_columns",
    branch="few columns, longer sums",
    params={"lanes": (32, 8, 256), "unroll": (8, 4), "splits": SPLITS},
    constraints=(
        stream.FITS,
        stream.UNITS_OF_ROWS,
        Constraint(
            "an even number of splits for unaligned rows of bytes",
            lambda problem, params: (
                problem.alignment == 16 or ITEMSIZE[problem.a] > 1 or params["splits"] % 2 == 0
            ),
        ),
        Constraint(
            "4 loads in flight a lane for unaligned rows and elements of 8 bytes",
            lambda problem, params: (
                params["unroll"] == 4 or (problem.alignment == 16 and ITEMSIZE[problem.a] < 8)
            ),
        ),
    ),
    workspace=sums_of("splits"),
    batched=True,
    steps=_steps,
    **modelled(_choices, _seconds),
)
