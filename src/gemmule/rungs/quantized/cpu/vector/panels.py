"""Micro-kernels across the rows in vector registers, and the products that they make.

Blocks of four rows are looked up or decoded and added to results in memory; by AVX2, where groups
fit, strips of 64 columns stay in eight registers while some rows pass (`strips`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import load, prefetch, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import team
from gemmule.backends.cpu.simd import BLOCK_BYTES, ROWS, block_columns
from gemmule.backends.cpu.steps import Steps
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.core.problem import Problem
from gemmule.core.rung import Params
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs import _cpu_vectors as vectors
from gemmule.rungs._cpu import address
from gemmule.rungs.quantized.cpu._across import Across
from gemmule.rungs.quantized.cpu._operands import (
    Run,
    Stored,
    blocks_of,
    bound,
    stored,
    takes_floats,
)
from gemmule.rungs.quantized.cpu._product import Product, product_of
from gemmule.rungs.quantized.cpu.vector import floats, strips
from gemmule.rungs.quantized.cpu.vector.activations import place_kernel
from gemmule.rungs.quantized.cpu.vector.codes import (
    Kind,
    LiftedZeros,
    by_words,
    kind_of,
    lifted_zeros,
    numbers_of,
)
from gemmule.rungs.quantized.cpu.vector.strips import (
    COLUMNS,
    RESULT_BYTES,
    TABLE_BYTES,
    Form,
    nibble_tables,
)

_index = load("int32", "int32")
_get, _put = load("float32", "float32"), store("float32", "float32")

# Blocks of results that a panel holds: 32 KiB of 4-bit ones stay in L1 while the rows stream by.
PANEL_BLOCKS = 64
# The same where a vector is two registers of AVX2: such processors have 32 KiB of L1.
NARROW_PANEL_BLOCKS = 32
# Bytes of the rows that pass the strips of a panel together, within limits: fewer rows load and
# store results more often, more would push each other out of L1.
PASS_BYTES = 16384
LEAST_ROWS, MOST_ROWS = 4, 32
# Strips of a panel: their results, 32 KiB, come from L2 at worst. Those of half as many would stay
# in L1, but codes are read faster the longer the pieces of rows are.
PANEL_STRIPS = 128
# How far ahead codes are asked for, within a row; at its end, those of the next rows.
AHEAD_BYTES = 1024


@kernel
def in_fours(x: int, m: int, columns: int, out: int, panel_bytes: int) -> int:
    """Write x in fours, and what is left over each with three zeros; as `arrange_kernel` does."""
    full = m // 4 * 4
    for i in range(full):
        _put(out, i, _get(x, i))
    for i in range(full, m):
        at = out + 4 * full + 16 * (i - full)
        _put(at, 0, _get(x, i))
        for k in range(1, 4):
            _put(at, k, np.float32(0))
    return 0


@functools.cache
def results_in_order(bits: int, words: bool) -> Kernel:
    """Return ``f(sums, count, _, y)``: write a block's results to y, in the order of columns."""
    place_of = place_kernel(bits, words)

    @kernel
    def in_order(sums: int, count: int, step: int, y: int) -> None:
        for column in range(count):
            _put(y, column, _get(sums, place_of(column)))

    return in_order


@functools.cache
def panels_kernel(kind: Kind) -> Kernel:
    """Return the micro-kernel that adds four rows at a time; x: `in_fours`, as rows are counted."""
    load_scales, load_zeros = numbers_of(kind, ROWS, full=True)
    tail_scales, tail_zeros = numbers_of(kind, ROWS, full=False)
    spread = floats.spread_products(kind)
    at_once = PANEL_BLOCKS if has_wide_vectors() else NARROW_PANEL_BLOCKS
    load_full, load_tail = vectors.load_words(full=True), vectors.load_words()
    times, prefetch_rows = floats.times_numbers, vectors.prefetch_lines(ROWS)

    @kernel
    def panels(job: Product, first: int, end: int, y: int, left: int, right: int) -> None:
        whole, quads, groups = job.row_bytes // 64, job.m // 4, max(job.scale_step, 1)
        for low in range(left, right, at_once):
            high = min(right, low + at_once)
            for quad in range(first, end):
                step = 1 if quad < quads else 0  # 0: one row, three times with x = 0
                row = 4 * quad if quad < quads else 4 * quads + (quad - quads)
                code_step, scale_step = step * job.row_bytes, step * job.scale_step
                codes, place = job.codes + row * job.row_bytes, row * job.scale_step
                x = job.x + 16 * quad
                for block in range(low, min(whole, high)):
                    at, group = codes + 64 * block, _index(job.first, block)
                    prefetch_rows(at + 4 * job.row_bytes, code_step)
                    words, lanes = load_full(at, code_step, 64), job.lanes + 64 * block
                    index, count = place + group, groups - group
                    scales = load_scales(job.scales, index, scale_step, count, lanes)
                    zeros = load_zeros(job.zeros, index, scale_step, count, lanes)
                    to = y + block * job.x_step
                    spread(times(scales, x), zeros, words, to, job.lowest)
                if low <= whole < high:
                    at, group = codes + 64 * whole, _index(job.first, whole)
                    words = load_tail(at, code_step, job.row_bytes - 64 * whole)
                    index, count, lanes = place + group, groups - group, job.lanes + 64 * whole
                    scales = tail_scales(job.scales, index, scale_step, count, lanes)
                    zeros = tail_zeros(job.zeros, index, scale_step, count, lanes)
                    to = y + whole * job.x_step
                    spread(times(scales, x), zeros, words, to, job.lowest)

    return panels


def strip_form_of(parts: Stored, lifted: LiftedZeros | None) -> Form | None:
    """Return how a matrix is multiplied by strips; None where a strip may meet several groups."""
    if has_wide_vectors() or (parts.group < parts.n and parts.group % COLUMNS != 0):
        return None
    tables = parts.bits == 4 and fit_tables(parts)
    return Form(parts.bits, tables, lifted is not None, parts.zeros is not None)


def fit_tables(parts: Stored) -> bool:
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


def strip_operands(parts: Stored, form: Form, lifted: LiftedZeros | None) -> Operands:
    """Return scales and zero points by strips, copied only where they are stored differently."""
    zeros: NDArray[Any] | None = parts.zeros if lifted is None else lifted.zeros
    if form.tables and parts.zeros is not None:
        zeros = (parts.zeros * TABLE_BYTES).astype(np.uint16)
    starts = np.arange(-(-parts.n // COLUMNS), dtype=np.int64) * COLUMNS
    groups = (starts // parts.group).astype(np.int32)
    return Operands(np.ascontiguousarray(parts.scales, np.float32), zeros, groups, nibble_tables())


@functools.cache
def strips_kernel(form: Form) -> Kernel:
    """Return what `panels_kernel` does, for x as it is; sums lie by strips, lanes are tables."""
    add, add_to_last = strips.add_strip(form, whole=True), _last_strip_kernel(form)
    load_strip, store_strip = vectors.load_totals(4), vectors.store_totals(4)
    width, zero_size = strips.strip_bytes(form.bits), form.zero_bytes
    of_block = BLOCK_BYTES // width

    # In one kernel: each call of another would take results through memory.
    @kernel
    def by_strips(job: Product, first: int, end: int, y: int, left: int, right: int) -> None:
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

    return by_strips


def _last_strip_kernel(form: Form) -> Kernel:
    """Return ``f(job, row, rows, to)``: some rows' products of a strip that is not whole."""
    add = strips.add_strip(form, whole=False)
    load_strip, store_strip = vectors.load_totals(4), vectors.store_totals(4)
    width, zero_size = strips.strip_bytes(form.bits), form.zero_bytes

    @kernel
    def last_strip(job: Product, row: int, rows: int, to: int) -> None:
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
def strips_in_order(form: Form) -> Kernel:
    """Return ``f(sums, count, _, y)``: write strips' results of `count` columns to y, in order.

    What is left of the last strip is put in order where it lies.
    """
    arrange = strips.in_columns(form)

    @kernel
    def in_order(sums: int, count: int, step: int, y: int) -> None:
        whole = count // COLUMNS
        for strip in range(whole):
            arrange(sums + RESULT_BYTES * strip, y + RESULT_BYTES * strip)
        if count % COLUMNS > 0:
            at = sums + RESULT_BYTES * whole
            arrange(at, at)
            for column in range(count % COLUMNS):
                _put(y + RESULT_BYTES * whole, column, _get(at, column))

    return in_order


def across(parts: Stored) -> Across:
    """Return the products across the rows of a matrix, by blocks or by strips."""
    lifted, units = parts.kept(lifted_zeros), parts.m // 4 + parts.m % 4
    how: dict[str, Any]
    form, x_step = strip_form_of(parts, lifted), 4 * block_columns(parts.bits)
    if form is not None:
        scales, zeros, groups, tables = operands = strip_operands(parts, form, lifted)
        places = {"scales": address(scales), "zeros": 0 if zeros is None else address(zeros)}
        places |= {"first": address(groups), "lanes": address(tables)}
        kernels, how = (strips_kernel(form), strips_in_order(form)), {"kept": operands}
    else:
        blocks = blocks_of(parts.n, parts.bits, parts.group)
        kind = kind_of(parts, lifted=lifted is not None)
        places = {"zeros": lifted.place if lifted else parts.zeros_address}
        places |= {"first": address(blocks.first), "lanes": address(blocks.lanes)}
        kernels = panels_kernel(kind), results_in_order(parts.bits, by_words(blocks.pieces))
        how = {"x_bytes": 16 * units, "prepare": in_fours, "kept": (blocks, lifted)}
    product = product_of(parts, x_step=x_step, **places)
    return Across(product, parts.codes.nbytes, *kernels, units=units, **how)


def steps_across(parts: Stored, now: tuple[int, int]) -> Steps:
    """Return the product of one vector across the rows; now: by which threads, of which pool."""
    ready = parts.kept(across)
    return ready.steps(ready.split())


def bind_across(problem: Problem, params: Params) -> Run:
    """Return the function that sets ``y = A^T x`` in vector registers; x, y: float32."""

    def core(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
        parts.kept(steps_across, team())(0, address(x), address(y))

    return bound(core, "float32")


def job_across(problem: Problem, params: Params, matrix: QuantizedMatrix, x: Any) -> Job | None:
    """Return the same as what a builtin function is bound to."""
    if not takes_floats(problem, matrix):
        return None
    return matrix.kept(stored).kept(steps_across, team()).job()
