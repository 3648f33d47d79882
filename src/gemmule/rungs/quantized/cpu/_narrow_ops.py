"""The row operations' own forms for AVX2, where a vector of 16 lanes is two registers.

Sixteen registers do not hold what thirty-two do, so each half of the lanes is done from its codes
to its sum before the other: what is alive at once is eight lanes of codes, zero points and sums of
each row. A group that ends within a block gives its number by a broadcast, not by a look-up.
"""

from __future__ import annotations

import functools
from typing import Any

from gemmule.backends.cpu.intrinsics import declare, element_pointer, llvm_type, widen
from gemmule.backends.cpu.jit import Intrinsic
from gemmule.backends.cpu.simd import (
    LANES,
    ROWS,
    Value,
    codes_per_lane,
    floats,
    halves,
    joined,
    operation,
    row_addresses,
    splat,
    store_vector,
    vector_type,
    void,
)
from gemmule.rungs.quantized.cpu import _integers

HALF = LANES // 2
Values = list[Value]


def _of(dtype: str, lanes: int = HALF) -> Any:
    from llvmlite import ir

    return ir.VectorType(llvm_type(dtype), lanes)


def _all(value: float, dtype: str) -> Value:
    kind = _of(dtype)
    return kind([value] * HALF)


def _load(builder: Any, address: Value, dtype: str, bytes_on: int, lanes: int = HALF) -> Value:
    place = builder.add(address, address.type(bytes_on))
    return builder.load(builder.inttoptr(place, _of(dtype, lanes).as_pointer()), align=1)


def _fused(builder: Any, left: Value, right: Value, total: Value) -> Value:
    from llvmlite import ir

    form = ir.FunctionType(left.type, [left.type] * 3)
    return builder.call(declare(builder, f"llvm.fma.v{HALF}f32", form), [left, right, total])


@functools.cache
def whole_block_numbers(dtype: str, pieces: int, rows: int = ROWS) -> Intrinsic:
    """Return ``f(address, index, row_step, count, lanes)`` for blocks of `pieces` whole groups.

    Takes and gives what `_row_ops.group_numbers` does, for blocks that a row fills: nothing is read
    behind their last group, and which lane belongs to which is known.
    """

    def emit(
        builder: Any, address: Value, index: Value, step: Value, count: Value, lanes: Value
    ) -> Values:
        from llvmlite import ir

        places = row_addresses(builder, index, step, rows)
        starts = [element_pointer(builder, address, place, dtype) for place in places]
        if pieces == 2 and dtype == "float32":  # two broadcasts from memory cost no arithmetic
            ends = [builder.gep(start, [ir.IntType(32)(1)]) for start in starts]
            numbers = [
                [builder.load(p, align=1) for p in pair] for pair in zip(starts, ends, strict=True)
            ]
            return [joined(builder, *(splat(builder, n, HALF) for n in two)) for two in numbers]
        kind = ir.VectorType(llvm_type(dtype), pieces)
        stored = [builder.load(builder.bitcast(s, kind.as_pointer()), align=1) for s in starts]
        wide = [widen(builder, some, dtype, "float32") for some in stored]
        order = ir.Constant(vector_type("int32"), [i * pieces // LANES for i in range(LANES)])
        return [builder.shuffle_vector(some, some, order) for some in wide]

    name = f"whole_block_numbers {dtype} {pieces} {rows}"
    return operation(name, lambda: floats(rows), "iiiii", emit)


def _step(builder: Any, word: Value, k: int, bits: int, zero: Value) -> Value:
    """Emit code k of every lane less its zero point."""
    code = builder.lshr(word, _all(bits * k, "int32")) if k > 0 else word
    if k < codes_per_lane(bits) - 1:
        code = builder.and_(code, _all(2**bits - 1, "int32"))
    return builder.fsub(builder.sitofp(code, zero.type), zero)


@functools.cache
def add_products(bits: int, rows: int) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x, _)``: totals plus a block's weights times x.

    x: address of the block's arranged activations, of one column.
    """

    def emit(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *rest: Value
    ) -> Values:
        x = rest[0]
        sums: list[Values] = []
        for half in range(2):
            words, points = _side(builder, codes, half), _side(builder, zeros, half)
            parts = [_all(0.0, "float32")] * rows
            for k in range(codes_per_lane(bits)):
                some = _load(builder, x, "float32", 64 * k + 32 * half)
                for row in range(rows):
                    step = _step(builder, words[row], k, bits, points[row])
                    parts[row] = _fused(builder, step, some, parts[row])
            scale, total = _side(builder, scales, half), _side(builder, totals, half)
            sums.append(
                [_fused(builder, *three) for three in zip(parts, scale, total, strict=True)]
            )
        return [joined(builder, *pair) for pair in zip(*sums, strict=True)]

    name = f"narrow add_products {bits} {rows}"
    return operation(name, lambda: floats(rows), "ttttii", emit)


@functools.cache
def spread_products(bits: int) -> Intrinsic:
    """Return ``f(scales, zeros, words, y)``: add four rows' weights to a block of results.

    See `_row_ops.spread_products`.
    """

    def emit(
        builder: Any, scales: Values, zeros: Values, codes: Values, y: Value, lowest: Value
    ) -> None:
        for half in range(2):
            words, points = _side(builder, codes, half), _side(builder, zeros, half)
            factors = _side(builder, scales, half)
            for k in range(codes_per_lane(bits)):
                at = 64 * k + 32 * half
                total = _load(builder, y, "float32", at)
                for word, zero, factor in zip(words, points, factors, strict=True):
                    step = _step(builder, word, k, bits, zero)
                    total = _fused(builder, step, factor, total)
                store_vector(builder, total, y, at)

    return operation(f"narrow spread_products {bits}", void, "tttii", emit)


def _side(builder: Any, vectors: Values, half: int) -> Values:
    return [halves(builder, vector)[half] for vector in vectors]


@functools.cache
def add_integer_products(bits: int, has_zeros: bool, rows: int) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x, _)``, x the address of a block's record.

    See `_integers.add_integer_products`, for one column.
    """
    planes = _integers.planes(bits)
    fixed = 2 ** (bits - 1) if bits == 4 else 0  # bytes are taken less 128 as they are

    def emit(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *rest: Value
    ) -> Values:
        x = rest[0]
        sums: list[Values] = []
        for half in range(2):
            at = 32 * half
            xs = [_load(builder, x, "int32", at + 64 * p) for p in range(planes)]
            of_x = _load(builder, x, "int32", at + 64 * planes)
            x_scale = _load(builder, x, "float32", at + 64 * (planes + 1))
            of_x_as_floats = builder.sitofp(of_x, x_scale.type)
            words, points = _side(builder, codes, half), _side(builder, zeros, half)
            scale, total = _side(builder, scales, half), _side(builder, totals, half)
            for row in range(rows):
                product = _integer_sums(builder, words[row], xs, bits)
                if not has_zeros and fixed:
                    taken_off = builder.mul(of_x, _all(fixed, "int32"))
                    product = builder.sub(product, taken_off)
                product = builder.sitofp(product, x_scale.type)
                if has_zeros:
                    point = points[row]
                    if bits == 8:
                        point = builder.fsub(point, _all(128.0, "float32"))
                    product = _fused(builder, builder.fneg(point), of_x_as_floats, product)
                both = builder.fmul(scale[row], x_scale)
                total[row] = _fused(builder, product, both, total[row])
            sums.append(total)
        return [joined(builder, *pair) for pair in zip(*sums, strict=True)]

    name = f"narrow add_integer_products {bits} {has_zeros} {rows}"
    return operation(name, lambda: floats(rows), "ttttii", emit)


def _integer_sums(builder: Any, word: Value, xs: Values, bits: int) -> Value:
    """Emit each lane's sum of codes (bytes: less 128) times activations, exactly.

    Four products of a nibble and a signed byte fit 16 bits, so both planes are added there.
    """
    if bits == 8:
        return _integers.dot_of_signed(builder, word, xs[0])
    nibbles = _all(0x0F0F0F0F, "int32")
    upper = builder.lshr(word, _all(4, "int32"))
    planes = (builder.and_(word, nibbles), builder.and_(upper, nibbles))
    sums = [
        _integers.of_bytes(builder, "pmadd.ub.sw", 16, plane, x)
        for plane, x in zip(planes, xs, strict=True)
    ]
    both = builder.add(*sums)
    return _integers.times_pairs(builder, both, both.type([1] * LANES))
