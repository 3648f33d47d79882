"""Operations on strips, 64 columns of one row, for products across the rows by AVX2.

A strip's results fill eight registers, which they keep while rows pass; two more hold a row's
factor and zero point, two constants, and four are left for codes on their way. So rows come one by
one, each from codes to sums before the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu import ir, simd
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import Value
from gemmule.rungs.quantized.cpu.vector.codes import LIFT, LIFT_BITS, Values

COLUMNS = 64
RESULT_BYTES = 4 * COLUMNS
LANES = 8  # of a register
REGISTERS = COLUMNS // LANES
TABLE_BYTES = 32  # of a zero point: see `nibble_tables`


class Form(NamedTuple):
    """How codes of a strip become weights.

    tables: nibbles are looked up, and zero points come as 16-bit places in `nibble_tables`; lifted:
    as floats plus 2^23; else as they are. has_zeros: else all are 2^(bits - 1).
    """

    bits: int
    tables: bool
    lifted: bool
    has_zeros: bool

    @property
    def zero_bytes(self) -> int:
        """Bytes of a stored zero point."""
        return 2 if self.tables else 4


def strip_bytes(bits: int) -> int:
    """Return how many bytes of codes a strip has."""
    return COLUMNS * bits // 8


@functools.cache
def nibble_tables() -> NDArray[np.uint8]:
    """Return what nibbles weigh before they are scaled, for each whole zero point from 0 to 15.

    Each has 16 lower and 16 upper bytes of bfloat16, which holds such differences exactly.
    """
    codes = np.arange(16, dtype=np.float32)
    upper = ((codes - codes[:, None]).view(np.uint32) >> 16).astype(np.uint16)
    return np.stack([upper & 255, upper >> 8], axis=1).astype(np.uint8)


def _behind(builder: Any, number: Value, sums: Values) -> Value:
    """Emit a number, for LLVM to take when it has computed these sums, not before.

    All codes as floats at once would not fit the registers.
    """
    form = ir.FunctionType(number.type, [number.type, *(one.type for one in sums)])
    constraints = ",".join(["=r", "0", *("x" for _ in sums)])
    return builder.asm(form, "", constraints, [number, *sums], False)


def _unpacked(builder: Any, low: Value, high: Value) -> Values:
    """Emit the two interleaved halves of two registers, within each 16 bytes."""
    count = low.type.count
    half = count // 4
    lanes = [half * 2 * (i // (2 * half)) + i // 2 % half + count * (i % 2) for i in range(count)]
    return [
        simd.shuffled(builder, low, high, [lane + half * side for lane in lanes])
        for side in range(2)
    ]


def _words(builder: Any, raw: Value, bits: int) -> list[Value]:
    """Emit the codes of 32 bytes by their place in 16-bit words: each 16 of them."""
    words = builder.bitcast(raw, simd.vector_type("int16", 16))
    count, found = 16 // bits, []
    for part in range(count):
        code = builder.lshr(words, words.type([bits * part] * 16)) if part else words
        if part < count - 1:
            code = builder.and_(code, words.type([2**bits - 1] * 16))
        found.append(code)
    return found


def _by_lift(builder: Any, raw: Value, lift: Value, zeros: Value, form: Form) -> Values:
    """Emit codes of 32 bytes less the zero point, from floats plus 2^23; lift: their upper halves.

    To which LLVM may not look: it would keep it twice, once for each half of a register's codes.
    """
    steps = []
    for code in _words(builder, raw, form.bits):
        for both in _unpacked(builder, code, lift):
            some = builder.bitcast(both, simd.vector_type("float32", LANES))
            if not form.lifted:
                some = builder.fsub(some, some.type([LIFT] * LANES))
            steps.append(builder.fsub(some, zeros))
    return steps


def _by_tables(builder: Any, raw: Value, tables: Values) -> Values:
    """Emit what nibbles of 32 bytes weigh: their bfloat16, a byte by each table, side by side."""
    kind, words = raw.type, simd.vector_type("int16", 16)
    upper = builder.lshr(builder.bitcast(raw, words), words([4] * 16))
    weights = []
    for some in (raw, builder.bitcast(upper, kind)):
        nibbles = builder.and_(some, kind([15] * 32))
        name = "llvm.x86.avx2.pshuf.b"
        found = [simd.called(builder, name, kind, table, nibbles) for table in tables]
        for pairs in _unpacked(builder, *found):
            both = builder.bitcast(pairs, simd.vector_type("int32", LANES))
            even = builder.shl(both, both.type([16] * LANES))
            odd = builder.and_(both, both.type([0xFFFF0000] * LANES))
            weights += [
                builder.bitcast(one, simd.vector_type("float32", LANES)) for one in (even, odd)
            ]
    return weights


def _tables_at(builder: Any, address: Value) -> Values:
    halves_ = [simd.load_vector(builder, address, "int8", 16 * side, 16) for side in range(2)]
    return [simd.shuffled(builder, one, one, [i % 16 for i in range(32)]) for one in halves_]


@functools.cache
def add_strip(form: Form, *, whole: bool) -> Intrinsic:
    """Return ``f(totals, codes, scale, zero, x, tables, left)``: totals plus a row's products.

    The addresses of a row's codes, its scale, zero point, x, and of `nibble_tables`; left: how many
    bytes of codes a strip has that is not whole.
    """

    def weights_of(builder: Any, zero: Value, tables: Value) -> Callable[[Value], Values]:
        if form.tables:
            at = tables.type(TABLE_BYTES * 8)
            if form.has_zeros:
                at = builder.zext(simd.load_number(builder, zero, "int16"), tables.type)
            of_zero = _tables_at(builder, builder.add(tables, at))
            return lambda raw: _by_tables(builder, raw, of_zero)
        if form.has_zeros:
            points = simd.splat(builder, simd.load_number(builder, zero, "float32"), LANES)
        else:
            fixed = 2.0 ** (form.bits - 1) + (LIFT if form.lifted else 0)
            points = simd.constant(fixed, lanes=LANES)
        lift = simd.unseen(builder, simd.constant(LIFT_BITS >> 16, "int16", 16))
        return lambda raw: _by_lift(builder, raw, lift, points, form)

    def emit(builder: Any, totals: Values, *places: Value) -> Values:
        at, scale, zero, x, tables, left = places
        numbers = [simd.spread(builder, one, lanes=LANES) for one in (scale, x)]
        factor = builder.fmul(simd.unseen(builder, numbers[0]), numbers[1])
        weights = weights_of(builder, zero, tables)
        sums: Values = []
        before = [half for total in totals for half in simd.halves(builder, total)]
        if not whole:
            raws = _some_codes(builder, at, form.bits, left)
        for i in range(strip_bytes(form.bits) // 32):
            if whole:
                start = _behind(builder, at, sums) if i > 0 else at
                raw = simd.load_vector(builder, start, "int8", 32 * i, 32)
            else:
                raw = raws[i]
            for weight in weights(raw):
                sums.append(simd.fused(builder, weight, factor, before[len(sums)]))
        return [simd.joined(builder, *sums[i : i + 2]) for i in range(0, REGISTERS, 2)]

    name = f"add_strip {form} {whole}"
    return operation(name, emit)


def _some_codes(builder: Any, at: Value, bits: int, left: Value) -> Values:
    """Emit the loads of a strip's first codes, `left` bytes, in registers of 32."""
    count = strip_bytes(bits)
    raw = simd.masked_load(builder, at, ir.IntType(8), count, left)
    return [simd.shuffled(builder, raw, raw, range(low, low + 32)) for low in range(0, count, 32)]


def column_of(form: Form, place: int) -> int:
    """Return the column of a strip whose result `add_strip` has in a lane of its registers."""
    register, lane = divmod(place, LANES)
    half, lane = divmod(lane, 4)  # what is interleaved stays within 16 bytes
    if form.tables:
        nibble, pairs, odd = register // 4, register // 2 % 2, register % 2
        return 2 * (16 * half + 8 * pairs + 2 * lane + odd) + nibble
    width = 16 // form.bits
    raw, register = divmod(register, 2 * width)
    part, side = divmod(register, 2)
    return 16 * width * raw + width * (8 * half + 4 * side + lane) + part


@functools.cache
def in_columns(form: Form) -> Intrinsic:
    """Return ``f(address, to)``: write a strip's results in the order of its columns."""
    places = [0] * COLUMNS
    for place in range(COLUMNS):
        places[column_of(form, place)] = place

    def emit(builder: Any, address: Value, to: Value) -> None:
        found = simd.load_vector(builder, address, "float32", 0, COLUMNS)
        simd.store_vector(builder, simd.shuffled(builder, found, found, places), to, 0)

    return operation(f"in_columns {form}", emit)
