"""The plain loop: take a code, make it a weight, multiply, add."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from gemmule.backends.cpu import jit
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Params
from gemmule.rungs.quantized.cpu._operands import (
    ALL_SIGNATURES,
    Run,
    Stored,
    address,
    bound,
    float_arithmetic,
    read_time,
    takes_row,
    working_dtype,
)
from gemmule.rungs.quantized.cpu._plain_kernels import kind_of, loop_kernel, matrix_of


def _bind(problem: Problem, params: Params) -> Run:
    working = working_dtype(problem)
    transposed = problem.quant is not None and problem.quant.transposed

    def core(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
        kernel = loop_kernel(kind_of(parts, working), transposed)
        kernel(matrix_of(parts), address(x), 1, address(y))

    return bound(core, working)


RUNG = CpuRung(
    title="Unpack in a loop",
    idea="One weight at a time: shift and mask its code out of the byte, subtract the zero point, "
    "multiply by the group's scale and by x. It is what the others must agree with.",
    source="the definition w = scale * (code - zero)",
    op="matvec",
    signatures=ALL_SIGNATURES,
    arithmetic=float_arithmetic(),
    quantized=True,
    accepts_quant=takes_row,
    suggest=read_time(0.02, alone=True),
    bind=_bind,
    available=jit.unavailable,
)
