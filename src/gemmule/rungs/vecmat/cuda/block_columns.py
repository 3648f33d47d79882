"""Block columns: the product across the rows of a row-major matrix, without copy or atomics.

Results that lie side by side are summed over rows a whole leading dimension apart. Each lane keeps
the sums of one 16-byte vector of columns, so every load is coalesced; the threads of a block walk
the rows of its strip, 8 loads in flight each, and their sums meet in shared memory, always in the
same order. A strip is as wide as leaves the chip one wave of blocks: from 32 bytes, which is what
the memory fetches at least, or half of it where the chip would be idle otherwise, to 4 KB.
"""

from __future__ import annotations

import math

from gemmule.problem import ITEMSIZE, Problem
from gemmule.rung import (
    Arithmetic,
    Constraint,
    Machine,
    Params,
    Rung,
    Step,
    Suggestion,
    floats,
    integers,
)
from gemmule.rungs._cuda import accumulator, ceil_div, type_arguments
from gemmule.rungs._stream import A_WARP_A_ROW, FITS, UNALIGNED, flags, starting, strips


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    threads, lanes = params["threads"], params["lanes"]
    return (
        Step(
            kernel=f"block_columns<{type_arguments(problem)}, {threads}, {lanes}, 8, "
            f"{flags(problem)}>",
            grid=(strips(problem, lanes), problem.batch, 1),
            block=(threads, 1, 1),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    threads, lanes = int(params["threads"]), int(params["lanes"])
    return ceil_div(problem.n, threads // lanes) + 5 + threads // 32


# One H200 (November 2026), fitted to 264 shapes and dtypes: the share of the read ceiling that
# strips of so many 16-byte vectors reach, the bytes a multiprocessor must have under way, and how
# far beyond its fair share one can go where others are idle.
EFFICIENCY = {1: 0.5, 2: 0.66, 4: 0.84, 8: 0.97, 32: 1.0, 256: 1.0}
BYTES_UNDER_WAY = 40_000
BEYOND_SHARE = 1.6
THREADS_OF_A_UNIT = 768


def _seconds(problem: Problem, machine: Machine, params: Params) -> float:
    """Return the modelled time: a start, and the bytes or the turns, whichever takes longer."""
    lanes, threads = params["lanes"], params["threads"]
    there = strips(problem, lanes) * problem.batch / machine.units
    at_once = THREADS_OF_A_UNIT // threads
    turns = ceil_div(problem.n * lanes, threads * 8)
    under_way = min(max(1.0, there), at_once) * min(threads, problem.n * lanes) * 128
    fill = min(1.0, BEYOND_SHARE * there, under_way / BYTES_UNDER_WAY)
    rate = EFFICIENCY[lanes] * fill * machine.read_bytes_per_s
    rate *= 1.0 if problem.alignment == 16 else UNALIGNED
    folding_us = 0.03 * math.log2(max(1.0, 32 / lanes)) + 0.04 * (threads == 512)
    waiting = 0.54e-6 * (turns * max(1.0, there / at_once) - 1)
    start = starting(problem, machine, folding_us - 0.4, 0.67)
    return start + float(max(problem.compulsory_bytes / rate, waiting))


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Take the strips that the model likes best: one wave of blocks, as wide as that allows."""
    seconds, _, params = min(
        (_seconds(problem, machine, params), which, params)
        for which, params in enumerate(RUNG.space(problem))
    )
    return Suggestion(params, seconds)


RUNG = Rung(
    title="Block columns",
    idea="A lane sums one 16-byte vector of columns; a block walks all rows of its strip.",
    source="column panels as in BLAS",
    op="matvec",
    signatures=(
        *floats("float16", "bfloat16", "float32", "float64"),
        *(s for s in integers() if s[2] == "int32"),
    ),
    arithmetic=lambda problem: Arithmetic(accumulator=accumulator(problem), chain=_chain),
    layouts=("col",),
    after="col_thread_per_row",
    params={"lanes": (8, 2, 4, 32, 1, 256), "threads": (512, 256)},
    constraints=(
        FITS,
        A_WARP_A_ROW,
        Constraint(
            "256 threads for 256 lanes",
            lambda problem, params: params["lanes"] != 256 or params["threads"] == 256,
        ),
        Constraint(
            "512 threads for unaligned rows of bytes",
            lambda problem, params: (
                problem.alignment == 16 or ITEMSIZE[problem.a] > 1 or params["threads"] == 512
            ),
        ),
    ),
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
