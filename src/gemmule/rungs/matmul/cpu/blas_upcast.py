"""Blocks of both operands become a dtype that NumPy's BLAS has, and are multiplied there.

It works without a compiler, where only the conversion of float16 is slower. Integers of up to 16
bits are exact in float64: a product is below 2^32, so a sum of up to 2^20 of them is below 2^53.
Wider integers have no such float; they take NumPy's own integer loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.core.problem import INTEGERS, ITEMSIZE, Problem
from gemmule.core.rung import CpuRung, Machine, Params, Suggestion
from gemmule.rungs import _cpu
from gemmule.rungs._cpu_convert import narrowed, widened

EXACT_DEPTH = 2**20  # products of 16-bit integers that float64 sums exactly
TILE = 32  # rows and columns of the tile that a BLAS pads narrow products to, about


def block_dtype(problem: Problem) -> str:
    """Return the dtype that blocks are multiplied in."""
    if problem.a not in INTEGERS:
        return _cpu.problem_working_dtype(problem)
    return "float64" if ITEMSIZE[problem.a] <= 2 else _cpu.problem_working_dtype(problem)


def bind(problem: Problem, params: Params) -> Callable[..., None]:
    """Return ``run(A, B, C)``."""
    block, size = np.dtype(block_dtype(problem)), params["block"]
    working = np.dtype(_cpu.problem_working_dtype(problem))
    depth = EXACT_DEPTH if problem.a in INTEGERS else max(problem.k, 1)
    m, n, k = problem.m, problem.n, problem.k

    def part_of(
        A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], corner: tuple[int, int], p: int
    ) -> np.ndarray[Any, Any]:
        left = widened(A[corner[0] : corner[0] + size, p : p + depth], block)
        right = widened(B[p : p + depth, corner[1] : corner[1] + size], block)
        part: np.ndarray[Any, Any] = np.matmul(left, right).astype(working, copy=False)
        return part

    def product(
        A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], first: int, second: int
    ) -> np.ndarray[Any, Any]:
        total = part_of(A, B, (first, second), 0)
        for p in range(depth, k, depth):
            total += part_of(A, B, (first, second), p)
        return total

    def run(A: np.ndarray[Any, Any], B: np.ndarray[Any, Any], C: np.ndarray[Any, Any]) -> None:
        with np.errstate(all="ignore"):
            for i in range(0, m, size):
                for j in range(0, n, size):
                    target = C[i : i + size, j : j + size]
                    narrowed(product(A, B, i, j), target)

    return run


def suggest(problem: Problem, machine: Machine) -> Suggestion:
    """Expect the conversions' speed plus a BLAS; NumPy's integer loops add one at a time.

    What is converted is written and read once more, and a BLAS computes with whole tiles.
    """
    rates, dtype = machine.rates, block_dtype(problem)
    products = {"float32": rates.blas, "float64": rates.blas / 2, "int64": rates.fma / 64}
    converted = problem.batch * ((problem.m + problem.n) * problem.k + problem.outputs)
    moved = 2.0 * converted * ITEMSIZE[dtype] / rates.core_cached
    tiles = max(problem.m, TILE) * max(problem.n, TILE) / max(problem.m * problem.n, 1)
    busy = problem.flops * (1.0 if dtype == "int64" else tiles) / products[dtype]
    calls = 30 * problem.batch * rates.blas_call
    return Suggestion({}, calls + converted / rates.convert + moved + busy)


RUNG = CpuRung(
    title="Upcast to BLAS",
    idea="Halves and float8 become float32, short integers float64, block by block, for BLAS.",
    source="for machines without a compiler; exact integer products through floats are folklore",
    branch="NumPy alone: for float8, and where llvmlite is missing",
    params={"block": (2048, 1024, 512)},
    suggest=suggest,
    bind=bind,
    **_cpu.OF_MATRICES,
)
