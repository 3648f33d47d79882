"""A few columns of x beside codes in fragment order, in one launch: x by way of shared memory.

`fragment_columns` packs x first, which is a launch, and each of its warps brings all of x from the
L2. Here the warps of a block that lie below each other share x: asynchronous copies bring it as it
lies to a ring in shared memory, together with the codes of the turns ahead, and lanes read it there
as operands. What zero points meet, the sums of x, is one more product, by ones. Eight columns fill
an instruction; more of them are more blocks, which read the codes again from the L2: that pays
where all blocks fit on the chip at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import ceil_div, modelled
from gemmule.rungs._cuda.terms import rounds
from gemmule.rungs._cuda.tiles import EVERY_LAYOUT

_COLUMNS = 8  # of an instruction
_DEPTH = 128  # stored columns a turn
_ROWS = 2  # rows of tiles a warp


def _blocks(problem: Problem, params: Params) -> int:
    return ceil_div(problem.m, 16 * _ROWS * params["down"]) * ceil_div(problem.n, _COLUMNS)


def _shared(problem: Problem, params: Params) -> int:
    """Return the bytes of the ring: codes of every warp, x of those that share it."""
    codes = params["down"] * params["along"] * _ROWS * 16 * _DEPTH * fragments.bits(problem) // 8
    of_x = params["along"] * _COLUMNS * _DEPTH * 2
    return int(params["stages"] * (codes + of_x))


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    shape = ", ".join(str(params[name]) for name in ("down", "along", "stages"))
    return (
        Step(
            kernel=f"staged_fragments<{fragments.template(problem)}, {shape}>",
            grid=(_blocks(problem, params), 1, 1),
            block=(32 * params["down"] * params["along"], 1, 1),
            smem=_shared(problem, params),
        ),
    )


def _chain(problem: Problem, params: Params) -> int:
    """Count a turn's products and its sums of x, then the turns of a warp, and the warps."""
    turns = ceil_div(problem.k, _DEPTH * params["along"])
    return int(2 * _DEPTH + 4 * turns + params["along"])


def _accepts(problem: Problem) -> bool:
    return fragments.in_fragments(problem, transposed=False) and fragments.split(problem) < 4


def _terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Wait for blocks one after another; more columns read the codes again, from the L2."""
    again = problem.matrix_bytes * (ceil_div(problem.n, _COLUMNS) - 1) / machine.read_bytes_per_s
    turns = ceil_div(problem.k, _DEPTH * params["along"])
    shape = _blocks(problem, params), 1, turns
    kind = f"{fragments.bits(problem)} {params['down']}"
    taken = ceil_div(shape[0], machine.units) * turns
    split, whole = fragments.split(problem), fragments.whole_vectors(problem)
    small = split if split > 1 else fragments.shift(problem) == 0
    more = {"group_s": taken * small, "crooked_s": taken * (not whole)}
    return rounds(problem, machine, shape, kind, {}, {"again": again}, more)


def _choices(problem: Problem, machine: Machine) -> Iterable[Params]:
    """Take both heights; eights of columns only side by side."""
    if problem.layout_b != "col" or problem.codes.has_perm:
        return []
    few = (p for p in RUNG.space(problem) if _blocks(problem, p) <= machine.units)
    return RUNG.space(problem) if problem.n <= _COLUMNS else few


RUNG = CudaRung(
    title="Fragments and columns in shared memory",
    idea="The rows of a block share x, which asynchronous copies bring ahead as it lies.",
    source="PTX ISA: cp.async, mma.sync; a ring of stages as in CUTLASS",
    op="matmul",
    after="fragment_columns",
    layouts_b=EVERY_LAYOUT,
    params={"down": (2, 1), "along": (8,), "stages": (2, 3)},
    constraints=(
        fragments.FITS,
        Constraint(
            "one warp below another and a stage ahead, or none and two",
            lambda problem, params: params["down"] + params["stages"] == 4,
        ),
    ),
    archs=("sm_80", "sm_90a", "sm_100a"),  # others have less shared memory
    adds=True,
    steps=_steps,
    spills=True,  # groups of a tile keep more scales than there are registers for
    **fragments.along(_chain) | {"signatures": fragments.OF_HALVES, "accepts_quant": _accepts},
    **modelled("quantized/staged_fragments", _terms, _choices),
)
