"""The integer half of the vector operations: 8-bit activations and VPDPBUSD.

An activation record holds what one block of 64 weight bytes meets in one column: one (8-bit
weights) or two (4-bit weights: even columns, odd columns) planes of 64 signed bytes, then for each
lane the sum of its codes (int32) and its scale (float32).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gemmule.backends.cpu.intrinsics import declare
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
    halves,
    joined,
    load_vector,
    masked_load,
    operation,
    splat,
    store_vector,
    vector_type,
    void,
)
from gemmule.backends.cpu.target import missing_features

ACTIVATION_GROUP = 32  # columns that share one scale of the 8-bit activations


def planes(bits: int) -> int:
    """Return how many 64-byte planes of activations one block of weights meets."""
    return 8 // bits


def record_bytes(bits: int) -> int:
    """Return the size of one activation record: planes, sums and scales."""
    return BLOCK_BYTES * (planes(bits) + 2)


def dot(builder: Any, total: Value, weights: Value, activations: Value, bits: int = 8) -> Value:
    """Emit VPDPBUSD: each lane adds four products of unsigned and signed bytes, exactly.

    Where the CPU lacks it: bytes as pairs of 16 bits, by VPMADDWD, which is as exact; weights of
    4 `bits` by VPMADDUBSW, in whose 16 bits two of their products always fit.
    """
    from llvmlite import ir

    if not has_byte_products():
        emit = _dot_of_nibbles if bits == 4 else _dot_of_pairs
        return _by_halves(builder, emit, total, weights, activations)
    kind = total.type
    function = declare(builder, "llvm.x86.avx512.vpdpbusd.512", ir.FunctionType(kind, [kind] * 3))
    return builder.call(function, [total, weights, activations])


def has_byte_products() -> bool:
    """Whether the CPU has VPDPBUSD for a vector of 16 lanes."""
    return missing_features("avx512f", "avx512vnni") is None


def dot_less_128(builder: Any, total: Value, weights: Value, activations: Value) -> Value:
    """Emit, for CPUs with AVX2 alone, the dot of weights less 128 with activations, exactly.

    Both signed: the weight's sign goes to the activation, which is no -128, so that two products
    are at most 2 * 128 * 127 and fit VPMADDUBSW's 16 bits.
    """
    return _by_halves(builder, dot_of_signed, total, weights, activations)


def _by_halves(
    builder: Any, emit: Callable[..., Value], total: Value, weights: Value, activations: Value
) -> Value:
    pairs = zip(halves(builder, weights), halves(builder, activations), strict=True)
    return builder.add(total, joined(builder, *(emit(builder, w, x) for w, x in pairs)))


def of_bytes(builder: Any, name: str, result: int, *vectors: Value) -> Value:
    """Emit an AVX2 operation on bytes; `result`: bits of its result's elements."""
    from llvmlite import ir

    kind = ir.VectorType(ir.IntType(8), 2 * LANES)
    form = ir.FunctionType(ir.VectorType(ir.IntType(result), 16 * LANES // result), [kind] * 2)
    function = declare(builder, f"llvm.x86.avx2.{name}", form)
    return builder.call(function, [builder.bitcast(one, kind) for one in vectors])


def times_pairs(builder: Any, left: Value, right: Value) -> Value:
    """Emit VPMADDWD: sums of two products of 16 bits."""
    from llvmlite import ir

    half, pairs = ir.VectorType(ir.IntType(32), LANES // 2), ir.VectorType(ir.IntType(16), LANES)
    function = declare(builder, "llvm.x86.avx2.pmadd.wd", ir.FunctionType(half, [pairs, pairs]))
    return builder.call(function, [left, right])


def _dot_of_nibbles(builder: Any, weights: Value, activations: Value) -> Value:
    sums = of_bytes(builder, "pmadd.ub.sw", 16, weights, activations)
    return times_pairs(builder, sums, sums.type([1] * LANES))


def dot_of_signed(builder: Any, weights: Value, activations: Value) -> Value:
    """Emit, for eight lanes, the dot of weights less 128 with activations (`dot_less_128`)."""
    from llvmlite import ir

    signed = builder.xor(weights, weights.type([0x80808080] * (LANES // 2)))
    flipped = of_bytes(builder, "psign.b", 8, activations, signed)
    sizes = of_bytes(builder, "psign.b", 8, signed, signed)  # -128 becomes 128 without a sign
    sums = of_bytes(builder, "pmadd.ub.sw", 16, sizes, flipped)
    return times_pairs(builder, sums, ir.Constant(sums.type, [1] * LANES))


def _dot_of_pairs(builder: Any, weights: Value, activations: Value) -> Value:
    from llvmlite import ir

    pairs = ir.VectorType(ir.IntType(16), LANES)
    byte, low = pairs([8] * LANES), pairs([255] * LANES)
    wide, signed = builder.bitcast(weights, pairs), builder.bitcast(activations, pairs)
    even = (builder.and_(wide, low), builder.ashr(builder.shl(signed, byte), byte))
    odd = (builder.lshr(wide, byte), builder.ashr(signed, byte))
    return builder.add(times_pairs(builder, *even), times_pairs(builder, *odd))


def weight_planes(builder: Any, word: Value, bits: int) -> list[Value]:
    if bits == 8:
        return [word]
    nibbles = constant(0x0F0F0F0F, "int32")
    upper = builder.lshr(word, constant(4, "int32"))
    return [builder.and_(word, nibbles), builder.and_(upper, nibbles)]


@functools.cache
def add_integer_products(bits: int, columns: int, has_zeros: bool, rows: int = ROWS) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x, _)``, x the address of a block's records.

    The integer sum of a lane is exact. Without zeros the fixed zero point is taken off in
    integers too; with them, as floats (exact when they are integers).
    """

    def emit(
        builder: Any,
        totals: list[Value],
        scales: list[Value],
        zeros: list[Value],
        codes: list[Value],
        x: Value,
        lowest: Value,
    ) -> list[Value]:
        parts = [weight_planes(builder, word, bits) for word in codes]
        count = planes(bits)
        signed = bits == 8 and not has_byte_products()
        add = dot_less_128 if signed else functools.partial(dot, bits=bits)
        if signed and has_zeros:
            zeros = [builder.fsub(zero, constant(128.0)) for zero in zeros]
        for c in range(columns):
            at = record_bytes(bits) * c
            xs = [load_vector(builder, x, "int32", at + 64 * p) for p in range(count)]
            sums = load_vector(builder, x, "int32", at + 64 * count)
            x_scale = load_vector(builder, x, "float32", at + 64 * (count + 1))
            start = constant(0, "int32")
            if not has_zeros and not signed:
                start = builder.mul(sums, constant(-(2 ** (bits - 1)), "int32"))
            sums_as_floats = builder.sitofp(sums, x_scale.type)
            for row in range(rows):
                total = start
                for weights, activations in zip(parts[row], xs, strict=True):
                    total = add(builder, total, weights, activations)
                product = builder.sitofp(total, x_scale.type)
                if has_zeros:
                    product = builder.fsub(product, builder.fmul(zeros[row], sums_as_floats))
                scale = builder.fmul(scales[row], x_scale)
                i = row * columns + c
                totals[i] = fused(builder, product, scale, totals[i])
        return totals

    name = f"add_integer_products {bits} {columns} {has_zeros} {rows}"
    return operation(name, lambda: floats(rows * columns), "ttttii", emit)


@functools.cache
def quantise_block(bits: int) -> Intrinsic:
    """Return ``f(x, count, out, flag)``: round the first `count` activations of a block.

    x: address of contiguous float32; out: address of the record; flag: of an int32 that is set
    where a value is NaN or infinite. The same codes and scales as `quantise_kernel` makes.
    """
    sides, groups = planes(bits), LANES * codes_per_lane(bits) // ACTIVATION_GROUP

    def emit(builder: Any, x: Value, count: Value, out: Value, flag: Value) -> None:
        from llvmlite import ir

        faults = constant(0, "int32")
        for group in range(groups):
            values = group_values(builder, x, count, ACTIVATION_GROUP * group)
            codes, scale, sizes = group_codes(builder, values)
            faults = larger_words(builder, faults, sizes)
            each = ACTIVATION_GROUP // sides
            for side in range(sides):
                order = ir.Constant(
                    ir.VectorType(ir.IntType(32), each),
                    [sides * i + side for i in range(each)],
                )
                plane = builder.shuffle_vector(codes, codes, order)
                store_vector(builder, plane, out, BLOCK_BYTES * side + each * group)
            lanes = LANES // groups
            scales = builder.shuffle_vector(scale, scale, _first_lanes(lanes))
            store_vector(builder, scales, out, BLOCK_BYTES * (sides + 1) + 4 * lanes * group)
        total = constant(0, "int32")
        for side in range(sides):
            plane = load_vector(builder, out, "int32", BLOCK_BYTES * side)
            total = dot(builder, total, constant(0x01010101, "int32"), plane)
        store_vector(builder, total, out, BLOCK_BYTES * sides)
        mark(builder, flag, faults)

    return operation(f"quantise_block {bits}", void, "iiii", emit)


def larger_words(builder: Any, one: Value, other: Value) -> Value:
    """Emit the larger of two vectors' words, unsigned: of floats' sizes, the larger size."""
    return builder.select(builder.icmp_unsigned(">", one, other), one, other)


def _largest_word(builder: Any, vector: Value) -> Value:
    from llvmlite import ir

    form = ir.FunctionType(vector.type.element, [vector.type])
    largest = declare(builder, f"llvm.vector.reduce.umax.v{LANES}i32", form)
    return builder.call(largest, [vector])


def mark(builder: Any, flag: Value, sizes: Value) -> None:
    """Emit: set the int32 at address `flag` where a lane's size is that of infinity or a NaN."""
    largest = _largest_word(builder, sizes)
    pointer = builder.inttoptr(flag, largest.type.as_pointer())
    strange = builder.icmp_unsigned(">=", largest, largest.type(0x7F800000))
    seen = builder.or_(builder.load(pointer), builder.zext(strange, largest.type))
    builder.store(seen, pointer)


def _first_lanes(count: int) -> Value:
    from llvmlite import ir

    return ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count)


def group_values(builder: Any, x: Value, count: Value, low: int) -> list[Value]:
    """Emit the loads of 32 activations from `low` on, zero past `count`."""
    from llvmlite import ir

    values = []
    for first in (low, low + LANES):
        left = builder.sub(count, count.type(first))
        left = builder.select(builder.icmp_signed(">", left, count.type(0)), left, count.type(0))
        place = builder.add(x, x.type(4 * first))
        words = masked_load(builder, place, ir.IntType(32), LANES, left)
        values.append(builder.bitcast(words, vector_type("float32")))
    return values


def group_codes(builder: Any, values: list[Value]) -> tuple[Value, Value, Value]:
    """Emit 32 signed bytes; their scale, max|x| / 127, in every lane; and sizes, as words.

    Sizes compare as integers, NaN above infinity, which takes a third of `llvm.maxnum`'s steps.
    """
    from llvmlite import ir

    kind, words = vector_type("float32"), vector_type("int32")
    nearest = declare(builder, f"llvm.rint.v{LANES}f32", ir.FunctionType(kind, [kind]))
    mask = constant(0x7FFFFFFF, "int32")
    sizes = larger_words(builder, *(builder.and_(builder.bitcast(v, words), mask) for v in values))
    top = builder.bitcast(_largest_word(builder, sizes), kind.element)
    scale = splat(builder, builder.fdiv(top, top.type(127.0)))
    positive = builder.fcmp_ordered(">", scale, constant(0.0))
    parts = []
    for value in values:
        ratio = builder.select(positive, builder.fdiv(value, scale), constant(0.0))
        for sign, limit in ((">", -127.0), ("<", 127.0)):  # subnormal scales are rough
            within = builder.fcmp_ordered(sign, ratio, constant(limit))
            ratio = builder.select(within, ratio, constant(limit))
        code = builder.fptosi(builder.call(nearest, [ratio]), words)
        parts.append(builder.trunc(code, ir.VectorType(ir.IntType(8), LANES)))
    order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), list(range(2 * LANES)))
    return builder.shuffle_vector(*parts, order), scale, sizes
