"""Codes in fragment order: the tensor cores multiply them as they are loaded.

Four-bit codes leave a multiprocessor three instructions for each weight at the speed of the memory:
to convert and multiply them one by one takes more. `mma.sync` multiplies 256 of them in one
instruction, and beside float16 they need no conversion: a code masked out of its word is a
subnormal float16 (bfloat16 takes one multiply-add). With layout ``mma16`` a warp's 16-byte loads
bring operands as the instruction wants them. Sums are in float32, zero points meet the sum of x (an
instruction with an operand of ones), so that no weight is ever rounded.

A product with one vector uses one column of the eight that the other operand has. Here they are
eight pieces of x: column q meets the weights of tile q only, which costs nothing, since columns do
not mix, and each lane loads a piece of x, scales and zero points once for eight tiles. A float32 x
takes four of the columns: high, middle and low part in bfloat16, which has all codes exactly.
"""

from __future__ import annotations

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import ceil_div, modelled
from gemmule.rungs._cuda.terms import streaming


def _held(problem: Problem) -> int:
    """Return how many tiles share the columns of an instruction; 0: not even one has room."""
    return 8 // (fragments.split(problem) * (4 if problem.b == "float32" else 1))


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    warps, tiles, rows = params["warps"], params["tiles"], params["rows"]
    return (
        Step(
            kernel=f"fragment_codes<{fragments.template(problem)}, {warps}, {tiles}, {rows}>",
            grid=(ceil_div(problem.m, 16 * rows), 1, 1),
            block=(32 * warps, 1, 1),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    """Count a tile's products, then a lane's tiles, four lanes and the warps."""
    turns = ceil_div(fragments.tiles_across(problem.n, problem), params["warps"])
    return int(2 * fragments.tile_columns(problem) + turns + params["tiles"] + 4 + params["warps"])


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    warps, tiles, rows = params["warps"], params["tiles"], params["rows"]
    turns = fragments.tiles_across(problem.n, problem) / (warps * tiles)
    blocks, floats = ceil_div(problem.m, 16 * rows), problem.b == "float32"
    work = blocks * rows * fragments.tiles_across(problem.n, problem) / machine.units
    names = f"tile_s {fragments.form(problem)}{' floats' * floats}", "group_s"
    small = fragments.split(problem) if fragments.shift(problem) <= 0 else 0
    busy = {names[0]: work, names[1]: work * small, "shared_s": work * small / rows}
    kind = f"{warps} {tiles} {rows}{' floats' * floats}"
    return streaming(problem, machine, (blocks, 16 // warps, turns), kind, {}, {}, {}, busy)


RUNG = CudaRung(
    title="Codes in fragment order",
    idea="Codes are operands of the tensor cores as they are loaded; eight pieces of x meet eight "
    "tiles.",
    archs=SINCE_AMPERE,
    source="PTX ISA: mma.sync; weights in fragment order as in Marlin (Frantar et al., 2024)",
    op="matvec",
    after="int4_codes",
    params={"warps": (8, 4), "tiles": (4, 8), "rows": (1, 2)},
    constraints=(
        fragments.FITS,
        Constraint(
            "whole sets of tiles share the columns of an instruction",
            lambda problem, params: (
                _held(problem) > 0
                and (params["tiles"] % _held(problem) == 0 or params["tiles"] < _held(problem))
            ),
        ),
        Constraint(
            "one of the declared shapes",
            lambda problem, params: (
                (params["warps"], params["tiles"], params["rows"])
                in ((8, 4, 1), (8, 8, 1), (4, 8, 1), (8, 4, 2))
            ),
        ),
    ),
    adds=True,
    steps=_steps,
    sends=True,
    spills=True,  # the widest of its shapes keep a few registers in memory
    **fragments.along(_chain),
    **modelled("quantized/fragment_codes", _terms),
)
