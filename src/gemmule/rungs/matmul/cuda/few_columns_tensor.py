"""Few columns on tensor cores: an instruction for 8 columns costs what one column costs.

Sixteen columns of halves are more multiply-adds than the ordinary units can do while the matrix
streams by; `mma.sync` has them to spare. Its fragments want a lane's steps of the reduction apart,
but any order of the steps gives the same sum: each lane loads 16 neighbouring bytes of its rows
straight from global memory into the registers of two instructions, and of the columns in the same
order. No stage in shared memory, no `ldmatrix`; the warps of a block split the reduction and meet
once, at the end. `pieces` lays pieces of one row where an instruction expects several rows, so that
a load covers 128 bytes of a row instead of 64: that alone takes 10 % off. Up to four aligned
columns of unit stride (the rows of X in X W^T) are read as they lie, others are packed first.
Float64 by 8 x 8 x 4 instructions, bytes exactly.
"""

from __future__ import annotations

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import few
from gemmule.rungs._cuda.geometry import (
    CTYPE,
    accumulator,
    ceil_div,
    instance,
    modelled,
    starts_early,
)
from gemmule.rungs._cuda.tiles import ANY_ORDER


def _columns(problem: Problem, params: Params) -> int:
    """Return how many columns a block computes: what whole instructions hold."""
    held = 8 // int(params["pieces"])
    return ceil_div(few.width_of(problem), held) * held


def _direct(problem: Problem) -> bool:
    """Tell whether columns are read as they lie: packed, more of them take fewer of the L1's lines.

    Four columns of halves are quicker as they lie, eight packed; of doubles packing pays from 3 on.
    """
    view = few.seen(problem)
    most = 2 if view.matrix == "float64" else 4
    return problem.alignment == 16 and view.columns_along_k and view.n <= most


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    view, direct, columns = few.seen(problem), _direct(problem), _columns(problem, params)
    warps, tiles, unroll, pieces = (params[n] for n in ("warps", "tiles", "unroll", "pieces"))
    types = (CTYPE[t] for t in (view.matrix, view.columns, problem.out))
    shape = warps, tiles, unroll, pieces, columns * pieces // 8
    product = Step(
        kernel=instance("few_columns_tensor", *types, *shape, view.turned, direct),
        grid=(few.slabs(problem, 16 * tiles // pieces, columns), 1, 1),
        block=(32 * warps, 1, 1),
        pdl=not direct and starts_early(machine),
    )
    return (product,) if direct else few.after_packing(problem, columns, 4 * pieces, product)


def _workspace(problem: Problem, params: Params, machine: Machine) -> int:
    if _direct(problem):
        return 0
    return few.packed_bytes(problem, _columns(problem, params), 4 * params["pieces"])


def _chain(problem: Problem, params: Params) -> int:
    view = few.seen(problem)
    steps = 4 * view.lanes  # of a lane's row in one chunk
    chunks = ceil_div(ceil_div(view.k, steps * params["pieces"]), params["warps"])
    return int((chunks + params["unroll"] + 1) * steps + params["warps"] * params["pieces"])


def _matching(problem: Problem, params: Params) -> bool:
    view = few.seen(problem)
    return (view.matrix, view.columns) != ("int8", "uint8")


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    view, columns, pieces = few.seen(problem), _columns(problem, params), params["pieces"]
    warps, rows = params["warps"], 16 * params["tiles"] // pieces
    turns = view.k * ITEMSIZE[view.matrix] / (64 * pieces * warps * params["unroll"])
    shape = few.slabs(problem, rows, columns), 16 // warps, turns
    tile, packed = (rows, columns, 4 * pieces * view.lanes), _workspace(problem, params, machine)
    return few.streaming(problem, machine, shape, tile, packed)


RUNG = CudaRung(
    title="Few columns on tensor cores",
    idea="Fragments straight from global memory: the order of the steps within a sum is free.",
    archs=SINCE_AMPERE,
    source="PTX ISA: mma.sync; skinny products on tensor cores as in Marlin (Frantar et al., 2024)",
    signatures=(
        *((t, t, out) for t in ("float16", "bfloat16") for out in (t, "float32")),
        ("float64", "float64", "float64"),
        *((a, b, "int32") for a in ("int8", "uint8") for b in ("int8", "uint8")),
    ),
    # Tensor cores align the products of halves in an instruction and cut off; float64 they round.
    arithmetic=lambda problem: Arithmetic(
        accumulator=accumulator(problem),
        chain=_chain,
        per_add=2.0 if accumulator(problem) == "float32" else 1.0,
    ),
    after="few_columns",
    params={"warps": (4, 8), "tiles": (2, 1), "unroll": (2, 1, 4), "pieces": (2, 1, 4)},
    constraints=(
        few.STREAMED,
        few.FITS,
        Constraint("not int8 rows with uint8 columns: no instruction has that pair", _matching),
        Constraint(
            "4 or 8 loads in flight a lane (2 x tiles x unroll)",
            lambda problem, params: params["tiles"] * params["unroll"] in (2, 4),
        ),
        Constraint(
            "at most 4 instructions for a vector of A, of float64 in 16 rows",
            lambda problem, params: (
                _columns(problem, params) * params["pieces"]
                <= (32 if problem.a != "float64" or params["tiles"] == 1 else 16)
            ),
        ),
    ),
    workspace=_workspace,
    steps=_steps,
    **ANY_ORDER,
    **modelled("matmul/few_columns_tensor", _terms),
)
