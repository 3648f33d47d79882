"""Streamed rows: enough independent 16-byte loads in flight to keep the memory busy.

A matvec reads its matrix once and computes next to nothing, so its speed is the number of bytes
under way: about 25 KB per multiprocessor on an H200. Each lane issues `unroll` times `rows` loads
before it uses the first, past the L1 (nothing is read twice) and without a predicate: rows past
the end repeat the last one. Several warps share a row, so that short matrices fill the chip too.
Rows of any alignment are read by aligned vectors that a funnel shift joins.
"""

from __future__ import annotations

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


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    rows_per_block = params["groups"] * params["rows"]
    shape = ", ".join(str(params[name]) for name in ("warps", "groups", "rows", "unroll"))
    flags = ", ".join(str(f).lower() for f in (problem.alignment == 16, problem.batch > 1))
    return (
        Step(
            kernel=f"streamed_rows<{type_arguments(problem)}, {shape}, {flags}>",
            grid=(ceil_div(problem.m, rows_per_block), min(problem.batch, 65_535), 1),
            block=(32 * params["warps"] * params["groups"], 1, 1),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    lanes = 16 // ITEMSIZE[problem.a]
    vectors = ceil_div(problem.n, lanes * 32 * params["warps"])
    return (vectors + 2) * lanes + 5 + int(params["warps"])


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Share rows among more warps until the grid covers the chip, then take more rows a warp."""
    vectors = problem.n * ITEMSIZE[problem.a] // 16
    rows = problem.m * problem.batch
    # The best of all declared sets at 512 to 16384 and at tall and wide shapes on one H200
    # (November 2026): warps, groups, rows, unroll. A lane's loads must find vectors to load.
    many = rows >= 64 * machine.units
    if problem.alignment != 16:
        choice = (1, 4, 1, 2) if many else (4, 1, 1, 2)
    elif vectors <= 32:
        choice = (1, 4, 4, 1)
    elif vectors <= 64:
        choice = (1, 8, 2, 2) if many else (1, 8, 1, 2)
    elif vectors < 512:
        choice = (1, 4, 2, 2) if many else (4, 1, 2, 1)
    else:
        choice = (8, 1, 1, 2)
    warps, groups, several, unroll = choice
    params = {"warps": warps, "groups": groups, "rows": several, "unroll": unroll}
    blocks = ceil_div(rows, groups * several)
    stream_s = problem.compulsory_bytes / (0.97 * machine.read_bytes_per_s)
    # Too few blocks leave multiprocessors idle, and one block has 16 KB under way, not 32.
    stream_s /= min(1.0, blocks / (2 * machine.units))
    return Suggestion(params, machine.call_s + stream_s)


RUNG = Rung(
    title="Streamed rows",
    idea="Several 16-byte loads in flight a lane, without a predicate; warps share rows.",
    source="Little's law; Hopper GEMV kernels of SGLang and vLLM",
    op="matvec",
    signatures=(
        *floats("float16", "bfloat16", "float32", "float64"),
        *(s for s in integers() if s[2] == "int32"),
    ),
    arithmetic=lambda problem: Arithmetic(accumulator=accumulator(problem), chain=_chain),
    layouts=("row",),
    after="thread_per_row",
    params={"warps": (8, 4, 1), "groups": (1, 4, 8), "rows": (2, 1, 4), "unroll": (1, 2)},
    constraints=(
        Constraint("m and n below 2^31", lambda problem, params: max(problem.m, problem.n) < 2**31),
        Constraint(
            "blocks of 4 or 8 warps, which share one row or take one each",
            lambda problem, params: (
                params["warps"] * params["groups"] in (4, 8)
                and 1 in (params["warps"], params["groups"])
            ),
        ),
        Constraint(
            "2 to 4 loads in flight a lane (rows x unroll)",
            lambda problem, params: 2 <= params["rows"] * params["unroll"] <= 4,
        ),
        Constraint(
            "2 loads in flight a lane for unaligned rows",
            lambda problem, params: (
                problem.alignment == 16 or (params["rows"], params["unroll"]) == (1, 2)
            ),
        ),
    ),
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
