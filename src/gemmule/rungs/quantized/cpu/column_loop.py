"""A quantised matrix times a matrix in plain loops: that of one vector for every column."""

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

    def core(parts: Stored, B: NDArray[Any], C: NDArray[Any]) -> None:
        kernel = loop_kernel(kind_of(parts, working), transposed)
        kernel(matrix_of(parts), address(B), B.shape[1], address(C))

    return bound(core, working)


RUNG = CpuRung(
    title="Unpack in a loop, for every column",
    idea="The plain loop once for every column of B.",
    source="the definition w = scale * (code - zero)",
    op="matmul",
    signatures=ALL_SIGNATURES,
    arithmetic=float_arithmetic(),
    after="unpack_loop",
    branch="several columns",
    quantized=True,
    accepts_quant=takes_row,
    suggest=read_time(0.015, alone=True),
    bind=_bind,
    available=jit.unavailable,
)
