"""LLVM code of products of blocks of some rows with float activations, along rows and across.

See `backends.cpu.simd` for the order of codes in the lanes. Tuples hold a vector for each row, or
so many times the columns of activations, row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gemmule.backends.cpu import simd
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import ROWS, Value
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.rungs._cpu_vectors import registers, whole
from gemmule.rungs.quantized.cpu.vector.codes import (
    Kind,
    Values,
    code_of_table,
    steps_of,
    tables_of,
)

CHAIN = 4  # multiply-adds of AVX2 that wait for each other; the next four begin meanwhile


def _emit_times(builder: Any, vectors: Values, address: Value) -> Values:
    return [
        builder.fmul(vector, simd.spread(builder, address, 4 * row))
        for row, vector in enumerate(vectors)
    ]


times_numbers = operation("times_numbers", _emit_times)
"""``f(vectors, address)``: vector i times the i-th of four float32 numbers at `address`."""


@functools.cache
def add_products(kind: Kind, rows: int) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x, lowest)``: totals plus a block's weights times x.

    x: address of the block's arranged activations, of one column. By AVX2 each row reads them
    again, by the multiply-add itself: kept for two rows they would take the registers that sums
    need, and an instruction of their own.
    """
    if kind.tables:
        return add_columns(kind, 1, rows)
    narrow = not has_wide_vectors()
    chain = CHAIN if narrow else simd.codes_per_lane(kind.bits)

    def emit(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *rest: Value
    ) -> Values:
        (x, lowest), sums = rest, []
        for row in range(rows):
            at = simd.unseen(builder, x) if narrow and row > 0 else x
            parts = [registers(builder, some[row]) for some in (totals, scales, zeros, codes)]
            both = []
            for part, (total, scale, zero, word) in enumerate(zip(*parts, strict=True)):
                step, lanes = steps_of(builder, word, zero, kind, lowest), word.type.count
                for first in range(0, len(kind.order), chain):
                    total_of_chain = None
                    for k in kind.order[first : first + chain]:
                        weight = step(k)
                        some = simd.load_vector(
                            builder, at, "float32", 64 * k + 4 * lanes * part, lanes
                        )
                        if total_of_chain is None:
                            total_of_chain = builder.fmul(weight, some)
                        else:
                            total_of_chain = simd.fused(builder, weight, some, total_of_chain)
                    total = simd.fused(builder, total_of_chain, scale, total)
                both.append(total)
            sums.append(whole(builder, both))
        return sums

    return operation(f"add_products {kind} {rows}", emit)


@functools.cache
def add_columns(kind: Kind, columns: int, rows: int = ROWS) -> Intrinsic:
    """Return what `add_products` does for several columns of x: totals of each row and column.

    x: of each code of a lane all columns'. Weights are scaled before they are multiplied: parts of
    several columns would not fit the registers beside their totals.
    """

    def emit(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *rest: Value
    ) -> Values:
        x, lowest = rest
        if kind.tables:
            tables = tables_of(builder, scales, zeros, kind)
        for k in range(simd.codes_per_lane(kind.bits)):
            for row, word in enumerate(codes):
                if kind.tables:
                    weight = code_of_table(builder, tables[row], word, k)
                else:
                    step = steps_of(builder, word, zeros[row], kind, lowest)(k)
                    weight = builder.fmul(step, scales[row])
                for c in range(columns):
                    some = simd.load_vector(builder, x, "float32", 64 * (k * columns + c))
                    i = row * columns + c
                    totals[i] = simd.fused(builder, weight, some, totals[i])
        return totals

    name = f"add_columns {kind} {columns} {rows}"
    return operation(name, emit)


@functools.cache
def spread_products(kind: Kind) -> Intrinsic:
    """Return ``f(scales, zeros, words, y, lowest)``: add four rows' weights to a block of results.

    y: address of the block's results, in the lanes' order; the scales are already times x.
    """
    Add = Callable[[int, Value], Value]

    def adding(builder: Any, lowest: Value, scale: Value, zero: Value, word: Value) -> Add:
        if kind.tables:
            (table,) = tables_of(builder, [scale], [zero], kind)
            return lambda k, total: builder.fadd(total, code_of_table(builder, table, word, k))
        step = steps_of(builder, word, zero, kind, lowest)
        return lambda k, total: simd.fused(builder, step(k), scale, total)

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
            for k in kind.order:
                at = 64 * k + 4 * lanes * part
                total = simd.load_vector(builder, y, "float32", at, lanes)
                for add in adders:
                    total = add(k, total)
                simd.store_vector(builder, total, y, at)

    return operation(f"spread_products {kind}", emit)
