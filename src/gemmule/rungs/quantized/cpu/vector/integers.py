"""LLVM code of products with activations rounded to 8 bits: VPDPBUSD, or AVX2's steps of it.

An activation record holds what one block of 64 weight bytes meets in one column: one (8-bit
weights) or two (4-bit weights: even columns, odd columns) planes of 64 signed bytes, then for each
lane the sum of its codes (int32) and its scale (float32).
"""

from __future__ import annotations

import functools
from typing import Any

from gemmule.backends.cpu import ir, simd
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, ROWS, Value
from gemmule.backends.cpu.target import missing_features
from gemmule.core.rung import ACTIVATION_GROUP
from gemmule.quant.float4 import VALUES
from gemmule.rungs._cpu_vectors import above_zero, whole
from gemmule.rungs.quantized.cpu.vector.codes import Values

FLOAT_ZERO = 12  # by which doubled 4-bit floats are no negative numbers


def planes(bits: int) -> int:
    """Return how many 64-byte planes of activations one block of weights meets."""
    return 8 // bits


def record_bytes(bits: int) -> int:
    """Return the size of one activation record: planes, sums and scales."""
    return BLOCK_BYTES * (planes(bits) + 2)


def has_byte_products() -> bool:
    """Whether the CPU has VPDPBUSD for a vector of 16 lanes."""
    return missing_features("avx512f", "avx512vnni") is None


def dot(builder: Any, total: Value, weights: Value, activations: Value) -> Value:
    """Emit VPDPBUSD: each lane adds four products of unsigned and signed bytes, exactly."""
    name = "llvm.x86.avx512.vpdpbusd.512"
    return simd.called(builder, name, total.type, total, weights, activations)


def _of_bytes(builder: Any, name: str, dtype: str, *vectors: Value) -> Value:
    """Emit an AVX2 operation on bytes; `dtype`: of its result."""
    kind = simd.vector_type("int8", 2 * LANES)
    result = simd.vector_type(dtype, LANES if dtype == "int16" else 2 * LANES)
    bytes_ = (builder.bitcast(one, kind) for one in vectors)
    return simd.called(builder, f"llvm.x86.avx2.{name}", result, *bytes_)


def _added_pairs(builder: Any, words: Value) -> Value:
    """Emit VPMADDWD with ones: sums of two words of 16 bits."""
    ones = words.type([1] * LANES)
    result = simd.vector_type("int32", LANES // 2)
    return simd.called(builder, "llvm.x86.avx2.pmadd.wd", result, words, ones)


def _products_by_avx2(
    builder: Any, word: Value, xs: Values, bits: int, floats: bool = False
) -> Value:
    """Emit for eight lanes the sum of codes (bytes: less 128) times activations, exactly.

    Four products of a nibble and a signed byte fit VPMADDUBSW's 16 bits, so both planes are added
    there. Of signed bytes the weight's sign goes to the activation, which is no -128, so that two
    products are at most 2 * 128 * 127.
    """
    if bits == 8:
        signed = builder.xor(word, word.type([0x80808080] * (LANES // 2)))
        flipped = _of_bytes(builder, "psign.b", "int8", xs[0], signed)
        sizes = _of_bytes(builder, "psign.b", "int8", signed, signed)  # -128 becomes 128, unsigned
        return _added_pairs(builder, _of_bytes(builder, "pmadd.ub.sw", "int16", sizes, flipped))
    sums = [
        _of_bytes(builder, "pmadd.ub.sw", "int16", plane, x)
        for plane, x in zip(weight_planes(builder, word, bits, floats=floats), xs, strict=True)
    ]
    return _added_pairs(builder, builder.add(*sums))


def _sum_of_bytes(builder: Any, total: Value, signed: Value) -> Value:
    """Emit ``total`` plus the four signed bytes of each of 16 lanes."""
    ones = simd.constant(0x01010101, "int32")
    if has_byte_products():
        return dot(builder, total, ones, signed)
    parts = zip(simd.halves(builder, ones), simd.halves(builder, signed), strict=True)
    sums = [_added_pairs(builder, _of_bytes(builder, "pmadd.ub.sw", "int16", *p)) for p in parts]
    return builder.add(total, simd.joined(builder, *sums))


def weight_planes(builder: Any, word: Value, bits: int, *, floats: bool = False) -> Values:
    """Emit a register's codes as bytes: those of even columns, then of odd ones, of nibbles.

    floats: twice what codes that are floats stand for, plus `FLOAT_ZERO`.
    """
    if bits == 8:
        return [word]
    lanes = word.type.count
    nibbles, four = simd.constant(0x0F0F0F0F, "int32", lanes), simd.constant(4, "int32", lanes)
    both = [builder.and_(word, nibbles), builder.and_(builder.lshr(word, four), nibbles)]
    return [_doubled(builder, plane) for plane in both] if floats else both


def _doubled(builder: Any, plane: Value) -> Value:
    """Emit twice what a plane's codes stand for, plus `FLOAT_ZERO`: a look-up of bytes."""
    kind = simd.vector_type("int8", 4 * plane.type.count)
    table = kind([FLOAT_ZERO + int(2 * VALUES[i % 16]) for i in range(kind.count)])
    name = f"llvm.x86.avx{'512' if kind.count == BLOCK_BYTES else '2'}.pshuf.b"
    name += ".512" * (kind.count == BLOCK_BYTES)
    found = simd.called(builder, name, kind, table, builder.bitcast(plane, kind))
    return builder.bitcast(found, plane.type)


@functools.cache
def add_integer_products(
    bits: int, columns: int, has_zeros: bool, rows: int = ROWS, *, floats: bool = False
) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x, _)``, x the address of a block's records.

    The integer sum of a lane is exact. Without zeros the fixed zero point is taken off in integers
    too; with them, as floats (exact when they are integers). AVX2 takes bytes less 128. floats: of
    codes that are floats of 4 bits.
    """
    wide = has_byte_products()
    lanes, shift = (LANES, 0) if wide else (LANES // 2, 128 if bits == 8 else 0)
    fixed = FLOAT_ZERO if floats else 2 ** (bits - 1) - shift

    def products(builder: Any, word: Value, xs: Values, start: Value) -> Value:
        if not wide:
            return builder.add(_products_by_avx2(builder, word, xs, bits, floats), start)
        for plane, x in zip(weight_planes(builder, word, bits, floats=floats), xs, strict=True):
            start = dot(builder, start, plane, x)
        return start

    def emit(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *rest: Value
    ) -> Values:
        def parts(vectors: Values) -> list[Values]:
            return [[v] if wide else list(simd.halves(builder, v)) for v in vectors]

        of_totals, of_scales, of_zeros, words = map(parts, (totals, scales, zeros, codes))
        count = planes(bits)
        for part in range(LANES // lanes):
            for c in range(columns):
                at = record_bytes(bits) * c + 4 * lanes * part
                *xs, of_x = (
                    simd.load_vector(builder, rest[0], "int32", at + 64 * p, lanes)
                    for p in range(count + 1)
                )
                x_scale = simd.load_vector(
                    builder, rest[0], "float32", at + 64 * (count + 1), lanes
                )
                if floats:  # codes are doubled
                    x_scale = builder.fmul(x_scale, x_scale.type([0.5] * lanes))
                start = of_x.type([0] * lanes)
                if not has_zeros and fixed:
                    start = builder.mul(of_x, of_x.type([-fixed] * lanes))
                as_floats = builder.sitofp(of_x, x_scale.type)
                for row in range(rows):
                    total = products(builder, words[row][part], xs, start)
                    product = builder.sitofp(total, x_scale.type)
                    if has_zeros:
                        zero = of_zeros[row][part]
                        if shift:
                            zero = builder.fsub(zero, zero.type([float(shift)] * lanes))
                        product = simd.fused(builder, builder.fneg(zero), as_floats, product)
                    # The product of a tiny scale by a small one would lose bits below the range.
                    product = builder.fmul(product, x_scale)
                    mine = of_totals[row * columns + c]
                    mine[part] = simd.fused(builder, product, of_scales[row][part], mine[part])
        return [whole(builder, total) for total in of_totals]

    name = f"add_integer_products {bits} {columns} {has_zeros} {rows} {floats}"
    return operation(name, emit)


@functools.cache
def quantise_block(bits: int) -> Intrinsic:
    """Return ``f(x, count, out, flag)``: round the first `count` activations of a block.

    x: address of contiguous float32; out: address of the record; flag: of an int32 that is set
    where a value is NaN or infinite. The same codes and scales as `quantise_kernel` makes.
    """
    sides, groups = planes(bits), LANES * simd.codes_per_lane(bits) // ACTIVATION_GROUP

    def emit(builder: Any, x: Value, count: Value, out: Value, flag: Value) -> None:
        faults, each, lanes = simd.constant(0, "int32"), ACTIVATION_GROUP // sides, LANES // groups
        for group in range(groups):
            values = group_values(builder, x, count, ACTIVATION_GROUP * group)
            codes, scale, sizes = group_codes(builder, values)
            faults = larger_words(builder, faults, sizes)
            store_planes(builder, codes, sides, out, each * group)
            scales = simd.shuffled(builder, scale, scale, [0] * lanes)
            simd.store_vector(builder, scales, out, BLOCK_BYTES * (sides + 1) + 4 * lanes * group)
        total = simd.constant(0, "int32")
        for side in range(sides):
            plane = simd.load_vector(builder, out, "int32", BLOCK_BYTES * side)
            total = _sum_of_bytes(builder, total, plane)
        simd.store_vector(builder, total, out, BLOCK_BYTES * sides)
        mark(builder, flag, faults)

    return operation(f"quantise_block {bits}", emit)


def store_planes(builder: Any, codes: Value, sides: int, out: Value, at: int) -> None:
    """Emit the stores of 32 bytes to planes, each at the same place: by their columns' parity."""
    for side in range(sides):
        plane = simd.shuffled(builder, codes, codes, range(side, ACTIVATION_GROUP, sides))
        simd.store_vector(builder, plane, out, BLOCK_BYTES * side + at)


def larger_words(builder: Any, one: Value, other: Value) -> Value:
    """Emit the larger of two vectors' words, unsigned: of floats' sizes, the larger size."""
    return builder.select(builder.icmp_unsigned(">", one, other), one, other)


def _largest_word(builder: Any, vector: Value) -> Value:
    name = f"llvm.vector.reduce.umax.v{LANES}i32"
    return simd.called(builder, name, vector.type.element, vector)


def mark(builder: Any, flag: Value, sizes: Value) -> None:
    """Emit: set the int32 at address `flag` where a lane's size is that of infinity or a NaN."""
    largest = _largest_word(builder, sizes)
    pointer = builder.inttoptr(flag, largest.type.as_pointer())
    found = builder.icmp_unsigned(">=", largest, largest.type(0x7F800000))
    seen = builder.or_(builder.load(pointer), builder.zext(found, largest.type))
    builder.store(seen, pointer)


def group_values(builder: Any, x: Value, count: Value, low: int) -> Values:
    """Emit the loads of 32 activations from `low` on, zero past `count`."""
    values = []
    for first in (low, low + LANES):
        left = above_zero(builder, count, first)
        place = builder.add(x, x.type(4 * first))
        words = simd.masked_load(builder, place, ir.IntType(32), LANES, left)
        values.append(builder.bitcast(words, simd.vector_type("float32")))
    return values


def group_codes(builder: Any, values: Values) -> tuple[Value, Value, Value]:
    """Emit 32 signed bytes; their scale, max|x| / 127, in every lane; and sizes, as words.

    Sizes compare as integers, NaN above infinity, which takes a third of `llvm.maxnum`'s steps.
    """
    mask = simd.constant(0x7FFFFFFF, "int32")
    sizes = larger_words(
        builder, *(builder.and_(builder.bitcast(v, mask.type), mask) for v in values)
    )
    top = builder.bitcast(_largest_word(builder, sizes), values[0].type.element)
    scale = simd.splat(builder, builder.fdiv(top, top.type(127.0)))
    positive = builder.fcmp_ordered(">", scale, simd.constant(0.0))
    codes = [rounded(builder, value, scale, positive) for value in values]
    parts = [builder.trunc(code, simd.vector_type("int8")) for code in codes]
    return simd.shuffled(builder, parts[0], parts[1], range(2 * LANES)), scale, sizes


def rounded(builder: Any, value: Value, scale: Value, positive: Value) -> Value:
    """Emit 16 activations as integers from -127 to 127; 0 where the scale is not positive."""
    ratio = builder.select(positive, builder.fdiv(value, scale), simd.constant(0.0))
    for sign, limit in ((">", -127.0), ("<", 127.0)):  # subnormal scales are rough
        within = builder.fcmp_ordered(sign, ratio, simd.constant(limit))
        ratio = builder.select(within, ratio, simd.constant(limit))
    nearest = simd.called(builder, f"llvm.rint.v{LANES}f32", ratio.type, ratio)
    return builder.fptosi(nearest, simd.vector_type("int32"))
