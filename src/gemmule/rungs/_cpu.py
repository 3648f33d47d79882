"""What the CPU rungs of floats and integers share: signatures, working dtypes, cost model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.problem import FLOAT8, HALVES, INTEGERS, Problem
from gemmule.rung import Arithmetic, Machine, Params, Signature, floats, integers

FLOAT_SIGNATURES: tuple[Signature, ...] = floats("float64", "float32", "float16", "bfloat16")
SIGNATURES: tuple[Signature, ...] = (*FLOAT_SIGNATURES, *integers())
FLOAT8_SIGNATURES: tuple[Signature, ...] = tuple(
    (a, b, out) for a in FLOAT8 for b in FLOAT8 for out in ("float32", "float16", "bfloat16")
)

# Seconds from Python into a compiled kernel and back, serial and parallel (EPYC Zen 5, 2 cores,
# 2026-11): three addresses at 1.7 us each, Numba's dispatch; then waking the threads.
SERIAL_CALL_S = 7e-6
PARALLEL_CALL_S = 14e-6


def working_dtype(a: str, x: str, out: str) -> str:
    """Return the dtype that products are formed and summed in.

    Halves work in float32. 8-bit integers sum in int32 when the result is int32; all other
    integers in 64 bits, modulo 2^64, where signed and unsigned sums have the same bits.
    """
    if a in INTEGERS:
        return "int32" if out == "int32" else "int64"
    return "float64" if "float64" in (a, x) else "float32"


def problem_working_dtype(problem: Problem) -> str:
    """Return `working_dtype` of a problem's signature."""
    return working_dtype(problem.a, problem.b, problem.out)


def summed(chain: Callable[[Problem, Params], int]) -> Callable[[Problem], Arithmetic]:
    """Return the `arithmetic` of a rung that sums in the working dtype, along `chain` additions."""

    def arithmetic(problem: Problem) -> Arithmetic:
        working = problem_working_dtype(problem)
        return Arithmetic(accumulator=working, chain=chain, product=working)

    return arithmetic


def whole_reduction(problem: Problem, params: Params) -> int:
    """Return the longest chain when nothing is known of the order: every term in one sum."""
    return max(problem.reduction, 1)


def address(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array's first element."""
    return array.ctypes.data


def batch_step(array: np.ndarray[Any, Any], dimensions: int) -> int:
    """Return the bytes between batch entries of an operand whose entries have `dimensions`."""
    return array.strides[0] if array.ndim > dimensions else 0


def is_half(problem: Problem) -> bool:
    """Whether the matrix holds float16 or bfloat16."""
    return problem.a in HALVES


def streaming_s(problem: Problem, machine: Machine, share: float, cached_share: float) -> float:
    """Return the time to move a problem's bytes at a share of the machine's read ceiling.

    `cached_share` counts when everything fits in the last-level cache; it may exceed 1.
    """
    fits = problem.compulsory_bytes <= machine.cache_bytes // 2
    rate = (cached_share if fits else share) * machine.read_bytes_per_s
    return problem.compulsory_bytes / rate


# Multiplications and additions per second of one core in the packed matmul (EPYC Zen 5, 2026-11).
_PACKED_RATES = {"float32": 1e11, "float64": 5e10, "int32": 5e10, "int64": 2e10}
_COPY_BYTES_PER_S = 5e9  # packing and converting, one core


def packed_rate(problem: Problem) -> float:
    """Return operations per second of one core in the packed matmul of a problem."""
    return _PACKED_RATES[problem_working_dtype(problem)]


def copy_s(problem: Problem) -> float:
    """Return the time of one pass over the operands and the result of a matmul, on one core."""
    return problem.compulsory_bytes / _COPY_BYTES_PER_S
