"""Shared words of the CUDA rungs: C++ names of dtypes, grids, signatures."""

from __future__ import annotations

from gemmule.core.problem import Problem
from gemmule.core.rung import Signature, floats, integers

CTYPE = {
    "float64": "double", "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16",
    "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short",
    "int32": "int", "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long",
}  # fmt: skip

# Every float dtype and the mixes a product may meet, and every integer product.
ALL_SIGNATURES: tuple[Signature, ...] = (
    *floats("float32", "float64", "float16", "bfloat16"),
    *integers(),
)


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def type_arguments(problem: Problem) -> str:
    """Return the C++ types of A, of x or B, and of the result, as template arguments."""
    return ", ".join(CTYPE[t] for t in (problem.a, problem.b, problem.out))


def accumulator(problem: Problem) -> str:
    """Return the dtype name of the running sum, as args.cuh's AccOf chooses it."""
    return problem.out if problem.out in ("float64", "int32", "int64", "uint64") else "float32"
