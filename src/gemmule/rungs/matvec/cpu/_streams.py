"""Vector operations on streams of halves: 64 bytes of several rows or columns at a time.

A *step* is one line of 64 bytes, 32 halves, of every stream. Halves widen to float32 as they are
loaded, in two vectors of 16 lanes.
"""

from __future__ import annotations

import functools
from typing import Any

from gemmule.backends.cpu import ir
from gemmule.backends.cpu.intrinsics import element_pointer, widen
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import (
    LANES,
    Value,
    constant,
    fused,
    load_vector,
    row_addresses,
    splat,
    store_vector,
    vector_type,
)
from gemmule.rungs._cpu_vectors import lane_sum

STEP = 32  # elements of one line
STEP_BYTES = 64


def _load(builder: Any, address: Value, dtype: str, part: int) -> Value:
    """Emit a load of 16 elements of a step, the first or the second ones, as float32."""
    if dtype == "float32":
        return load_vector(builder, address, dtype, 64 * part)
    halves = ir.VectorType(ir.IntType(16), LANES)
    place = builder.add(address, address.type(32 * part))
    pointer = builder.inttoptr(place, halves.as_pointer())
    return widen(builder, builder.load(pointer, align=1), dtype, "float32")


def _load_pairs(builder: Any, address: Value, dtype: str, part: int) -> Value:
    """Emit 16 elements of a step as float32: of bfloat16 the even or the odd ones.

    The upper half of a pair's word is one as it stands, the lower half one shift away.
    """
    if dtype != "bfloat16":
        return _load(builder, address, dtype, part)
    word = load_vector(builder, address, "int32")
    if part == 0:
        bits = builder.shl(word, ir.Constant(word.type, [16] * LANES))
    else:
        bits = builder.and_(word, ir.Constant(word.type, [0xFFFF0000] * LANES))
    return builder.bitcast(bits, vector_type("float32"))


@functools.cache
def make_ready(a: str, x: str) -> Intrinsic:
    """Return ``f(x, out)``: a step of x as float32, as `_load_pairs` meets a's elements."""

    def emit(builder: Any, x_place: Value, out: Value) -> None:
        if a == x:
            parts = [_load_pairs(builder, x_place, a, part) for part in range(2)]
        else:
            parts = [_load(builder, x_place, x, part) for part in range(2)]
            if a == "bfloat16":
                kind = ir.VectorType(ir.IntType(32), LANES)
                orders = [ir.Constant(kind, list(range(i, 2 * LANES, 2))) for i in range(2)]
                parts = [builder.shuffle_vector(*parts, order) for order in orders]
        for part, vector in enumerate(parts):
            store_vector(builder, vector, out, 64 * part)

    return operation(f"make_ready {a} {x}", emit)


@functools.cache
def add_row_products(a: str, x: str, rows: int) -> Intrinsic:
    """Return ``f(totals, row, step, x)``: totals plus one step of each row times that of x.

    totals: 2 * rows vectors, the two of a row side by side. x: a dtype, or ``ready`` for what
    `make_ready` left.
    """
    ready = x == "ready"

    def emit(
        builder: Any, totals: list[Value], row: Value, step: Value, x_place: Value
    ) -> list[Value]:
        places = row_addresses(builder, row, step, rows)
        result = list(totals)
        for part in range(2):
            factor = _load(builder, x_place, "float32" if ready else x, part)
            for i, place in enumerate(places):
                k = 2 * i + part
                some = (_load_pairs if ready else _load)(builder, place, a, part)
                result[k] = fused(builder, some, factor, totals[k])
        return result

    return operation(f"add_row_products {a} {x} {rows}", emit)


@functools.cache
def add_row_ends(a: str, x: str, rows: int) -> Intrinsic:
    """Return ``f(totals, row, step, x, skip)``: totals plus the ends of rows times that of x.

    row, x: addresses of their last 32 elements, of which `skip` were counted before.
    """

    def emit(
        builder: Any, totals: list[Value], row: Value, step: Value, x_place: Value, skip: Value
    ) -> list[Value]:
        places = row_addresses(builder, row, step, rows)
        result = list(totals)
        for part in range(2):
            new = _from(builder, skip, part)
            none = constant(0.0)  # in both: an infinity or NaN in a counted element is no product
            factor = builder.select(new, _load(builder, x_place, x, part), none)
            for i, place in enumerate(places):
                some = builder.select(new, _load(builder, place, a, part), none)
                result[2 * i + part] = fused(builder, some, factor, totals[2 * i + part])
        return result

    return operation(f"add_row_ends {a} {x} {rows}", emit)


def _from(builder: Any, skip: Value, part: int) -> Value:
    """Emit which of a step's first or second 16 elements lie at `skip` or behind it."""
    kind = ir.VectorType(skip.type, LANES)
    numbers = ir.Constant(kind, [LANES * part + i for i in range(LANES)])
    return builder.icmp_signed(">=", numbers, splat(builder, skip))


@functools.cache
def lane_sums(rows: int) -> Intrinsic:
    """Return ``f(totals)``: the sum of each row as a float32."""

    def emit(builder: Any, totals: list[Value]) -> list[Value]:
        pairs = [builder.fadd(totals[2 * i], totals[2 * i + 1]) for i in range(rows)]
        return [lane_sum(builder, pair) for pair in pairs]

    return operation(f"lane_sums {rows}", emit)


@functools.cache
def add_columns(a: str, columns: int) -> Intrinsic:
    """Return ``f(sums, column, step, factors)``: one step of sums += columns times factors.

    sums: address of float32 numbers; factors: address of a float32 number for each column.
    """

    def emit(builder: Any, sums: Value, column: Value, step: Value, factors: Value) -> None:
        places = row_addresses(builder, column, step, columns)
        wide = []
        for j in range(columns):
            pointer = element_pointer(builder, factors, ir.IntType(64)(j), "float32")
            wide.append(splat(builder, builder.load(pointer, align=4)))
        for part in range(2):
            total = load_vector(builder, sums, "float32", 64 * part)
            for place, factor in zip(places, wide, strict=True):
                total = fused(builder, _load(builder, place, a, part), factor, total)
            store_vector(builder, total, sums, 64 * part)

    return operation(f"add_columns {a} {columns}", emit)
