"""NumPy's BLAS: ``gemv`` in the four types it has.

Chosen for small float32 and float64. What OpenBLAS cuts among its threads it is as fast at as the
memory, but it waits for each of them: beside other busy processes a product of 0.04 ms takes 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.blas_threads import shares_vectors
from gemmule.backends.cpu.calls.blas import gemv
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion, same
from gemmule.rungs import _cpu


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``; a strided matrix is copied by NumPy."""

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        if problem.layout_a == "strided":
            A = np.ascontiguousarray(A)  # as np.dot does: NumPy's own loops are slow, and sum apart
        # np.dot copies a matrix with gaps between its rows.
        _cpu.QUIET.run(np.dot if A.flags.forc else np.matmul, A, x, y)

    def run_batch(
        A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]
    ) -> None:
        if problem.layout_a == "strided":
            A = np.ascontiguousarray(A)  # NumPy's matvec has slow loops for strides BLAS lacks
        _cpu.QUIET.run(np.matvec, A, x, y)

    def run_column(
        A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]
    ) -> None:
        # Here np.dot calls axpy, which does nothing for x = 0: then Inf * 0 gave 0, not NaN.
        _cpu.QUIET.run(np.matmul, A, x, y)

    if problem.batch != 1:
        return run_batch
    return run_column if problem.n == 1 else run


def fresh(problem: Problem) -> Callable[..., Any] | None:
    """Return np.dot, which is no ufunc and so costs a call less."""
    quiet, dot = _cpu.QUIET, np.dot
    return (lambda A, x: quiet.run(dot, A, x)) if min(problem.m, problem.n) > 1 else None


def job(problem: Problem, params: Params, A: np.ndarray[Any, Any], x: Any) -> Job | None:
    """Return the product of one vector as what a builtin function is bound to."""
    return gemv(A)


def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
    """Expect the read rate; what a batch costs beyond that was measured by OpenBLAS."""
    if problem.layout_a == "strided":
        return None  # the plan's own copy shows in explain()
    calls = machine.rates.blas_call * (1 + (problem.batch - 1) / 4)
    return Suggestion({}, calls + _cpu.streaming_s(problem, machine, 0.95))


RUNG = CpuRung(
    title="BLAS",
    idea="The vendor's tuned gemv, through NumPy.",
    source="BLAS gemv (Lawson et al. 1979; Dongarra et al. 1988), OpenBLAS in NumPy's wheels",
    signatures=same("float32", "float64", "complex64", "complex128"),
    layouts=("row", "col", "strided"),
    arithmetic=_cpu.blas_arithmetic,
    branch="the vendor's library",
    batched=True,
    vendor=True,
    waits=lambda problem, machine: machine.units > 1 and shares_vectors(problem.m, problem.n),
    suggest=suggest,
    bind=bind,
    job=job,
    fresh=fresh,
)
