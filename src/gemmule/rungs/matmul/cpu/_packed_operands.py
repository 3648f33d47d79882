"""Operands packed whole, for `packed` and `packed_threads`: what their blocks would pack each time.

Of B, for each stretch of DEPTH terms, the slivers of all its columns behind each other; of A, for
each stretch, all rows whole and PITCH numbers apart, however A lies. Neither depends on how a
product is cut into blocks, nor on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmule.core import memory
from gemmule.core.packing import HostPacked
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.rungs import _cpu
from gemmule.rungs.matmul.cpu._tile import (
    is_narrow,
    pack_kernel,
    pack_rows_kernel,
    register_tile,
    unit_axis,
)

DEPTH = 256  # a sliver of B, 32 x 256 float32, is most of a 48 KiB first-level cache
PITCH = DEPTH + 16  # numbers between rows that are packed whole; 256 would meet in few cache sets
_LINE = 64  # bytes of a line of a cache, at which the first sliver begins


def padded_lines(problem: Problem, operand: str) -> int:
    """Return rows of packed A, or columns of packed B: whole tiles, of either width for A."""
    working = _cpu.problem_working_dtype(problem)
    if operand == "a":
        unit, lines = register_tile(working, narrow=True).rows, problem.m
    else:
        unit, lines = register_tile(working, is_narrow(problem.n, working)).columns, problem.n
    return -(-lines // unit) * unit


def pack(problem: Problem, operand: str, array: np.ndarray[Any, Any]) -> HostPacked | None:
    """Return A or B as blocks read it, None where rows of A would mostly be gaps."""
    working = _cpu.problem_working_dtype(problem)
    k, lines, size = problem.k, padded_lines(problem, operand), ITEMSIZE[working]
    depths = -(-k // DEPTH)
    if operand == "a" and 2 * k < PITCH * depths:
        return None
    numbers = lines * (PITCH * depths if operand == "a" else k)
    memory.require(numbers * size, "what is packed of the matrix")
    held = np.empty(numbers * size + _LINE, np.uint8)
    begin = -(-held.ctypes.data // _LINE) * _LINE
    source, (row_step, column_step) = array.ctypes.data, array.strides
    if operand == "a":
        # `pack_rows` reads along rows of unit stride; others are brought into that order first.
        rows = array if unit_axis(problem.layout_a, 0) == "depth" else np.ascontiguousarray(array)
        source, row_step = rows.ctypes.data, rows.strides[0]
        kernel = pack_rows_kernel(
            problem.a, working, register_tile(working, narrow=True).rows, PITCH
        )
        extent, line_step, term_step, each = problem.m, row_step, rows.itemsize, lines * PITCH
    else:
        width = register_tile(working, is_narrow(problem.n, working)).columns
        kernel = pack_kernel(problem.b, working, width, unit_axis(problem.layout_b, 1))
        extent, line_step, term_step, each = problem.n, column_step, row_step, lines * DEPTH
    for stretch in range(depths):
        some = min(DEPTH, k - stretch * DEPTH)
        at = source + stretch * DEPTH * term_step
        kernel(at, line_step, term_step, extent, some, begin + stretch * each * size)
    held.flags.writeable = False
    return HostPacked(array, held, begin)
