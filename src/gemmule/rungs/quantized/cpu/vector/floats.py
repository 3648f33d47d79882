"""LLVM code of products of blocks of some rows with float activations, along rows and across.

See `backends.cpu.simd` for the order of codes in the lanes. Tuples hold a vector for each row, or
so many times the columns of activations, row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gemmule.backends.cpu.intrinsics import declare, element_pointer, emit_prefetch
from gemmule.backends.cpu.jit import Intrinsic
from gemmule.backends.cpu.simd import (
    BLOCK_BYTES,
    LANES,
    ROWS,
    Value,
    codes_per_lane,
    constant,
    floats,
    fused,
    load_vector,
    operation,
    row_addresses,
    spread,
    store_vector,
    unseen,
    void,
)
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.rungs.quantized.cpu.vector.codes import (
    Form,
    Values,
    code_of_table,
    registers,
    steps_of,
    tables_of,
    whole,
)

CHAIN = 4  # multiply-adds of AVX2 that wait for each other; the next four begin meanwhile


@functools.cache
def zeros_of(count: int) -> Intrinsic:
    """Return ``f()``: `count` vectors of zeros."""
    return operation(
        f"zeros {count}", lambda: floats(count), "", lambda builder: [constant(0.0)] * count
    )


@functools.cache
def prefetch_lines(rows: int, lines: int = 1) -> Intrinsic:
    """Return ``f(address, row_step_bytes)``: ask for so many lines of each of `rows` rows."""

    def emit(builder: Any, address: Value, step: Value) -> None:
        from llvmlite import ir

        for row in row_addresses(builder, address, step, rows):
            for line in range(lines):
                place = builder.add(row, row.type(BLOCK_BYTES * line))
                emit_prefetch(builder, builder.inttoptr(place, ir.IntType(8).as_pointer()))

    return operation(f"prefetch_lines {rows} {lines}", void, "ii", emit)


def _emit_times(builder: Any, vectors: Values, address: Value) -> Values:
    return [
        builder.fmul(vector, spread(builder, address, 4 * row))
        for row, vector in enumerate(vectors)
    ]


times_numbers = operation("times_numbers", floats, "ti", _emit_times)
"""``f(vectors, address)``: vector i times the i-th of four float32 numbers at `address`."""


@functools.cache
def add_products(form: Form, rows: int) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x, lowest)``: totals plus a block's weights times x.

    x: address of the block's arranged activations, of one column. By AVX2 each row reads them
    again, by the multiply-add itself: kept for two rows they would take the registers that sums
    need, and an instruction of their own.
    """
    if form.tables:
        return add_columns(form, 1, rows)
    narrow = not has_wide_vectors()
    chain = CHAIN if narrow else codes_per_lane(form.bits)

    def emit(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *rest: Value
    ) -> Values:
        (x, lowest), sums = rest, []
        for row in range(rows):
            at = unseen(builder, x) if narrow and row > 0 else x
            parts = [registers(builder, some[row]) for some in (totals, scales, zeros, codes)]
            both = []
            for part, (total, scale, zero, word) in enumerate(zip(*parts, strict=True)):
                step, lanes = steps_of(builder, word, zero, form, lowest), word.type.count
                for first in range(0, len(form.order), chain):
                    total_of_chain = None
                    for k in form.order[first : first + chain]:
                        weight = step(k)
                        some = load_vector(builder, at, "float32", 64 * k + 4 * lanes * part, lanes)
                        if total_of_chain is None:
                            total_of_chain = builder.fmul(weight, some)
                        else:
                            total_of_chain = fused(builder, weight, some, total_of_chain)
                    total = fused(builder, total_of_chain, scale, total)
                both.append(total)
            sums.append(whole(builder, both))
        return sums

    return operation(f"add_products {form} {rows}", lambda: floats(rows), "ttttii", emit)


@functools.cache
def add_columns(form: Form, columns: int, rows: int = ROWS) -> Intrinsic:
    """Return what `add_products` does for several columns of x: totals of each row and column.

    x: of each code of a lane all columns'. Weights are scaled before they are multiplied: parts of
    several columns would not fit the registers beside their totals.
    """

    def emit(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *rest: Value
    ) -> Values:
        x, lowest = rest
        if form.tables:
            tables = tables_of(builder, scales, zeros)
        for k in range(codes_per_lane(form.bits)):
            for row, word in enumerate(codes):
                if form.tables:
                    weight = code_of_table(builder, tables[row], word, k)
                else:
                    step = steps_of(builder, word, zeros[row], form, lowest)(k)
                    weight = builder.fmul(step, scales[row])
                for c in range(columns):
                    some = load_vector(builder, x, "float32", 64 * (k * columns + c))
                    i = row * columns + c
                    totals[i] = fused(builder, weight, some, totals[i])
        return totals

    name = f"add_columns {form} {columns} {rows}"
    return operation(name, lambda: floats(rows * columns), "ttttii", emit)


@functools.cache
def spread_products(form: Form) -> Intrinsic:
    """Return ``f(scales, zeros, words, y, lowest)``: add four rows' weights to a block of results.

    y: address of the block's results, in the lanes' order; the scales are already times x.
    """
    Add = Callable[[int, Value], Value]

    def adding(builder: Any, lowest: Value, scale: Value, zero: Value, word: Value) -> Add:
        if form.tables:
            (table,) = tables_of(builder, [scale], [zero])
            return lambda k, total: builder.fadd(total, code_of_table(builder, table, word, k))
        step = steps_of(builder, word, zero, form, lowest)
        return lambda k, total: fused(builder, step(k), scale, total)

    def emit(
        builder: Any, scales: Values, zeros: Values, codes: Values, y: Value, lowest: Value
    ) -> None:
        rows = [
            list(zip(*(registers(builder, one) for one in row), strict=True))
            for row in zip(scales, zeros, codes, strict=True)
        ]
        for part in range(len(rows[0])):
            adders = [adding(builder, lowest, *row[part]) for row in rows]
            lanes = rows[0][part][0].type.count
            for k in form.order:
                at = 64 * k + 4 * lanes * part
                total = load_vector(builder, y, "float32", at, lanes)
                for add in adders:
                    total = add(k, total)
                store_vector(builder, total, y, at)

    return operation(f"spread_products {form}", void, "tttii", emit)


@functools.cache
def load_totals(count: int) -> Intrinsic:
    """Return ``f(address)``: `count` vectors that `store_totals` left there."""

    def emit(builder: Any, address: Value) -> Values:
        return [load_vector(builder, address, "float32", 64 * i) for i in range(count)]

    return operation(f"load_totals {count}", lambda: floats(count), "i", emit)


@functools.cache
def store_totals(count: int) -> Intrinsic:
    """Return ``f(totals, address)``: keep `count` vectors in memory."""

    def emit(builder: Any, totals: Values, address: Value) -> None:
        for i, total in enumerate(totals):
            store_vector(builder, total, address, 64 * i)

    return operation(f"store_totals {count}", void, "ti", emit)


@functools.cache
def store_sums(columns: int, rows: int = ROWS) -> Intrinsic:
    """Return ``f(totals, address, row_step_bytes)``: store the sum over the lanes of each."""

    def emit(builder: Any, totals: Values, address: Value, step: Value) -> None:
        from llvmlite import ir

        element = ir.FloatType()
        form = ir.FunctionType(element, [element, totals[0].type])
        reduce = declare(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", form)
        for row, start in enumerate(row_addresses(builder, address, step, rows)):
            for c in range(columns):
                values = [element(-0.0), totals[row * columns + c]]
                total = builder.call(reduce, values, fastmath=("reassoc",))
                pointer = element_pointer(builder, start, ir.IntType(64)(c), "float32")
                builder.store(total, pointer, align=4)

    return operation(f"store_sums {columns} {rows}", void, "tii", emit)
