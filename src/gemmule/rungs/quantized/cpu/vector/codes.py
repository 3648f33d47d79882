"""LLVM code of codes as floats, and of the numbers of their groups, for a register's lanes.

One code serves both widths: what AVX-512 has in one register of 16 lanes is two of 8 by AVX2, and
each half is done from its codes to its sum before the other, as sixteen registers do not hold what
thirty-two do. `registers` takes a vector apart, `whole` joins it.

**Lifted codes.** A code under the exponent of 2^23 is that float plus the code. The difference from
2^23 plus a zero point is that of code and zero point, rounded once as ever, wherever the latter sum
is exact: as for all whole zero points. So a conversion less for each vector of codes, and the same
bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu import ir, simd
from gemmule.backends.cpu.intrinsics import element_pointer, widen
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, Value
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.core.problem import FLOAT4, ITEMSIZE
from gemmule.quant.float4 import VALUES
from gemmule.rungs._cpu import address
from gemmule.rungs._cpu_vectors import above_zero
from gemmule.rungs.quantized.cpu._operands import Stored, blocks_of, scale_dtype_of

LIFT = 2.0**23  # a float of this size has a code as its lowest byte
LIFT_BITS = 0x4B000000
WORD = 16
Values = list[Value]
Numbers = tuple[Intrinsic, Intrinsic]  # what loads scales, and what zero points


class LiftedZeros(NamedTuple):
    """Zero points plus 2^23, and where they lie: 0 where the matrix has none."""

    zeros: NDArray[np.float32] | None
    place: int


def lifted_zeros(parts: Stored) -> LiftedZeros | None:
    """Return what codes that are decoded as 2^23 plus a code are less, exactly.

    None where there is no such thing: for zero points that are no whole numbers, for nibbles that
    are looked up, and for codes that are floats.
    """
    if (parts.bits == 4 and has_wide_vectors()) or scale_dtype_of(parts) in FLOAT4:
        return None
    if parts.zeros is None:
        return LiftedZeros(None, 0)
    zeros = parts.zeros + np.float32(LIFT)
    if not np.array_equal(zeros - np.float32(LIFT), parts.zeros):
        return None
    return LiftedZeros(zeros, address(zeros))


class Kind(NamedTuple):
    """What kernels are compiled for.

    pieces: see `_operands.Blocks`; lifted: zero points come plus 2^23; quads: see `quad_pieces`.
    """

    bits: int
    pieces: int
    scale_dtype: str
    has_zeros: bool
    integers: bool
    lifted: bool
    quads: int

    @property
    def floats(self) -> bool:
        """Whether codes are floats of 4 bits."""
        return self.scale_dtype in FLOAT4

    @property
    def zero(self) -> float:
        """The zero point of a matrix that stores none."""
        return 0.0 if self.floats else 2.0 ** (self.bits - 1)

    @property
    def tables(self) -> bool:
        """Whether nibbles are looked up in the table of their group's 16 weights."""
        return self.bits == 4 and self.pieces == 1 and has_wide_vectors()

    @property
    def order(self) -> list[int]:
        """The codes of a lane in the order in which few are alive."""
        if not by_words(self.pieces):
            return list(range(simd.codes_per_lane(self.bits)))
        width = WORD // self.bits
        return [side * width + part for part in range(width) for side in range(2)]


def kind_of(parts: Stored, *, integers: bool = False, lifted: bool = False, quads: int = 0) -> Kind:
    """Return the kind of a matrix."""
    pieces = blocks_of(parts.n, parts.bits, parts.group).pieces
    dtype = scale_dtype_of(parts)
    return Kind(parts.bits, pieces, dtype, parts.zeros is not None, integers, lifted, quads)


def by_words(pieces: int) -> bool:
    """Whether codes of a block are taken from 16-bit words, not from the lanes' 32.

    Then the lanes of 16 bytes of codes hold them in another order (`activations.place_kernel`), so
    they must not be of two groups.
    """
    return not has_wide_vectors() and pieces in (1, 2, 4)


def tables_of(builder: Any, scales: Values, zeros: Values, kind: Kind) -> Values:
    """Emit the 16 weights that the 16 nibbles stand for, for each row."""
    codes = _float_table() if kind.floats else simd.counting()
    return [
        builder.fmul(builder.fsub(codes, zero), scale)
        for scale, zero in zip(scales, zeros, strict=True)
    ]


def steps_of(
    builder: Any, word: Value, zero: Value, kind: Kind, lowest: Value
) -> Callable[[int], Value]:
    """Return what emits code k of a register's lanes less its zero point.

    lowest: `LOWEST_BYTES`, as a number that LLVM does not know.
    """
    halves_of_words = builder.bitcast(word, simd.vector_type("int16", 2 * word.type.count))
    kept: dict[int, Value] = {}

    def step(k: int) -> Value:
        if kind.floats and word.type.count == LANES:
            return simd.lookup(builder, _float_table(), simd.code_k(builder, word, k, kind.bits))
        if word.type.count == LANES:
            if kind.lifted:
                return builder.fsub(_lifted_byte(builder, word, k, lowest), zero)
            return builder.fsub(simd.code_as_float(builder, word, k, kind.bits), zero)
        if by_words(kind.pieces):
            code = _code_of_words(builder, halves_of_words, k, kind.bits, kept)
        else:
            code = _lifted_code(builder, word, k, kind.bits)
        if kind.floats:
            return _float_of(builder, code)
        if not kind.lifted:
            code = builder.fsub(code, code.type([LIFT] * code.type.count))
        return builder.fsub(code, zero)

    return step


def _float_table() -> Value:
    """Return the register of what the 16 codes that are floats stand for."""
    return simd.vector_type("float32")([float(value) for value in VALUES])


def _float_of(builder: Any, lifted: Value) -> Value:
    """Emit what a code that is a float stands for, of eight lanes whose low four bits hold it.

    Its size is looked up by three bits of it, and the fourth is the sign.
    """
    lanes = lifted.type.count
    code = builder.bitcast(lifted, simd.vector_type("int32", lanes))
    sizes = lifted.type([float(value) for value in VALUES[:lanes]])
    size = simd.called(builder, "llvm.x86.avx2.permps", lifted.type, sizes, code)
    sign = builder.and_(
        builder.shl(code, simd.constant(28, "int32", lanes)),
        simd.constant(-(1 << 31), "int32", lanes),
    )
    return builder.bitcast(builder.or_(builder.bitcast(size, sign.type), sign), lifted.type)


def _lifted_byte(builder: Any, word: Value, k: int, lowest: Value) -> Value:
    """Emit 2^23 plus byte k of 16 lanes as a float, exactly: one masked shuffle of bytes."""
    kind = simd.vector_type("int8", BLOCK_BYTES)
    mask = builder.bitcast(lowest, ir.VectorType(ir.IntType(1), BLOCK_BYTES))
    codes, lift = builder.bitcast(word, kind), builder.bitcast(simd.constant(LIFT), kind)
    places = [4 * (i // 4) + k for i in range(BLOCK_BYTES)]
    both = builder.select(mask, simd.shuffled(builder, codes, codes, places), lift)
    return builder.bitcast(both, simd.vector_type("float32"))


def _lifted_code(builder: Any, word: Value, k: int, bits: int) -> Value:
    """Emit code k of a register's lanes under the exponent of 2^23."""
    lanes = word.type.count
    code = builder.lshr(word, simd.constant(bits * k, "int32", lanes)) if k > 0 else word
    if k < simd.codes_per_lane(bits) - 1:
        code = builder.and_(code, simd.constant(2**bits - 1, "int32", lanes))
    lifted = builder.or_(code, simd.constant(LIFT_BITS, "int32", lanes))
    return builder.bitcast(lifted, simd.vector_type("float32", lanes))


def _code_of_words(builder: Any, words: Value, k: int, bits: int, kept: dict[int, Value]) -> Value:
    """Emit code k of eight lanes under the exponent of 2^23: half a shift and a mask, a shuffle.

    kept: of which the codes of one k are two vectors' worth.
    """
    half, quad = LANES // 2, LANES // 4  # shuffles of AVX2 stay within 16 bytes, a quad of lanes
    side, part = divmod(k, WORD // bits)
    if part not in kept:
        code = builder.lshr(words, words.type([bits * part] * LANES)) if part else words
        if part < WORD // bits - 1:
            code = builder.and_(code, words.type([2**bits - 1] * LANES))
        kept[part] = code
    upper = words.type([LIFT_BITS >> WORD] * LANES)
    order = [
        half * (i // half) + quad * side + i // 2 % quad + LANES * (i % 2) for i in range(LANES)
    ]
    both = simd.shuffled(builder, kept[part], upper, order)
    return builder.bitcast(both, simd.vector_type("float32", half))


def code_of_table(builder: Any, table: Value, word: Value, k: int) -> Value:
    """Emit the weights of nibble k of 16 lanes."""
    return simd.lookup(builder, table, simd.code_k(builder, word, k, 4))


@functools.cache
def fixed_numbers(value: float, vectors: int) -> Intrinsic:
    """Return an operation like `group_numbers` that gives `value` for every group."""
    name = f"fixed_numbers {value} {vectors}"
    return operation(name, lambda *_: [simd.constant(value)] * vectors)


Order = tuple[int, ...]


@functools.cache
def group_numbers(
    dtype: str, pieces: int, rows: int, orders: tuple[Order, ...] = (), *, complete: bool = False
) -> Intrinsic:
    """Return ``f(address, index, row_step, count, lanes)``: a vector of group numbers for each row.

    Where one group is met, or a part of one (`pieces` is 1), it is element `index` in every lane.
    Else `count` numbers are loaded from `index` on, and lane d gets the one that word d of the
    vector at address `lanes` names; or, of known `orders`, a vector for each of these, which say
    what number each of its lanes takes of 16. `complete`: all `pieces` numbers are there. Index,
    row_step and count are in elements of `dtype`.
    """
    each = max(len(orders), 1)

    def of_order(builder: Any, address: Value, start: Value, left: Value, order: Order) -> Value:
        if not complete:
            some = _first_numbers(builder, address, start, dtype, left)
        elif pieces == 2 and dtype == "float32" and not has_wide_vectors():
            return _two_broadcasts(builder, address, start, dtype)
        else:
            kind = simd.vector_type(dtype, min(pieces, LANES))
            pointer = element_pointer(builder, address, start, dtype)
            raw = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=1)
            some = widen(builder, raw, dtype, "float32")
        return simd.shuffled(builder, some, some, order)

    def emit(
        builder: Any, address: Value, index: Value, step: Value, count: Value, lanes: Value
    ) -> Values:
        numbers: Values = []
        for place in simd.row_addresses(builder, index, step, rows):
            if pieces == 1:
                numbers += [alike(builder, address, place, dtype)] * each
            elif not orders:
                some = _first_numbers(builder, address, place, dtype, count)
                order_of_lanes = simd.load_vector(builder, lanes, "int32")
                numbers.append(simd.lookup(builder, some, order_of_lanes))
            for vector, order in enumerate(orders if pieces > 1 else ()):
                low = LANES * vector
                left = above_zero(builder, count, low)
                start = builder.add(place, place.type(low))
                numbers.append(of_order(builder, address, start, left, order))
        return numbers

    name = f"group_numbers {dtype} {pieces if orders else pieces == 1} {rows} {orders} {complete}"
    return operation(name, emit)


def alike(builder: Any, address: Value, place: Value, dtype: str) -> Value:
    """Emit one number in every lane."""
    number = builder.load(element_pointer(builder, address, place, dtype), align=1)
    return simd.splat(builder, widen(builder, number, dtype, "float32"))


def _two_broadcasts(builder: Any, address: Value, place: Value, dtype: str) -> Value:
    """Emit one number in the lower lanes and the next in the upper: from memory, no arithmetic."""
    both = [
        simd.splat(builder, builder.load(element_pointer(builder, address, at, dtype), align=1), 8)
        for at in (place, builder.add(place, place.type(1)))
    ]
    return simd.joined(builder, *both)


def _first_numbers(builder: Any, address: Value, place: Value, dtype: str, count: Value) -> Value:
    """Emit the first `count` of 16 numbers as floats."""
    start = builder.ptrtoint(element_pointer(builder, address, place, dtype), count.type)
    size = 8 * ITEMSIZE[dtype]
    raw = simd.masked_load(builder, start, ir.IntType(size), LANES, count)
    raw = builder.bitcast(raw, simd.vector_type(dtype))
    return widen(builder, raw, dtype, "float32")


def numbers_of(kind: Kind, rows: int, *, full: bool) -> Numbers:
    """Return the operations that give the rows' scales and zero points in a block.

    full: in blocks that a row fills, whose groups AVX2 takes by broadcasts. Of a lifted kind zero
    points are wanted plus 2^23, and stored so.
    """
    pieces = kind.pieces
    order = tuple(i * pieces // LANES for i in range(LANES))
    known = full and pieces > 1 and not has_wide_vectors()
    orders = (order,) if known else ()
    make = functools.partial(group_numbers, pieces=pieces, rows=rows, orders=orders, complete=known)
    fixed = kind.zero + (LIFT if kind.lifted else 0)
    zeros = make("float32") if kind.has_zeros else fixed_numbers(fixed, rows)
    return make(kind.scale_dtype), zeros
