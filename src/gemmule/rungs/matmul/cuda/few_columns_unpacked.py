"""Few columns in one launch, on FP64 tensor cores: both operands are copied as they lie.

At 4096 x 4096 it counts how a kernel begins and ends, so there is no packing before this one: a
warp copies its chunks of both operands into a ring of its own, columns in rows as well as along the
sum, and meets the others once, at the end. What is unaligned, strided or past an edge is copied
element by element by the same kernel.

Floats are multiplied as doubles. Hopper's tensor cores do as many multiply-adds of doubles a second
as its ordinary units do of floats, by a thirty-second of the instructions: a lane reads half as
much of shared memory, has a sixth of the sums, and shares none with other lanes. 16 columns of
floats by fused multiply-adds kept the units busy for 60 % of the time, waited for shared memory in
between, and took half a microsecond to add up over lanes. What is added is exact but for the last
bits of a double, so that a sum of floats carries little more than the rounding of its result.

Blocks begin at different chunks: reading the same columns at the same time, they would wait for
each other in the L2. 2 to 8 columns take 1.05 to 1.09 times as long as one at 4096 x 4096, and what
16 take is how long their copies take and the last turn's conversions.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import (
    Arithmetic,
    Constraint,
    CudaRung,
    Machine,
    Params,
    Step,
    Suggestion,
    floats,
)
from gemmule.rungs._cuda import few
from gemmule.rungs._cuda.geometry import CTYPE, accumulator, ceil_div
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT

PIECES = 8  # of 16 bytes, of a row in a turn
MOST_STAGES, LEAST_WARPS = 3, 4
RESERVED = 1024  # bytes of shared memory that the system keeps of each block's


def _width(problem: Problem) -> int:
    columns = few.seen(problem).n
    return next((w for w in (2, 4, 8, 12) if columns <= w), few.MOST)


def _stage_bytes(problem: Problem, params: Params) -> int:
    """Return what a warp keeps of both operands for a turn, as the kernel's Layout says."""
    width = _width(problem)
    padded = width if width == 2 or few.seen(problem).columns_along_k else width + 2
    return 16 * PIECES * (int(params["rows"]) + padded)


def _warps_and_stages(problem: Problem, params: Params, machine: Machine) -> tuple[int, int]:
    """Return what shared memory has room for: two stages of 4 warps at least (a constraint)."""
    resident, stage = int(params["resident"]), _stage_bytes(problem, params)
    room = machine.shared_bytes // resident - RESERVED
    warps = 4 if (params["rows"] == 64 and resident > 1) or 16 * stage > room else 8
    return warps, max(2, min(MOST_STAGES, room // (warps * stage)))


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    view, width = few.seen(problem), _width(problem)
    warps, stages = _warps_and_stages(problem, params, machine)
    shape = f"{warps}, {params['rows']}, {width}, {stages}, {params['resident']}"
    flags = ", ".join(str(f).lower() for f in (view.turned, view.columns_along_k))
    return (
        Step(
            kernel=f"few_columns_unpacked<{CTYPE[view.matrix]}, {shape}, {flags}>",
            grid=(few.slabs(problem, params["rows"], width), 1, 1),
            block=(32 * warps, 1, 1),
            smem=warps * stages * _stage_bytes(problem, params),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    """Return the additions of a sum: of floats those of the warps' parts, which alone are rounded.

    Each part is rounded to a float once, and what its doubles lose is less than another rounding.
    """
    view, most_warps = few.seen(problem), 8
    if problem.a == "float32":
        return most_warps + 2
    chunk = PIECES * view.lanes
    return ceil_div(ceil_div(view.k, chunk), LEAST_WARPS) * chunk + most_warps + 1


def _shape(problem: Problem, machine: Machine) -> tuple[int, int]:
    """Return rows and resident blocks: 32 rows, but as many blocks as fill the chip."""
    view = few.seen(problem)
    blocks = few.slabs(problem, 32, _width(problem))
    if 2 * blocks <= machine.units:
        return 16, 2
    if blocks <= machine.units or problem.a == "float64":
        return 32, 1
    return (64, 2) if view.m >= 16384 and view.n > 8 else (32, 2)


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Model the time: the matrix at a share of the read ceiling, and a beginning and an end."""
    width, view = _width(problem), few.seen(problem)
    rows, resident = _shape(problem, machine)
    # One H200 (November 2026), floats at 4096 x 4096 and 8192 x 8192 by columns.
    share = {2: 0.975, 4: 0.965, 8: 0.955, 12: 0.92, 16: 0.905}[width]
    ends_s = {2: 0.4e-6, 4: 0.6e-6, 8: 0.8e-6, 12: 1.3e-6, 16: 1.5e-6}[width]
    if not few.rows_aligned(problem) or (view.n % width and not view.columns_along_k):
        share *= 0.3  # an estimate: element by element
    blocks = few.slabs(problem, rows, width)
    share *= min(1.0, blocks / (0.9 * machine.units))
    stream_s = few.stream_s(problem, machine, max(share, 1e-3), width)
    params = {"rows": rows, "resident": resident}
    return Suggestion(params, machine.call_s + ends_s + stream_s)


RUNG = CudaRung(
    title="Few columns, unpacked",
    idea="One launch: each warp copies its part of both as they lie; floats multiply as doubles.",
    source="own; PTX ISA: mma.sync of doubles",
    op="matmul",
    signatures=floats("float32", "float64"),
    arithmetic=lambda problem: Arithmetic(accumulator=accumulator(problem), chain=_chain),
    layouts=EVERY_LAYOUT,
    layouts_b=EVERY_LAYOUT,
    after="few_columns_tensor",
    params={"rows": (32, 16, 64), "resident": (1, 2)},
    constraints=(
        few.STREAMED,
        few.FITS,
        Constraint(
            "16 rows: two blocks a multiprocessor",
            lambda problem, params: params["rows"] != 16 or params["resident"] == 2,
        ),
    ),
    # Elsewhere doubles run at a small part of floats' rate.
    archs=("sm_80", "sm_90a", "sm_100a"),
    batched=True,
    suggest=lambda problem, machine: None,  # until a GPU proved it
    steps=_steps,
)
