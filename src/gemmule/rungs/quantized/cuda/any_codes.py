"""Any quantised matrix, code by code.

Takes what no other rung does: groups of any size, permuted columns, either direction, every layout,
float64. It finds each code, its group and its column anew, which costs tens of instructions for a
weight; the memory waits. What is fast has to agree with it.
"""

from __future__ import annotations

from gemmule.core.device_model import Terms
from gemmule.core.problem import FLOAT4_DTYPE, Problem
from gemmule.core.rung import (
    Arithmetic,
    Constraint,
    CudaRung,
    Machine,
    Params,
    Signature,
    Step,
)
from gemmule.rungs._cuda.geometry import CTYPE, accumulator, ceil_div, modelled

SIGNATURES: tuple[Signature, ...] = tuple(
    (a, x, out)
    for a in ("uint4", "uint8", FLOAT4_DTYPE)
    for x, out in (
        ("float32", "float32"),
        ("float16", "float16"),
        ("float16", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float64", "float64"),
    )
)


def template(problem: Problem) -> str:
    """Return the template arguments."""
    spec = problem.codes
    types = f"{CTYPE[problem.b]}, {CTYPE[problem.out]}, {CTYPE[spec.scale_dtype]}"
    flags = ", ".join(str(f).lower() for f in (spec.layout == "row", spec.transposed))
    return f"{types}, {spec.bits}, {flags}"


def blocks(problem: Problem) -> int:
    """Return the blocks of one column of x."""
    transposed = problem.quant is not None and problem.quant.transposed
    return ceil_div(problem.m, 32 if transposed else 8)


def _steps(problem: Problem, params: Params, machine: Machine) -> tuple[Step, ...]:
    kernel = f"any_codes<{template(problem)}>"
    return (Step(kernel=kernel, grid=(blocks(problem), 1, 1), block=(32, 8, 1)),)


def chain(problem: Problem, params: Params) -> int:
    """Count a thread's products, then lanes or warps."""
    transposed = problem.quant is not None and problem.quant.transposed
    return ceil_div(problem.reduction, 8 if transposed else 32) + 8


def takes(problem: Problem) -> bool:
    """Tell whether the matrix is quantised and x is not."""
    spec = problem.quant
    return spec is not None and problem.batch == 1 and spec.activations == "float"


def terms(problem: Problem, params: Params, machine: Machine) -> Terms:
    """Count the weights of a multiprocessor, and those of a block, whose sums may be long."""
    columns = problem.n if problem.op == "matmul" else 1
    transposed = problem.quant is not None and problem.quant.transposed
    alone = (32 if transposed else 8) * problem.reduction
    together = problem.m * problem.reduction * columns / machine.units
    return {"start_s": 1.0}, {"alone_s": alone}, {"weight_s": together}


RUNG = CudaRung(
    title="Any codes",
    idea="Each code is found where it lies, with its group and its column: nothing is refused.",
    source="our own",
    op="matvec",
    signatures=SIGNATURES,
    arithmetic=lambda problem: Arithmetic(accumulator(problem), chain=chain),
    constraints=(
        Constraint("fewer than 2^31 blocks", lambda problem, params: blocks(problem) < 2**31),
    ),
    accepts_quant=takes,
    steps=_steps,
    **modelled("quantized/any_codes", terms),
)
