"""What the quantised kernels call: operations on some rows at a time, as LLVM code.

See `_simd` for the order of codes in the lanes. Tuples hold four vectors, or `rows`, one a row, or
so many times the columns of activations, row by row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from gemmule.backends.cpu.intrinsics import declare, element_pointer, emit_prefetch, widen
from gemmule.backends.cpu.jit import Intrinsic
from gemmule.backends.cpu.simd import (
    BLOCK_BYTES,
    LANES,
    ROWS,
    Value,
    code_as_float,
    code_k,
    codes_per_lane,
    constant,
    counting,
    floats,
    fused,
    load_vector,
    lookup,
    masked_load,
    operation,
    row_addresses,
    splat,
    store_vector,
    vector_type,
    void,
    words,
)
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.rungs.quantized.cpu._lifted import lifted_byte

Values = list[Value]


@functools.cache
def zeros_of(count: int) -> Intrinsic:
    """Return ``f()``: `count` vectors of zeros."""
    return operation(
        f"zeros {count}", lambda: floats(count), "", lambda builder: [constant(0.0)] * count
    )


@functools.cache
def load_words_of(rows: int, blocks: int = 1) -> Intrinsic:
    """Return ``f(address, row_step_bytes, count)``: the first `count` bytes of rows' blocks."""

    def emit(builder: Any, address: Value, step: Value, count: Value) -> list[Value]:
        from llvmlite import ir

        loaded = []
        for row in row_addresses(builder, address, step, rows):
            for block in range(blocks):
                place = builder.add(row, row.type(BLOCK_BYTES * block))
                left = count if block == 0 else above_zero(builder, count, BLOCK_BYTES * block)
                raw = masked_load(builder, place, ir.IntType(8), BLOCK_BYTES, left)
                loaded.append(builder.bitcast(raw, vector_type("int32")))
        return loaded

    return operation(f"load_words {rows} {blocks}", lambda: words(rows * blocks), "iii", emit)


def above_zero(builder: Any, count: Value, less: int) -> Value:
    """Emit `count` less a number, or zero."""
    left = builder.sub(count, count.type(less))
    return builder.select(builder.icmp_signed(">", left, left.type(0)), left, left.type(0))


@functools.cache
def load_blocks(rows: int, blocks: int = 1) -> Intrinsic:
    """Return ``f(address, row_step_bytes)``: whole blocks of each row, row by row."""

    def emit(builder: Any, address: Value, step: Value) -> list[Value]:
        return [
            load_vector(builder, place, "int32", BLOCK_BYTES * block)
            for place in row_addresses(builder, address, step, rows)
            for block in range(blocks)
        ]

    return operation(f"load_blocks {rows} {blocks}", lambda: words(rows * blocks), "ii", emit)


load_words = load_words_of(ROWS)


@functools.cache
def ask_for(rows: int, lines: int = 1) -> Intrinsic:
    """Return ``f(address, row_step_bytes)``: ask for so many lines of each of `rows` rows."""

    def emit(builder: Any, address: Value, step: Value) -> None:
        from llvmlite import ir

        for row in row_addresses(builder, address, step, rows):
            for line in range(lines):
                place = builder.add(row, row.type(BLOCK_BYTES * line))
                emit_prefetch(builder, builder.inttoptr(place, ir.IntType(8).as_pointer()))

    return operation(f"ask_for {rows} {lines}", void, "ii", emit)


@functools.cache
def group_numbers(dtype: str, per_lane: bool, rows: int = ROWS) -> Intrinsic:
    """Return ``f(address, index, row_step, count, lanes)``: a vector of group numbers for each row.

    Where groups end at blocks' ends (not `per_lane`) it is element `index` in every lane. Else
    `count` numbers are loaded from `index` on, and lane d gets the one that word d of the vector
    at address `lanes` names. Index, row_step and count are in elements of `dtype`.
    """
    size = 4 if dtype == "float32" else 2

    def emit(
        builder: Any, address: Value, index: Value, step: Value, count: Value, lanes: Value
    ) -> list[Value]:
        places = row_addresses(builder, index, step, rows)
        if not per_lane:
            pointers = [element_pointer(builder, address, place, dtype) for place in places]
            stored = [builder.load(pointer, align=1) for pointer in pointers]
            return [splat(builder, widen(builder, one, dtype, "float32")) for one in stored]
        order = load_vector(builder, lanes, "int32")
        starts = [builder.add(address, builder.mul(place, place.type(size))) for place in places]
        loaded = [masked_load(builder, start, llvm_word(size), LANES, count) for start in starts]
        return [lookup(builder, _as_floats(builder, some, dtype), order) for some in loaded]

    name = f"group_numbers {dtype} {per_lane} {rows}"
    return operation(name, lambda: floats(rows), "iiiii", emit)


def llvm_word(size: int) -> Any:
    """Return the LLVM integer of `size` bytes."""
    from llvmlite import ir

    return ir.IntType(8 * size)


def _as_floats(builder: Any, raw: Value, dtype: str) -> Value:
    if dtype == "float32":
        return builder.bitcast(raw, vector_type("float32"))
    return widen(builder, raw, dtype, "float32")


@functools.cache
def fixed_numbers(value: float, rows: int = ROWS) -> Intrinsic:
    """Return an operation like `group_numbers` that gives `value` for every group."""
    name = f"fixed_numbers {value} {rows}"
    return operation(name, lambda: floats(rows), "iiiii", lambda *_: [constant(value)] * rows)


def _emit_times(builder: Any, vectors: Sequence[Value], address: Value) -> list[Value]:
    from llvmlite import ir

    products = []
    for row, vector in enumerate(vectors):
        pointer = element_pointer(builder, address, ir.IntType(64)(row), "float32")
        products.append(builder.fmul(vector, splat(builder, builder.load(pointer, align=4))))
    return products


times_numbers = operation("times_numbers", floats, "ti", _emit_times)
"""``f(vectors, address)``: vector i times the i-th of four float32 numbers at `address`."""


def _tables(builder: Any, scales: Sequence[Value], zeros: Sequence[Value]) -> list[Value]:
    """Emit the 16 weights that the 16 nibbles stand for, for each row."""
    return [
        builder.fmul(builder.fsub(counting(), zero), scale)
        for scale, zero in zip(scales, zeros, strict=True)
    ]


@functools.cache
def add_products(
    bits: int, columns: int, per_lane: bool, rows: int = ROWS, *, lifted: bool = False
) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x, lowest)``: totals plus weights times x.

    totals: rows * columns vectors, row by row; x: address of the block's arranged activations.
    Where all lanes share a group, nibbles are looked up in the table of their 16 weights. lifted:
    bytes of one column whose zero points are given plus 2^23, exactly; lowest: see
    `_lifted.lifted_byte`.
    """

    def looked_up(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *at: Value
    ) -> Values:
        x = at[0]
        tables = _tables(builder, scales, zeros)
        for k in range(codes_per_lane(bits)):
            xs = [
                load_vector(builder, x, "float32", 64 * (k * columns + c)) for c in range(columns)
            ]
            for i, (row, c) in enumerate(itertools.product(range(rows), range(columns))):
                weight = lookup(builder, tables[row], code_k(builder, codes[row], k, bits))
                totals[i] = fused(builder, weight, xs[c], totals[i])
        return totals

    def decoded(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *at: Value
    ) -> Values:
        x, lowest = at
        parts = [constant(0.0)] * len(totals)
        for k in range(codes_per_lane(bits)):
            xs = [
                load_vector(builder, x, "float32", 64 * (k * columns + c)) for c in range(columns)
            ]
            for i, (row, c) in enumerate(itertools.product(range(rows), range(columns))):
                code = _as_float(builder, codes[row], k, bits, lowest if lifted else None)
                step = builder.fsub(code, zeros[row])
                parts[i] = fused(builder, step, xs[c], parts[i])
        return [
            fused(builder, part, scales[i // columns], totals[i]) for i, part in enumerate(parts)
        ]

    def scaled(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *at: Value
    ) -> Values:
        x = at[0]
        for k, row in itertools.product(range(codes_per_lane(bits)), range(rows)):
            step = builder.fsub(code_as_float(builder, codes[row], k, bits), zeros[row])
            weight = builder.fmul(step, scales[row])
            for c in range(columns):
                activations = load_vector(builder, x, "float32", 64 * (k * columns + c))
                i = row * columns + c
                totals[i] = fused(builder, weight, activations, totals[i])
        return totals

    if bits == 4 and not per_lane and has_wide_vectors():
        emit = looked_up
    else:  # parts of several columns would not fit the registers beside their totals
        emit = decoded if columns == 1 else scaled
    name = f"add_products {bits} {columns} {per_lane} {rows} {lifted}"
    return operation(name, lambda: floats(rows * columns), "ttttii", emit)


def _as_float(builder: Any, word: Value, k: int, bits: int, lowest: Value | None) -> Value:
    """Emit code k of every lane as a float, lifted where a mask is given."""
    if lowest is None:
        return code_as_float(builder, word, k, bits)
    return lifted_byte(builder, word, k, lowest)


@functools.cache
def load_totals(count: int) -> Intrinsic:
    """Return ``f(address)``: `count` vectors that `store_totals` left there."""

    def emit(builder: Any, address: Value) -> list[Value]:
        return [load_vector(builder, address, "float32", 64 * i) for i in range(count)]

    return operation(f"load_totals {count}", lambda: floats(count), "i", emit)


@functools.cache
def store_totals(count: int) -> Intrinsic:
    """Return ``f(totals, address)``: keep `count` vectors in memory."""

    def emit(builder: Any, totals: list[Value], address: Value) -> None:
        for i, total in enumerate(totals):
            store_vector(builder, total, address, 64 * i)

    return operation(f"store_totals {count}", void, "ti", emit)


@functools.cache
def store_sums(columns: int, rows: int = ROWS) -> Intrinsic:
    """Return ``f(totals, address, row_step_bytes)``: store the sum over the lanes of each."""

    def emit(builder: Any, totals: list[Value], address: Value, step: Value) -> None:
        from llvmlite import ir

        element, kind = ir.FloatType(), vector_type("float32")
        form = ir.FunctionType(element, [element, kind])
        reduce = declare(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", form)
        for row, start in enumerate(row_addresses(builder, address, step, rows)):
            for c in range(columns):
                values = [element(-0.0), totals[row * columns + c]]
                total = builder.call(reduce, values, fastmath=("reassoc",))
                pointer = element_pointer(builder, start, ir.IntType(64)(c), "float32")
                builder.store(total, pointer, align=4)

    return operation(f"store_sums {columns} {rows}", void, "tii", emit)


@functools.cache
def spread_products(bits: int, per_lane: bool, *, lifted: bool = False) -> Intrinsic:
    """Return ``f(scales, zeros, words, y, lowest)``: add four rows' weights to a block of results.

    y: address of the block's results, in the lanes' order; the scales are already times x. lifted,
    lowest: see `add_products`.
    """

    def looked_up(
        builder: Any, scales: Values, zeros: Values, codes: Values, y: Value, lowest: Value
    ) -> None:
        tables = _tables(builder, scales, zeros)
        for k in range(codes_per_lane(bits)):
            total = load_vector(builder, y, "float32", 64 * k)
            for table, word in zip(tables, codes, strict=True):
                weight = lookup(builder, table, code_k(builder, word, k, bits))
                total = builder.fadd(total, weight)
            store_vector(builder, total, y, 64 * k)

    def decoded(
        builder: Any, scales: Values, zeros: Values, codes: Values, y: Value, lowest: Value
    ) -> None:
        for k in range(codes_per_lane(bits)):
            total = load_vector(builder, y, "float32", 64 * k)
            for scale, zero, word in zip(scales, zeros, codes, strict=True):
                code = _as_float(builder, word, k, bits, lowest if lifted else None)
                total = fused(builder, builder.fsub(code, zero), scale, total)
            store_vector(builder, total, y, 64 * k)

    tables_pay = bits == 4 and not per_lane and has_wide_vectors()
    emit = looked_up if tables_pay else decoded
    return operation(f"spread_products {bits} {per_lane} {lifted}", void, "tttii", emit)
