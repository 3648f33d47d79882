"""Block columns: the product across the rows of a row-major matrix, without copy or atomics.

Results that lie side by side are summed over rows a whole leading dimension apart. Each lane keeps
the sums of one 16-byte vector of columns, so every load is coalesced; the threads of a block walk
the rows of its strip, 8 loads in flight each, and their sums meet in shared memory, always in the
same order. A strip is as wide as leaves the chip one wave of blocks: from 32 bytes, which is what
the memory fetches at least, to 512.
"""

from __future__ import annotations

from gemmule.problem import ITEMSIZE, Problem
from gemmule.rung import (
    Arithmetic,
    Machine,
    Params,
    Rung,
    Step,
    Suggestion,
    floats,
    integers,
)
from gemmule.rungs._cuda import accumulator, ceil_div, type_arguments
from gemmule.rungs._stream import FITS, flags, strips


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


# One H200 (November 2026), fitted to 60 shapes and dtypes: the share of the read ceiling that
# strips of so many 16-byte vectors reach, the bytes a multiprocessor must have under way, and how
# far beyond its fair share one can go where others are idle.
EFFICIENCY = {2: 0.6, 4: 0.82, 8: 0.95, 32: 0.985}
BYTES_UNDER_WAY = 40_000
BEYOND_SHARE = 1.43


def _seconds(problem: Problem, machine: Machine, lanes: int, threads: int) -> float:
    """Return the modelled time of streaming the matrix by strips of `lanes` vectors."""
    there = strips(problem, lanes) * problem.batch
    aligned, size = problem.alignment == 16, ITEMSIZE[problem.a]
    load = 128 if aligned else 64 if size <= 2 else 8 * size
    under_way = max(1.0, there / machine.units) * threads * load
    spread = BEYOND_SHARE * min(1.0, there / machine.units)
    fill = min(1.0, spread, under_way / BYTES_UNDER_WAY)
    rate = EFFICIENCY[lanes] * fill * machine.read_bytes_per_s * (1.0 if aligned else 0.85)
    return problem.compulsory_bytes / rate


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Take the strips that leave the chip enough blocks, as wide as that allows."""
    # Fewer strips than a third of the chip leave too much of it idle, unless there is no choice.
    choices = [(8, 512), (8, 256), (2, 256), (4, 512), (4, 256), (32, 512), (32, 256)]
    if problem.alignment != 16:
        choices = choices[-2:]
    enough = [
        (lanes, threads)
        for lanes, threads in choices
        if 3 * strips(problem, lanes) * problem.batch >= machine.units
    ]
    seconds, lanes, threads = min(
        (_seconds(problem, machine, lanes, threads), -lanes, threads)
        for lanes, threads in enough or choices
    )
    if not enough:
        seconds *= 2.0
    params = {"lanes": -lanes, "threads": threads}
    return Suggestion(params, machine.call_s + 0.3e-6 + seconds)


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
    params={"lanes": (8, 2, 4, 32), "threads": (512, 256)},
    constraints=(FITS,),
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
