"""The row operations' own forms for AVX2, where a vector of 16 lanes is two registers.

Sixteen registers do not hold what thirty-two do, so each half of the lanes is done from its codes
to its sum before the other: what is alive at once is eight lanes of codes, zero points and sums of
each row. A group that ends within a block gives its number by a broadcast, not by a look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.rungs.quantized.cpu import _integers
from gemmule.rungs.quantized.cpu._lifted import LIFT

HALF = LANES // 2
QUAD = LANES // 4  # lanes of 16 bytes, what shuffles of AVX2 stay within
WORD = 16
CHAIN = 4  # multiply-adds that wait for each other; the next four begin meanwhile
LIFT_BITS = 0x4B000000  # of the float 2^23, whose lowest bits may be a code: see `_lifted`
Values = list[Value]


class Form(NamedTuple):
    """How codes become floats. words: see `by_words`; lifted: zero points come plus 2^23."""

    words: bool
    lifted: bool


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


def by_words(pieces: int) -> bool:
    """Whether codes of a block are taken from 16-bit words, not from the lanes' 32.

    Then the lanes of 16 bytes of codes hold them in another order (`_activations.place_kernel`), so
    they must not be of two groups. pieces: `_operands.Blocks`.
    """
    return not has_wide_vectors() and pieces in (1, 2, 4)


def _codes_of_words(
    builder: Any, halves: Value, k: int, bits: int, kept: dict[int, Value]
) -> Value:
    """Emit code k of eight lanes under the exponent of 2^23: half a shift and a mask, a shuffle.

    halves: the 16-bit words; kept: of which the codes of one k are two vectors' worth.
    """
    from llvmlite import ir

    side, part = divmod(k, WORD // bits)
    if part not in kept:
        code = builder.lshr(halves, halves.type([bits * part] * LANES)) if part else halves
        if part < WORD // bits - 1:
            code = builder.and_(code, halves.type([2**bits - 1] * LANES))
        kept[part] = code
    upper = halves.type([LIFT_BITS >> WORD] * LANES)
    places = [
        HALF * (i // HALF) + QUAD * side + i // 2 % QUAD + LANES * (i % 2) for i in range(LANES)
    ]
    order = ir.Constant(ir.VectorType(ir.IntType(32), LANES), places)
    return builder.bitcast(builder.shuffle_vector(kept[part], upper, order), _of("float32"))


def _lifted_lanes(builder: Any, word: Value, k: int, bits: int) -> Value:
    """Emit code k of eight lanes under the exponent of 2^23."""
    code = builder.lshr(word, _all(bits * k, "int32")) if k > 0 else word
    if k < codes_per_lane(bits) - 1:
        code = builder.and_(code, _all(2**bits - 1, "int32"))
    return builder.bitcast(builder.or_(code, _all(LIFT_BITS, "int32")), _of("float32"))


def _steps_of(
    builder: Any, word: Value, bits: int, zero: Value, form: Form
) -> Callable[[int], Value]:
    """Return what emits code k of eight lanes less its zero point."""
    from llvmlite import ir

    halves = builder.bitcast(word, ir.VectorType(ir.IntType(WORD), LANES))
    kept: dict[int, Value] = {}

    def step(k: int) -> Value:
        if form.words:
            code = _codes_of_words(builder, halves, k, bits, kept)
        else:
            code = _lifted_lanes(builder, word, k, bits)
        if not form.lifted:
            code = builder.fsub(code, _all(LIFT, "float32"))
        return builder.fsub(code, zero)

    return step


def unseen(builder: Any, number: Value) -> Value:
    """Emit an integer as one that LLVM knows nothing of.

    What is read from there is read again for each row, by the multiply-add itself: kept for two
    rows it would take the registers that their sums need, and an instruction of its own.
    """
    from llvmlite import ir

    form = ir.FunctionType(number.type, [number.type])
    return builder.asm(form, "", "=r,0", [number], False)


def _order(bits: int, words: bool) -> list[int]:
    """Return the vectors of a block in the order in which few of their codes are alive."""
    if not words:
        return list(range(codes_per_lane(bits)))
    width = WORD // bits
    return [side * width + part for part in range(width) for side in range(2)]


@functools.cache
def add_products(bits: int, rows: int, form: Form) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x, _)``: totals plus a block's weights times x.

    x: address of the block's arranged activations, of one column.
    """

    def emit(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *rest: Value
    ) -> Values:
        sums: Values = []
        for row in range(rows):
            x = rest[0] if row == 0 else unseen(builder, rest[0])
            of_row = [halves(builder, some[row]) for some in (totals, scales, zeros, codes)]
            both = []
            for half, (total, scale, zero, word) in enumerate(zip(*of_row, strict=True)):
                step = _steps_of(builder, word, bits, zero, form)
                order = _order(bits, form.words)
                for first in range(0, len(order), CHAIN):
                    part = None
                    for k in order[first : first + CHAIN]:
                        weight, some = step(k), _load(builder, x, "float32", 64 * k + 32 * half)
                        if part is None:
                            part = builder.fmul(weight, some)
                        else:
                            part = _fused(builder, weight, some, part)
                    total = _fused(builder, part, scale, total)
                both.append(total)
            sums.append(joined(builder, *both))
        return sums

    name = f"narrow add_products {bits} {rows} {form}"
    return operation(name, lambda: floats(rows), "ttttii", emit)


@functools.cache
def spread_products(bits: int, form: Form) -> Intrinsic:
    """Return ``f(scales, zeros, words, y)``: add four rows' weights to a block of results.

    See `_row_ops.spread_products`.
    """

    def emit(
        builder: Any, scales: Values, zeros: Values, codes: Values, y: Value, lowest: Value
    ) -> None:
        for half in range(2):
            words, points = _side(builder, codes, half), _side(builder, zeros, half)
            factors = _side(builder, scales, half)
            steps = [
                _steps_of(builder, word, bits, point, form)
                for word, point in zip(words, points, strict=True)
            ]
            for k in _order(bits, form.words):
                at = 64 * k + 32 * half
                total = _load(builder, y, "float32", at)
                for step, factor in zip(steps, factors, strict=True):
                    total = _fused(builder, step(k), factor, total)
                store_vector(builder, total, y, at)

    return operation(f"narrow spread_products {bits} {form}", void, "tttii", emit)


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
