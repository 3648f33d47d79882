"""Few columns in one launch, on FP64 tensor cores: both operands are copied as they lie.

At 4096 x 4096 it counts how a kernel begins and ends, so there is no packing before this one: a
warp copies its chunks of both operands into a ring of its own, columns in rows as well as along the
sum, and meets the others once, at the end. What is unaligned, strided or past an edge is copied
element by element by the same kernel.

Floats are multiplied as doubles. Hopper's tensor cores do as many multiply-adds of doubles a second
as its ordinary units do of floats, by a thirty-second of the instructions; a lane has an eighth of
the sums and shares none, so that nothing is added up over lanes. What is added is exact but for the
last bits of a double: a sum of floats carries little more than the rounding of its result. The
conversions, some 50 a turn and lane, are what that costs.

Blocks begin at different chunks: those that read the same columns at the same time wait for each
other in the L2, 3 % of the time of 16 columns. 2, 4, 8, 12 and 16 columns of floats in rows take
1.05, 1.06, 1.08, 1.16 and 1.17 times as long as one at 4096 x 4096, of doubles 1.02 to 1.10.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step, floats
from gemmule.rungs._cuda import few
from gemmule.rungs._cuda.geometry import CTYPE, ceil_div, instance, modelled
from gemmule.rungs._cuda.rows import sums
from gemmule.rungs._cuda.terms import beside
from gemmule.rungs._cuda.tiles import ANY_ORDER

MOST_STAGES, LEAST_WARPS = {8: 3, 4: 4}, 4
HELD = {16: 24, 32: 16, 64: 12}  # warps on a multiprocessor, by their registers
RESERVED = 1024  # bytes of shared memory that the system keeps of each block's


def _stage_bytes(problem: Problem, params: Params) -> int:
    """Return what a warp keeps of both operands for a turn, as the kernel's Layout says."""
    width = few.width_of(problem)
    padded = width if width == 2 or few.seen(problem).columns_along_k else width + 2
    return 16 * int(params["pieces"]) * (int(params["rows"]) + padded)


def _warps_and_stages(problem: Problem, params: Params, machine: Machine) -> tuple[int, int]:
    """Return what shared memory has room for: two stages of 4 warps at least (a constraint)."""
    resident, stage = int(params["resident"]), _stage_bytes(problem, params)
    room = machine.shared_bytes // resident - RESERVED
    warps = 4 if (params["rows"] == 64 and resident > 1) or 16 * stage > room else 8
    return warps, max(2, min(MOST_STAGES[params["pieces"]], room // (warps * stage)))


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    view, width, rows = few.seen(problem), few.width_of(problem), params["rows"]
    warps, stages = _warps_and_stages(problem, params, machine)
    shape = warps, rows, width, params["pieces"], stages, params["resident"]
    template = CTYPE[view.matrix], *shape, view.turned, view.columns_along_k
    grid, smem = (few.slabs(problem, rows, width), 1, 1), warps * stages
    smem *= _stage_bytes(problem, params)
    return (Step(instance("few_columns_unpacked", *template), grid, (32 * warps, 1, 1), smem),)


def _chain(problem: Problem, params: Params) -> int:
    """Return the additions of a sum: of floats those of the warps' parts, which alone are rounded.

    Each part is rounded to a float once, and what its doubles lose is less than another rounding.
    """
    view, most_warps = few.seen(problem), 8
    if problem.a == "float32":
        return most_warps + 2
    chunk = int(params["pieces"]) * view.lanes
    return ceil_div(ceil_div(view.k, chunk), LEAST_WARPS) * chunk + most_warps + 1


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    view, width, pieces = few.seen(problem), few.width_of(problem), params["pieces"]
    warps, stages = _warps_and_stages(problem, params, machine)
    turns = ceil_div(view.k, pieces * view.lanes * warps)
    held = machine.shared_bytes // (warps * stages * _stage_bytes(problem, params) + RESERVED)
    at_once = max(1, min(held, HELD[params["rows"]] // warps))
    shape = few.slabs(problem, params["rows"], width), at_once, turns
    parts = view.n % width != 0 or (problem.alignment < 16 and not view.columns_along_k)
    steps = max(1.0, shape[0] / machine.units) * view.k * width
    tile = params["rows"], ceil_div(width, 8) * 8, pieces * view.lanes
    terms = few.streaming(problem, machine, shape, tile)
    alone, many = {"turned_s": float(view.turned)}, {"launched_s": shape[0]}
    return beside(terms, alone, many, {}, {"part_s": parts * steps})


RUNG = CudaRung(
    title="Few columns, unpacked",
    idea="One launch: each warp copies its part of both as they lie; floats multiply as doubles.",
    source="own; PTX ISA: mma.sync of doubles",
    signatures=floats("float32", "float64"),
    arithmetic=sums(_chain),
    after="few_columns_tensor",
    branch="operands in any order, one launch",
    params={"rows": (32, 16, 64), "resident": (1, 2), "pieces": (8, 4)},
    constraints=(
        few.STREAMED,
        few.FITS,
        Constraint(
            "no floats under precision='ieee', which means plain multiply-adds",
            lambda problem, params: problem.a == "float64" or problem.precision != "ieee",
        ),
        Constraint(
            "16 rows: two blocks a multiprocessor",
            lambda problem, params: params["rows"] != 16 or params["resident"] == 2,
        ),
        Constraint(
            "64 rows: 8 pieces of 16 bytes a turn",
            lambda problem, params: params["rows"] != 64 or params["pieces"] == 8,
        ),
    ),
    # Elsewhere doubles run at a small part of floats' rate.
    archs=("sm_80", "sm_90a", "sm_100a"),
    steps=_steps,
    **ANY_ORDER,
    **modelled("matmul/few_columns_unpacked", _terms),
)
