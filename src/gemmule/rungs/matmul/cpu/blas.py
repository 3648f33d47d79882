"""NumPy's BLAS: ``gemm`` in the four types it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.problem import Problem
from gemmule.rung import Arithmetic, Machine, Params, Rung, Suggestion, same
from gemmule.rungs import _cpu


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, B, C)``; strided operands are copied, as NumPy's own loops are slow."""
    copies = (problem.layout_a == "strided", problem.layout_b == "strided")

    def run(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> None:
        left = np.ascontiguousarray(A) if copies[0] else A
        right = np.ascontiguousarray(B) if copies[1] else B
        np.matmul(left, right, out=C)

    return run


def arithmetic(problem: Problem) -> Arithmetic:
    """A BLAS sums in its dtype, in an order of its own; a complex product is two additions."""
    complex_ = problem.a.startswith("complex")
    return Arithmetic(
        accumulator=problem.a,
        chain=lambda p, params: max(p.reduction, 1) * (2 if complex_ else 1),
        product=problem.a,
    )


# Operations per second of one core in OpenBLAS 0.3.31 (EPYC Zen 5, 2026-11).
_RATES = {"float32": 6.5e10, "float64": 4e10, "complex64": 6.5e10, "complex128": 4e10}


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect OpenBLAS's rate on all cores, four real products for a complex one."""
    work = problem.flops * (4 if problem.a.startswith("complex") else 1)
    calls = 2e-6 + 1e-6 * (problem.batch - 1)
    return Suggestion({}, calls + work / (_RATES[problem.a] * machine.units))


RUNG = Rung(
    title="BLAS",
    idea="The vendor's tuned gemm, through NumPy.",
    source="BLAS gemm (Dongarra et al. 1990), OpenBLAS in NumPy's wheels",
    op="matmul",
    signatures=same("float32", "float64", "complex64", "complex128"),
    layouts=("row", "col", "strided"),
    layouts_b=("row", "col", "strided"),
    arithmetic=arithmetic,
    batched=True,
    suggest=suggest,
    bind=bind,
)
