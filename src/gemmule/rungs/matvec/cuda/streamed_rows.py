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

WARPS = 8  # of a block


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    rows_per_block = WARPS // params["warps"] * params["rows"]
    shape = ", ".join(str(params[name]) for name in ("warps", "rows", "unroll"))
    aligned = "true" if problem.alignment == 16 else "false"
    return (
        Step(
            kernel=f"streamed_rows<{type_arguments(problem)}, {shape}, {aligned}>",
            grid=(ceil_div(problem.m, rows_per_block) * problem.batch, 1, 1),
            block=(32 * WARPS, 1, 1),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    lanes = 16 // ITEMSIZE[problem.a]
    vectors = ceil_div(problem.n, lanes * 32 * params["warps"])
    return (vectors + 2) * lanes + 5 + int(params["warps"])


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Take more warps a row until the grid covers the chip; the times are the prototype's model."""
    vectors = problem.n * ITEMSIZE[problem.a] // 16
    warps = 8 if vectors >= 256 else 4 if vectors >= 128 else 1
    rows = 2 if problem.m * problem.batch * warps >= 16 * machine.units * WARPS else 1
    unroll = 2
    if problem.alignment != 16:
        rows = 1
    seconds = problem.compulsory_bytes / (0.97 * machine.read_bytes_per_s) + machine.call_s
    blocks = ceil_div(problem.m * problem.batch * warps, WARPS * rows)
    fill = min(1.0, blocks / machine.units)
    return Suggestion(
        {"warps": warps, "rows": rows, "unroll": unroll},
        machine.call_s + (seconds - machine.call_s) / max(fill, 0.05),
    )


RUNG = Rung(
    title="Streamed rows",
    idea="Several 16-byte loads in flight per lane, past the L1, with no predicate; warps share rows.",
    source="Little's law; anchors: SGLang's and vLLM's Hopper GEMV kernels, our own prototype",
    op="matvec",
    signatures=(
        *floats("float16", "bfloat16", "float32", "float64"),
        *(s for s in integers() if s[2] == "int32"),
    ),
    arithmetic=lambda problem: Arithmetic(accumulator=accumulator(problem), chain=_chain),
    layouts=("row",),
    after="thread_per_row",
    params={"warps": (8, 4, 1), "rows": (2, 1, 4), "unroll": (2, 4)},
    constraints=(
        Constraint(
            "at most 8 loads in flight a lane (rows x unroll)",
            lambda problem, params: params["rows"] * params["unroll"] <= 8,
        ),
        Constraint(
            "at most 2 loads in flight a lane for unaligned rows",
            lambda problem, params: problem.alignment == 16
            or params["rows"] * params["unroll"] == 2,
        ),
    ),
    batched=True,
    suggest=_suggest,
    steps=_steps,
)
