"""Host side of the plain products along stored rows, on one thread or on all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.pool import Pooled
from gemmule.core.problem import Problem
from gemmule.rungs.quantized.cpu._operands import (
    SERIAL_BYTES,
    Run,
    Stored,
    address,
    bound,
    working_dtype,
)
from gemmule.rungs.quantized.cpu._plain_kernels import (
    four_rows_tasks,
    kind_of,
    matrix_of,
)
from gemmule.rungs.quantized.cpu._tasks import run_tasks


def bind_four_rows(problem: Problem, rows_per_task: int) -> Run:
    """Return the function that computes a product; rows_per_task 0 keeps to one thread."""
    working = working_dtype(problem)

    def core(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
        multiply_four_rows(parts, x, y, rows_per_task)

    return bound(core, working)


def multiply_four_rows(parts: Stored, x: NDArray[Any], y: NDArray[Any], rows_per_task: int) -> None:
    """Set ``y = A x`` in plain loops, in the dtype of x and y (float32 or float64)."""
    working = "float32" if x.itemsize == 4 else "float64"
    matrix = parts.kept(matrix_of)
    even, odd = (x, x) if parts.bits == 8 else (_copy(x[0::2]), _copy(x[1::2]))
    words = (*matrix, address(even), address(odd), address(y))
    tasks = parts.kept(_tasks_of, working)
    rows = rows_per_task or parts.m
    small = rows_per_task == 0 or parts.codes.nbytes < SERIAL_BYTES
    run_tasks(tasks, words, parts.m, rows, alone=small)


def _tasks_of(parts: Stored, working: str) -> Pooled:
    return four_rows_tasks(kind_of(parts, working))


def _copy(x: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(x)
