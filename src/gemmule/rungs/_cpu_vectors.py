"""Operations on some rows' vectors of 16 lanes that several CPU rungs are made of, as LLVM code.

A tuple holds a vector for each row, or so many times what a row has of them, row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from gemmule.backends.cpu import ir, simd
from gemmule.backends.cpu.intrinsics import declare, element_pointer, emit_prefetch
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, ROWS, Value
from gemmule.backends.cpu.target import has_wide_vectors

FIRST_CACHE, SECOND_CACHE = 3, 2  # LLVM's words for which cache lines are prefetched into


@functools.cache
def zeros_of(count: int) -> Intrinsic:
    """Return ``f()``: `count` vectors of zeros."""
    name, zero = f"zeros {count}", simd.constant
    return operation(name, lambda builder: [zero(0.0)] * count)


@functools.cache
def prefetch_lines(rows: int, lines: int = 1, near: int = FIRST_CACHE) -> Intrinsic:
    """Return ``f(address, row_step_bytes)``: prefetch so many lines of each of `rows` rows."""

    def emit(builder: Any, address: Value, step: Value) -> None:
        for row in simd.row_addresses(builder, address, step, rows):
            for line in range(lines):
                place = builder.add(row, row.type(BLOCK_BYTES * line))
                emit_prefetch(builder, place, near)

    return operation(f"prefetch_lines {rows} {lines} {near}", emit)


def above_zero(builder: Any, count: Value, less: int) -> Value:
    """Emit `count` less a number, or zero."""
    left = builder.sub(count, count.type(less))
    return builder.select(builder.icmp_signed(">", left, left.type(0)), left, left.type(0))


@functools.cache
def load_words(rows: int = ROWS, blocks: int = 1, *, full: bool = False) -> Intrinsic:
    """Return ``f(address, row_step_bytes, count)``: the first `count` bytes of rows' blocks.

    full: all bytes are there, and `count` is not looked at.
    """

    def emit(builder: Any, address: Value, step: Value, count: Value) -> list[Value]:
        loaded = []
        for row in simd.row_addresses(builder, address, step, rows):
            for at in range(0, BLOCK_BYTES * blocks, BLOCK_BYTES):
                if full:
                    loaded.append(simd.load_vector(builder, row, "int32", at))
                    continue
                left = above_zero(builder, count, at)
                place = builder.add(row, row.type(at))
                raw = simd.masked_load(builder, place, ir.IntType(8), BLOCK_BYTES, left)
                loaded.append(builder.bitcast(raw, simd.vector_type("int32")))
        return loaded

    name = f"load_words {rows} {blocks} {full}"
    return operation(name, emit)


@functools.cache
def load_totals(count: int) -> Intrinsic:
    """Return ``f(address)``: `count` vectors that `store_totals` left there."""

    def emit(builder: Any, address: Value) -> list[Value]:
        return [simd.load_vector(builder, address, "float32", 64 * i) for i in range(count)]

    return operation(f"load_totals {count}", emit)


@functools.cache
def store_totals(count: int) -> Intrinsic:
    """Return ``f(totals, address)``: keep `count` vectors in memory."""

    def emit(builder: Any, totals: list[Value], address: Value) -> None:
        for i, total in enumerate(totals):
            simd.store_vector(builder, total, address, 64 * i)

    return operation(f"store_totals {count}", emit)


def lane_sum(builder: Any, vector: Value) -> Value:
    """Emit the sum over the lanes of a vector, in any order."""
    element = ir.FloatType()
    form = ir.FunctionType(element, [element, vector.type])
    reduce = declare(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", form)
    return builder.call(reduce, [element(-0.0), vector], fastmath=("reassoc",))


@functools.cache
def store_sums(columns: int, rows: int = ROWS) -> Intrinsic:
    """Return ``f(totals, address, row_step_bytes)``: store the sum over the lanes of each."""

    def emit(builder: Any, totals: list[Value], address: Value, step: Value) -> None:
        for row, start in enumerate(simd.row_addresses(builder, address, step, rows)):
            for c in range(columns):
                total = lane_sum(builder, totals[row * columns + c])
                pointer = element_pointer(builder, start, ir.IntType(64)(c), "float32")
                builder.store(total, pointer, align=4)

    return operation(f"store_sums {columns} {rows}", emit)


def registers(builder: Any, vector: Value) -> list[Value]:
    """Emit a vector of 16 lanes as the registers that hold it."""
    return [vector] if has_wide_vectors() else list(simd.halves(builder, vector))


def whole(builder: Any, parts: Sequence[Value]) -> Value:
    """Emit the vector of 16 lanes that some registers hold."""
    return parts[0] if len(parts) == 1 else simd.joined(builder, *parts)


def transposed(builder: Any, rows: list[Value]) -> list[Value]:
    """Emit the transpose of sixteen vectors: in four rounds, pairs swap lanes 1, 2, 4, 8 apart."""
    for apart in (1, 2, 4, 8):
        upper = [(lane & apart) != 0 for lane in range(LANES)]
        first = [LANES + lane - apart if up else lane for lane, up in enumerate(upper)]
        second = [LANES + lane if up else lane + apart for lane, up in enumerate(upper)]
        for i in range(LANES):
            if not i & apart:
                a, b = rows[i], rows[i + apart]
                rows[i] = simd.shuffled(builder, a, b, first)
                rows[i + apart] = simd.shuffled(builder, a, b, second)
    return rows
