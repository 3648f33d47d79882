"""NumPy's BLAS: ``gemm`` in the four types it has.

Kept for small and thin float32 and float64 products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.calls.blas import gemm
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion, same
from gemmule.rungs import _cpu

# The largest result for which a call of np.dot is cheaper than one of np.matmul: it writes zeros
# before the product, on one thread, a seventh of the time that 16 take for 1024 x 1024.
_CLEARED_BYTES = 16 << 10


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, B, C)``; strided operands are copied, as NumPy's own loops are slow."""
    copies = (problem.layout_a == "strided", problem.layout_b == "strided")
    plain = problem.batch == 1 and min(problem.m, problem.n, problem.k) > 1 and not any(copies)
    quick = plain and problem.m * problem.n * ITEMSIZE[problem.out] <= _CLEARED_BYTES
    quiet, matmul, dot = _cpu.QUIET, np.matmul, np.dot  # a look-up costs a call 0.05 us

    def run(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> None:
        left = np.ascontiguousarray(A) if copies[0] else A
        right = np.ascontiguousarray(B) if copies[1] else B
        quiet.run(matmul, left, right, C)

    def run_plainly(
        A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]
    ) -> None:
        quiet.run(matmul, A, B, C)

    def run_quickly(
        A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]
    ) -> None:
        # No ufunc, so a call costs less. It takes whole rows of C alone, and clears them first.
        if C.flags.carray:
            quiet.run(dot, A, B, C)
        else:
            run_plainly(A, B, C)

    if any(copies):
        return run
    return run_quickly if quick else run_plainly


def fresh(problem: Problem) -> Callable[..., Any] | None:
    """Return what multiplies matrices without gaps: np.dot, which clears C, where that is small."""
    if min(problem.m, problem.n, problem.k) < 2:
        return None
    small = problem.m * problem.n * ITEMSIZE[problem.out] <= _CLEARED_BYTES
    quiet, multiply = _cpu.QUIET, np.dot if small else np.matmul
    return lambda A, B: quiet.run(multiply, A, B)


def job(problem: Problem, params: Params, A: np.ndarray[Any, Any], B: Any) -> Job | None:
    """Return the product as what a builtin function is bound to."""
    return gemm(A, B)


# Time of an operation for that of a float32 one; a complex product is four real ones.
_SLOWER = {"float32": 1, "float64": 2, "complex64": 4, "complex128": 8}
_SERIAL_FLOPS = 2e6  # OpenBLAS stays on one core below about 100^3


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect BLAS's rate, or the time to read the operands."""
    if "strided" in (problem.layout_a, problem.layout_b):
        return None  # the plan's own copy shows in explain()
    rates, work = machine.rates, problem.flops * _SLOWER[problem.a]
    threads = machine.units if work > _SERIAL_FLOPS * problem.batch else 1
    busy = work / (rates.blas * threads / machine.units)
    moving = problem.compulsory_bytes / machine.read_bytes_per_s
    calls = rates.blas_call * (1 + (problem.batch - 1) / 2)
    return Suggestion({}, calls + max(busy, moving))


RUNG = CpuRung(
    title="BLAS",
    idea="The vendor's tuned gemm, through NumPy.",
    source="BLAS gemm (Dongarra et al. 1990), OpenBLAS in NumPy's wheels",
    signatures=same("float32", "float64", "complex64", "complex128"),
    layouts=("row", "col", "strided"),
    layouts_b=("row", "col", "strided"),
    arithmetic=_cpu.blas_arithmetic,
    branch="the vendor's library",
    batched=True,
    vendor=True,
    suggest=suggest,
    bind=bind,
    job=job,
    fresh=fresh,
)
