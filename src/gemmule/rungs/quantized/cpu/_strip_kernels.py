"""Products across stored rows by AVX2: eight registers of results stay while some rows pass."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.intrinsics import load, prefetch, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.simd import BLOCK_BYTES
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.rungs.quantized.cpu import _strip_ops
from gemmule.rungs.quantized.cpu._lifted import LiftedZeros
from gemmule.rungs.quantized.cpu._operands import Stored
from gemmule.rungs.quantized.cpu._panels_job import PanelsJob
from gemmule.rungs.quantized.cpu._strip_ops import (
    COLUMNS,
    RESULT_BYTES,
    TABLE_BYTES,
    Form,
    nibble_tables,
)

_index = load("int32", "int32")
_get, _put = load("float32", "float32"), store("float32", "float32")

# Bytes of the rows that pass the strips of a panel together, within limits: fewer rows load and
# store results more often, more would push each other out of L1.
PASS_BYTES = 16384
LEAST_ROWS, MOST_ROWS = 4, 32
# Strips of a panel: their results, 32 KiB, come from L2 at worst. Those of half as many would stay
# in L1, but codes are read faster the longer the pieces of rows are.
PANEL_STRIPS = 128
# How far ahead codes are asked for, within a row; at its end, those of the next rows.
AHEAD_BYTES = 1024


def form_of(parts: Stored, lifted: LiftedZeros | None) -> Form | None:
    """Return how a matrix is multiplied by strips; None where a strip may meet several groups."""
    if has_wide_vectors() or (parts.group < parts.n and parts.group % COLUMNS != 0):
        return None
    tables = parts.bits == 4 and _fit_tables(parts)
    return Form(parts.bits, tables, lifted is not None, parts.zeros is not None)


def _fit_tables(parts: Stored) -> bool:
    """Whether all zero points are whole and from 0 to 15."""
    if parts.zeros is None:
        return True
    return bool(np.isin(parts.zeros, np.arange(16)).all())


class Operands(NamedTuple):
    """The parts of a matrix as strips take them: see `Form`; groups: the group of each strip."""

    scales: NDArray[np.float32]
    zeros: NDArray[Any] | None
    groups: NDArray[np.int32]
    tables: NDArray[np.uint8]


def operands_of(parts: Stored, form: Form, lifted: LiftedZeros | None) -> Operands:
    """Return scales and zero points by strips, copied only where they are stored differently."""
    zeros: NDArray[Any] | None = parts.zeros if lifted is None else lifted.zeros
    if form.tables and parts.zeros is not None:
        zeros = (parts.zeros * TABLE_BYTES).astype(np.uint16)
    starts = np.arange(-(-parts.n // COLUMNS), dtype=np.int64) * COLUMNS
    groups = (starts // parts.group).astype(np.int32)
    return Operands(np.ascontiguousarray(parts.scales, np.float32), zeros, groups, nibble_tables())


@functools.cache
def strips_kernel(form: Form) -> Kernel:
    """Return what `_transposed_kernels.panels_kernel` does, for x as it is; sums lie by strips."""
    add, add_to_last = _strip_ops.add_strip(form, whole=True), _last_strip_kernel(form)
    load_strip, store_strip = _strip_ops.load_strip, _strip_ops.store_strip
    width, zero_size = _strip_ops.strip_bytes(form.bits), form.zero_bytes
    of_block = BLOCK_BYTES // width

    # In one kernel: each call of another would take results through memory.
    @kernel
    def strips(job: PanelsJob, first: int, end: int, y: int, left: int, right: int) -> None:
        quads, step, whole = job.m // 4, job.row_bytes, job.row_bytes // width
        low_row = 4 * min(first, quads) + max(first - quads, 0)
        high_row = 4 * min(end, quads) + max(end - quads, 0)
        at_once = min(max(PASS_BYTES // step, LEAST_ROWS), MOST_ROWS)
        last = min(right * of_block, (step + width - 1) // width)
        for low in range(left * of_block, last, PANEL_STRIPS):
            high = min(last, low + PANEL_STRIPS)
            below = at_once * step - (high - low) * width
            for row in range(low_row, high_row, at_once):
                rows, x = min(at_once, high_row - row), job.x + 4 * row
                codes, place = job.codes + row * step, row * job.scale_step
                for strip in range(low, min(high, whole)):
                    at, index = codes + width * strip, place + _index(job.first, strip)
                    soon = at + AHEAD_BYTES
                    if width * strip + AHEAD_BYTES >= width * high:
                        soon += below
                    scale, zero = job.scales + 4 * index, job.zeros + zero_size * index
                    to = y + RESULT_BYTES * strip
                    sums = load_strip(to)
                    for i in range(rows):
                        prefetch(soon + i * step)
                        s, z = i * 4 * job.scale_step, i * zero_size * job.scale_step
                        numbers = scale + s, zero + z, x + 4 * i
                        sums = add(sums, at + i * step, *numbers, job.lanes, width)
                    store_strip(sums, to)
                if low <= whole < high:
                    add_to_last(job, row, rows, y + RESULT_BYTES * whole)

    return strips


def _last_strip_kernel(form: Form) -> Kernel:
    """Return ``f(job, row, rows, to)``: some rows' products of a strip that is not whole."""
    add = _strip_ops.add_strip(form, whole=False)
    load_strip, store_strip = _strip_ops.load_strip, _strip_ops.store_strip
    width, zero_size = _strip_ops.strip_bytes(form.bits), form.zero_bytes

    @kernel
    def last_strip(job: PanelsJob, row: int, rows: int, to: int) -> None:
        strip, left = job.row_bytes // width, job.row_bytes % width
        sums = load_strip(to)
        for i in range(row, row + rows):
            at, index = job.codes + i * job.row_bytes + width * strip, i * job.scale_step
            index += _index(job.first, strip)
            numbers = job.scales + 4 * index, job.zeros + zero_size * index, job.x + 4 * i
            sums = add(sums, at, *numbers, job.lanes, left)
        store_strip(sums, to)

    return last_strip


@functools.cache
def sums_in_columns(form: Form) -> Kernel:
    """Return ``f(sums, count, y)``: write strips' results of `count` columns to y, in their order.

    What is left of the last strip is put in order where it lies.
    """
    arrange = _strip_ops.in_columns(form)

    @kernel
    def in_columns(sums: int, count: int, y: int) -> None:
        whole = count // COLUMNS
        for strip in range(whole):
            arrange(sums + RESULT_BYTES * strip, y + RESULT_BYTES * strip)
        if count % COLUMNS > 0:
            at = sums + RESULT_BYTES * whole
            arrange(at, at)
            for column in range(count % COLUMNS):
                _put(y + RESULT_BYTES * whole, column, _get(at, column))

    return in_columns
