"""x A and A^T x over codes in fragment order, without a second copy of the weights.

Seen transposed the sum runs down the rows of the stored matrix, and each row brings its own scale:
it belongs to x, and there are as many scaled vectors as groups. The instruction has 8 columns for
them. A scaled x is a float32, which no operand of the tensor cores holds; its high, middle and low
8 bits are three bfloat16 that hold it exactly, so that nothing is rounded on the way to the float32
sums. `movmatrix` turns the codes, four at a time in each 16 bits, before they become numbers: one
for each instruction that multiplies.
"""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, Constraint, CudaRung, Machine, Params, Step, Suggestion
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import ceil_div


def strips(problem: Problem, params: Params) -> int:
    """Return how many blocks (or clusters) share the columns."""
    return ceil_div(fragments.tiles_across(problem.m, problem), params["across"] * params["tiles"])


def template(problem: Problem, params: Params) -> str:
    """Return the template arguments that both transposed rungs begin with."""
    shape = ", ".join(str(params[name]) for name in ("across", "down", "tiles", "rows", "ahead"))
    return f"{fragments.template(problem)}, {shape}"


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    return (
        Step(
            kernel=f"transposed_fragments<{template(problem, params)}>",
            grid=(strips(problem, params), 1, 1),
            block=(32 * params["across"] * params["down"], 1, 1),
        ),
    )


def chain(problem: Problem, params: Params) -> int:
    """Count the rows of a warp (16 products an instruction), three parts, warps and blocks."""
    turns = ceil_div(ceil_div(problem.reduction, 16), params["down"] * params.get("cluster", 1))
    return int(16 * (turns + params["rows"]) + 8 + params["down"] + params.get("cluster", 1))


def suggest(problem: Problem, machine: Machine, params: Params) -> Suggestion:
    """Expect the read ceiling where blocks fill the chip."""
    blocks = strips(problem, params) * params.get("cluster", 1)
    fill = min(1.0, blocks / machine.units)
    seconds = problem.compulsory_bytes / (machine.read_bytes_per_s * max(fill, 1e-3))
    return Suggestion(params, machine.call_s + seconds)


def _suggest(problem: Problem, machine: Machine) -> Suggestion:
    return suggest(problem, machine, {"across": 2, "down": 8, "tiles": 2, "rows": 4, "ahead": 0})


RUNG = CudaRung(
    title="Fragments, transposed",
    idea="Codes are turned in registers; x takes the scales and three columns of an instruction.",
    source="PTX ISA: movmatrix, mma.sync; exact splitting of float32 into three bfloat16",
    op="matvec",
    after="fragment_codes",
    branch="across the rows",
    signatures=fragments.SIGNATURES,
    arithmetic=lambda problem: Arithmetic("float32", chain=chain, per_add=2.0),
    params={"across": (2, 1), "down": (8,), "tiles": (2,), "rows": (4,), "ahead": (0, 1)},
    constraints=(
        fragments.FITS,
        Constraint(
            "8 warps that load ahead, 16 that do not",
            lambda problem, params: params["across"] + params["ahead"] == 2,
        ),
    ),
    quantized=True,
    accepts_quant=lambda problem: fragments.in_fragments(problem, transposed=True),
    suggest=_suggest,
    steps=_steps,
    spills=True,  # the widest of its shapes keep a few registers in memory
)
