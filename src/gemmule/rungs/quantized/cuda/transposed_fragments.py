"""x A and A^T x over codes in fragment order, without a second copy of the weights.

Seen transposed the sum runs down the rows of the stored matrix, and each row brings its own scale:
it belongs to x, and there are as many scaled vectors as groups. The instruction has 8 columns for
them. A scaled x is a float32, which no operand of the tensor cores holds; its high, middle and low
8 bits are three bfloat16 that hold it exactly, so that nothing is rounded on the way to the float32
sums. `movmatrix` turns the codes, four at a time in each 16 bits, before they become numbers: one
for each instruction that multiplies.
"""

from __future__ import annotations

from gemmule.core.architectures import SINCE_AMPERE
from gemmule.core.device_model import Terms
from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, CudaRung, Machine, Params, Step
from gemmule.rungs._cuda import fragments
from gemmule.rungs._cuda.geometry import ceil_div, flat, modelled
from gemmule.rungs._cuda.rows import Steps
from gemmule.rungs._cuda.terms import streaming


def strips(problem: Problem, params: Params) -> int:
    """Return how many blocks (or clusters) share the columns."""
    return ceil_div(fragments.tiles_across(problem.m, problem), params["across"] * params["tiles"])


def steps(kernel: str) -> Steps:
    """Return the `steps` of a transposed rung: a block (or cluster) a strip and column of X.

    Template arguments: those of all fragments, then the parameters.
    """
    names = "across", "down", "tiles", "rows", "ahead", "cluster"

    def launch(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
        own = (str(params[name]) for name in names if name in params)
        template = ", ".join((fragments.template(problem), *own))
        cluster, threads = params.get("cluster", 1), 32 * params["across"] * params["down"]
        count = strips(problem, params) * cluster * (problem.n if problem.op == "matmul" else 1)
        return (flat(f"{kernel}<{template}>", count, threads, cluster=(cluster, 1, 1)),)

    return launch


def chain(problem: Problem, params: Params) -> int:
    """Count the rows of a warp (16 products an instruction), three parts, warps and blocks."""
    turns = ceil_div(ceil_div(problem.reduction, 16), params["down"] * params.get("cluster", 1))
    return int(16 * (turns + params["rows"]) + 8 + params["down"] + params.get("cluster", 1))


def terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Read again for each column of X."""
    columns, cluster = (problem.n if problem.op == "matmul" else 1), params.get("cluster", 1)
    turns = ceil_div(problem.reduction, 16 * params["rows"] * params["down"] * cluster)
    shape = strips(problem, params) * cluster * columns, 2, turns
    again = problem.matrix_bytes * (columns - 1) / machine.read_bytes_per_s
    small = fragments.split(problem) if fragments.shift(problem) <= 0 else 0
    waves = max(1.0, shape[0] / (shape[1] * machine.units))
    busy = {f"form_s {fragments.form(problem)}": waves * turns, "group_s": waves * turns * small}
    busy["wave_s"] = waves
    return streaming(problem, machine, shape, str(params["across"]), {}, {"again": again}, busy)


RUNG = CudaRung(
    title="Fragments, transposed",
    idea="Codes are turned in registers; x takes the scales and three columns of an instruction.",
    archs=SINCE_AMPERE,
    source="PTX ISA: movmatrix, mma.sync; exact splitting of float32 into three bfloat16",
    op="matvec",
    after="fragment_codes",
    branch="across the rows",
    params={"across": (2, 1), "down": (8,), "tiles": (2,), "rows": (4,), "ahead": (0, 1)},
    constraints=(
        fragments.FITS,
        Constraint(
            "8 warps that load ahead, 16 that do not",
            lambda problem, params: params["across"] + params["ahead"] == 2,
        ),
    ),
    steps=steps("transposed_fragments"),
    spills=True,  # the widest of its shapes keep a few registers in memory
    **fragments.along(chain, transposed=True),
    **modelled("quantized/transposed_fragments", terms),
)
