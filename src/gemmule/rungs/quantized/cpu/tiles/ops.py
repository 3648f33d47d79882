"""LLVM code of the tile of sixteen rows: one row in each lane, 8-bit activations broadcast.

A *chunk* is 64 bytes of each of sixteen rows, transposed so that a word vector holds four bytes of
each row; nibbles become two planes, even and odd columns. A *record* is what 32 columns of x hold
for sixteen columns of the result: eight vectors of four activations each, in the order of
the planes, then the scales, then what the zero points take off, of all, of the first sixteen and of
the others (see `quantise_block`).
"""

from __future__ import annotations

import functools
from typing import Any

from gemmule.backends.cpu import ir, simd
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, ROWS, Value, block_columns
from gemmule.core.rung import ACTIVATION_GROUP
from gemmule.rungs._cpu_vectors import transposed
from gemmule.rungs.quantized.cpu.vector.integers import dot, rounded, weight_planes

TILE_COLUMNS = 8  # sums in registers: eight in integers and eight in floats
WORDS = 8  # vectors of four activations in a record
RECORD_BYTES = BLOCK_BYTES * (WORDS + 4)


def chunk_records(bits: int) -> int:
    """Return how many records one chunk meets."""
    return block_columns(bits) // ACTIVATION_GROUP


def plane_bytes(bits: int) -> int:
    """Return the size of a transposed chunk, one byte for each code."""
    return LANES * block_columns(bits)


@functools.cache
def take_chunk(bits: int, *, decoded: bool, pieces: int = 1) -> Intrinsic:
    """Return ``f(address, row_step_bytes, last_row, count, zeros, out)``: a chunk, transposed.

    Sixteen rows from `address` on, `count` bytes of each (the rest are zeros); rows behind
    `last_row` (counted from the first) repeat it. As planes; or `decoded`, with one vector of
    sixteen rows' ``code - zero`` for each column; zeros: the address of sixteen zero points, of as
    many groups one after the other as a chunk has `pieces`.
    """

    def emit(builder: Any, address: Value, *rest: Value) -> None:
        step, last, count, zeros, out = rest
        raw = (row_of_codes(builder, address, step, i, (last, count)) for i in range(LANES))
        rows = [builder.bitcast(row, simd.vector_type("int32")) for row in raw]
        points = [simd.load_vector(builder, zeros, "float32", 64 * i) for i in range(pieces)]
        taken: list[Value] = []
        for i, word in enumerate(transposed(builder, rows)):
            if not decoded:
                taken += weight_planes(builder, word, bits)
                continue
            for k in range(simd.codes_per_lane(bits)):
                code = simd.code_as_float(builder, word, k, bits)
                taken.append(builder.fsub(code, points[i * pieces // LANES]))
        for i, vector in enumerate(taken):
            simd.store_vector(builder, vector, out, BLOCK_BYTES * i)

    return operation(f"take_chunk {bits} {decoded} {pieces}", emit)


@functools.cache
def add_columns(count: int) -> Intrinsic:
    """Return ``f(sums, weights, x)``: sums of `count` columns plus four vectors of weights times x.

    weights: address of the vectors; x: of four rows of `count` activations.
    """

    def emit(builder: Any, sums: list[Value], weights: Value, x: Value) -> list[Value]:
        for k in range(ROWS):
            weight = simd.load_vector(builder, weights, "float32", 64 * k)
            for c in range(count):
                sums[c] = simd.fused(
                    builder, weight, simd.spread(builder, x, 4 * (k * count + c)), sums[c]
                )
        return sums

    return operation(f"add_columns {count}", emit)


@functools.cache
def add_scaled(count: int) -> Intrinsic:
    """Return ``f(sums, scales, totals)``: add the sums times sixteen scales to totals in memory."""

    def emit(builder: Any, sums: list[Value], scales: Value, totals: Value) -> None:
        scale = simd.load_vector(builder, scales, "float32")
        for c, one in enumerate(sums):
            total = simd.load_vector(builder, totals, "float32", 64 * c)
            simd.store_vector(builder, simd.fused(builder, one, scale, total), totals, 64 * c)

    return operation(f"add_scaled {count}", emit)


def row_of_codes(
    builder: Any, address: Value, step: Value, i: Value | int, edge: tuple[Value, Value] | None
) -> Value:
    """Emit a load of 64 bytes of the i-th row.

    edge: the number of the last row, which stands for those behind it, and how many bytes of a row
    there are; None: all rows and 64 bytes are there, which takes half the instructions.
    """
    row = address.type(i) if isinstance(i, int) else i
    if edge is not None:
        row = builder.select(builder.icmp_signed("<=", row, edge[0]), row, edge[0])
    start = builder.add(address, builder.mul(row, step))
    if edge is None:
        return simd.load_vector(builder, start, "int8", 0, BLOCK_BYTES)
    return simd.masked_load(builder, start, ir.IntType(8), BLOCK_BYTES, edge[1])


@functools.cache
def add_tile(bits: int, has_zeros: bool, pieces: int = 1) -> Intrinsic:
    """Return ``f(planes, x, scales, zeros, totals)``: add a chunk's products to eight columns.

    All are addresses: `planes` from `take_chunk`; `x` of the first column within the chunk's
    records; `scales`, `zeros` of sixteen floats, one for each row; `totals` of eight vectors. The
    integer sum over a record is exact. Where a chunk has several `pieces`, all that of one; of
    groups of sixteen, that of the two of a record, whose scales and zeros lie side by side.
    """
    halved = pieces > chunk_records(bits)
    halves = (0, 1) if halved else (-1,)

    def emit(
        builder: Any, planes: Value, x: Value, scales: Value, zeros: Value, totals: Value
    ) -> None:
        columns = range(TILE_COLUMNS)
        of_rows = [simd.load_vector(builder, scales, "float32", 64 * i) for i in range(len(halves))]
        parts = [simd.constant(0.0)] * TILE_COLUMNS
        if halved:
            parts = [simd.load_vector(builder, totals, "float32", 64 * c) for c in columns]
        for record in range(max(chunk_records(bits) // pieces, 1)):
            at, scaled = record * RECORD_BYTES, list[Value]()
            for half in halves:
                products = _record_products(builder, planes, x, zeros, record, half, has_zeros)
                if half == 0:
                    scaled = [builder.fmul(one, of_rows[0]) for one in products]
                elif half == 1:
                    twos = zip(products, scaled, strict=True)
                    scaled = [simd.fused(builder, one, of_rows[1], two) for one, two in twos]
                else:
                    scaled = products
            for c in columns:
                scale = simd.spread(builder, x, at + 64 * WORDS + 4 * c)
                parts[c] = simd.fused(builder, scaled[c], scale, parts[c])
        for c, part in enumerate(parts):
            total = part
            if not halved:
                before = simd.load_vector(builder, totals, "float32", 64 * c)
                total = simd.fused(builder, part, of_rows[0], before)
            simd.store_vector(builder, total, totals, 64 * c)

    return operation(f"add_tile {bits} {has_zeros} {pieces}", emit)


def _record_products(
    builder: Any, planes: Value, x: Value, zeros: Value, record: int, half: int, has_zeros: bool
) -> list[Value]:
    """Emit the sums of a record's products for each column, or of a half of it, zeros off."""
    columns, at = range(TILE_COLUMNS), record * RECORD_BYTES
    taken_off = at + 64 * (WORDS + 2 + half)
    if has_zeros:
        sums = [simd.constant(0, "int32")] * TILE_COLUMNS
    else:
        sums = [simd.spread(builder, x, taken_off + 4 * c, "int32") for c in columns]
    for word in range(*((0, WORDS) if half < 0 else (half * WORDS // 2, (half + 1) * WORDS // 2))):
        weights = simd.load_vector(builder, planes, "int32", 64 * (WORDS * record + word))
        for c in columns:
            activations = simd.spread(builder, x, at + 64 * word + 4 * c, "int32")
            sums[c] = dot(builder, sums[c], weights, activations)
    products = [builder.sitofp(one, simd.vector_type("float32")) for one in sums]
    if has_zeros:
        negated = builder.fneg(simd.load_vector(builder, zeros, "float32", 64 * max(half, 0)))
        for c in columns:
            of_x = simd.spread(builder, x, taken_off + 4 * c)
            products[c] = simd.fused(builder, negated, of_x, products[c])
    return products


@functools.cache
def quantise_block(bits: int, has_zeros: bool) -> Intrinsic:
    """Return ``f(x, row_step_bytes, rows, columns, out)``: one record from 32 rows of x.

    Only `rows` rows and `columns` columns exist, others count as zeros. Each column has a scale,
    max|x| / 127. The last three vectors hold the sum of a column's codes, that of the first sixteen
    and that of the others, as floats; without zero points as integers, times ``-2^(bits - 1)``, the
    fixed zero point: the dot product then starts from it.
    """

    def emit(builder: Any, x: Value, step: Value, rows: Value, columns: Value, out: Value) -> None:
        values = _rows_of_x(builder, x, step, rows, columns)
        largest = simd.constant(0.0)
        for value in values:
            size = simd.called(builder, "llvm.fabs.v16f32", value.type, value)
            bigger = builder.fcmp_ordered(">", size, largest)
            largest = builder.select(bigger, size, largest)
        scale = builder.fdiv(largest, simd.constant(127.0))
        usable = builder.fcmp_ordered(">", scale, simd.constant(0.0))
        codes = [rounded(builder, value, scale, usable) for value in values]
        first, rest = (functools.reduce(builder.add, codes[i : i + 16]) for i in (0, 16))
        totals = [builder.add(first, rest), first, rest]
        for word in range(WORDS):
            simd.store_vector(builder, _packed(builder, codes, word, bits), out, 64 * word)
        simd.store_vector(builder, scale, out, 64 * WORDS)
        for i, total in enumerate(totals):
            if has_zeros:
                total = builder.sitofp(total, simd.vector_type("float32"))
            else:
                total = builder.mul(total, simd.constant(-(2 ** (bits - 1)), "int32"))
            simd.store_vector(builder, total, out, 64 * (WORDS + 1 + i))

    return operation(f"quantise_block {bits} {has_zeros}", emit)


def _rows_of_x(builder: Any, x: Value, step: Value, rows: Value, columns: Value) -> list[Value]:
    values = []
    for row in range(ACTIVATION_GROUP):
        start = builder.add(x, builder.mul(step, step.type(row)))
        inside = builder.icmp_signed("<", rows.type(row), rows)
        count = builder.select(inside, columns, columns.type(0))
        raw = simd.masked_load(builder, start, ir.IntType(32), LANES, count)
        values.append(builder.bitcast(raw, simd.vector_type("float32")))
    return values


def _packed(builder: Any, codes: list[Value], word: int, bits: int) -> Value:
    """Emit the four codes of each column that meet one word of a plane, as bytes."""
    if bits == 8:
        chosen = codes[4 * word : 4 * word + 4]
    else:  # planes alternate: even columns of eight, then odd ones
        first = 8 * (word // 2) + word % 2
        chosen = codes[first : first + 8 : 2]
    low = simd.constant(255, "int32")
    packed = simd.constant(0, "int32")
    for i, code in enumerate(chosen):
        byte = builder.shl(builder.and_(code, low), simd.constant(8 * i, "int32"))
        packed = builder.or_(packed, byte)
    return packed
