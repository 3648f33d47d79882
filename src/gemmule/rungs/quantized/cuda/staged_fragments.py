"""A few columns of x beside codes in fragment order, in one launch: x by way of shared memory.

`fragment_columns` packs x first, which is a launch, and each of its warps brings all of x from the
L2. Here the warps of a block that lie below each other share x: asynchronous copies bring it as it
lies to a ring in shared memory, together with the codes of the turns ahead, and lanes read it there
as operands. What zero points meet, the sums of x, is one more product, by ones. Eight columns fill
an instruction; more of them are more blocks, which read the codes again from the L2: that pays
where all blocks fit on the chip at a time.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import ceil_div

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


def _suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Take rows for two warps below each other where such blocks fill the chip nearly.

    One H200 (November 2026): 0.8 us beyond a plain launch, and 1.2 times what the bytes take, half
    as much again for every eight columns more, as long as no block waits for another.
    """
    if problem.layout_b != "col" or fragments.quant(problem).has_perm:
        return None
    params = {"down": 2, "along": 8, "stages": 2}
    lower = {"down": 1, "along": 8, "stages": 3}
    more = ceil_div(problem.n, _COLUMNS) - 1
    fits = not more or _blocks(problem, lower) <= machine.units
    if fits and _blocks(problem, params) < 0.9 * machine.units:
        params = lower
    if more and _blocks(problem, params) > machine.units:
        return None
    reading = problem.compulsory_bytes / machine.read_bytes_per_s
    return Suggestion(params, machine.call_s + 0.8e-6 + 1.2 * reading * (1 + more / 2))


def _accepts(problem: Problem) -> bool:
    return fragments.in_fragments(problem, transposed=False) and fragments.split(problem) == 1


RUNG = CudaRung(
    title="Fragments and columns in shared memory",
    idea="The rows of a block share x, which asynchronous copies bring ahead as it lies.",
    source="PTX ISA: cp.async, mma.sync; a ring of stages as in CUTLASS",
    op="matmul",
    after="fragment_columns",
    signatures=tuple(s for s in fragments.SIGNATURES if s[1] != "float32"),
    layouts_b=("row", "col", "strided"),
    arithmetic=lambda problem: Arithmetic("float32", chain=_chain, per_add=2.0),
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
    quantized=True,
    accepts_quant=_accepts,
    suggest=_suggest,
    steps=_steps,
    spills=True,  # groups of a tile keep more scales than there are registers for
)
