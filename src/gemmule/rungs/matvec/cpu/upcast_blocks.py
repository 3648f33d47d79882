"""Blocks of the matrix are converted to a wider dtype and multiplied there by NumPy.

It works without a compiler; blocks fit the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.core.problem import Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_convert import widened


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, x, y)``."""
    working = np.dtype(_cpu.problem_working_dtype(problem))
    rows = max(params["block_bytes"] // max(problem.n * working.itemsize, 1), 1)
    # np.dot scales a single column by axpy, which does nothing for x = 0: Inf * 0 gave 0, not NaN.
    multiply = np.matmul if problem.n == 1 else np.dot

    def run(A: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
        vector = x.astype(working, copy=False)
        with np.errstate(all="ignore"):
            for first in range(0, problem.m, rows):
                block = widened(A[first : first + rows], working)
                np.copyto(y[first : first + rows], multiply(block, vector), casting="unsafe")

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the conversion's speed and the product's: NumPy's integer loops add one at a time."""
    rates, working = machine.rates, np.dtype(_cpu.problem_working_dtype(problem))
    elements = problem.batch * problem.m * problem.n
    from_cache = rates.core_cached * machine.units / working.itemsize
    products = elements / (from_cache if working.kind == "f" else rates.fma / 64)
    calls = 10 * problem.batch * rates.blas_call
    return Suggestion({}, calls + elements / rates.convert + products)


RUNG = CpuRung(
    title="Upcast blocks",
    idea="A block that fits the cache is converted to the working dtype; then NumPy's dot.",
    source="for machines without a compiler; the measure of what conversion costs",
    signatures=(*_cpu.SIGNATURES, *_cpu.FLOAT8_SIGNATURES),
    layouts=("row", "col"),
    arithmetic=_cpu.summed(_cpu.whole_reduction),
    branch="NumPy alone: for float8, and where llvmlite is missing",
    params={"block_bytes": (2**20, 2**18, 2**22)},
    suggest=suggest,
    bind=bind,
)
