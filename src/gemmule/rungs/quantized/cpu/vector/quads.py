"""Four blocks of a row at a time, their integer sums joined before they become floats.

A *quad* is four blocks of 4-bit codes, 512 columns of a row. VPDPBUSD leaves the sum of eight
products in each lane, at most 8 * 15 * 127 (8 * 24 * 127 of doubled 4-bit floats), so two blocks'
sums fit the 16-bit halves of one register, and VPMADDWD with ones adds neighbours. Done twice, that
makes one vector of 16 sums of 32 columns: as many as share a scale of the activations, so that a
group's scale and zero point meet 16 sums at once, and groups of 32 cost what groups of 128 do. Lane
4 q + j belongs to the q-th 32 columns of block j, as registers are joined within 16 bytes. For
groups of 16 columns it is done once: two vectors, and lane 4 q + 2 j + h of the first (of the
second: j less 2) belongs to half h of those columns.

A *record* is what 512 activations hold: two planes of 64 signed bytes (even, odd columns) for each
block, then for each vector of sums those of the activations: as integers, times the fixed zero
point with its sign, and as floats; then the scales.
"""

from __future__ import annotations

import functools
from typing import Any

from gemmule.backends.cpu import simd
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, Value
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.rungs.quantized.cpu.vector.codes import (
    Kind,
    Numbers,
    Values,
    fixed_numbers,
    group_numbers,
)
from gemmule.rungs.quantized.cpu.vector.integers import (
    dot,
    group_codes,
    group_values,
    has_byte_products,
    larger_words,
    mark,
    store_planes,
    weight_planes,
)

BLOCKS = 4
QUAD_BYTES = BLOCKS * BLOCK_BYTES
QUAD_COLUMNS = 2 * QUAD_BYTES
SMALLEST_GROUP = 16
_PLANES = 2
_BITS = 4
# Instructions for 64 bytes of a row: by quads; by blocks whose lanes share a scale, or do not.
_BY_QUAD, _BY_BLOCK, _BY_LANES = 13, 15, 25
_SUMS_AT = BLOCKS * _PLANES * BLOCK_BYTES


def quad_pieces(n: int, bits: int, group: int) -> int:
    """Return how many groups a quad of a row holds, 1 for a part of one; 0: blocks are better.

    The last quad of a row may hold one block alone and takes as long as any.
    """
    if bits != _BITS or not has_wide_vectors() or not has_byte_products():
        return 0
    alike = group >= n or group % QUAD_COLUMNS == 0
    if not alike and (group < SMALLEST_GROUP or QUAD_COLUMNS % group != 0):
        return 0
    one_scale = alike or group % (QUAD_COLUMNS // BLOCKS) == 0
    by_block = _BY_BLOCK if one_scale else _BY_LANES
    quads, blocks = -(-n // QUAD_COLUMNS), -(-n * BLOCKS // QUAD_COLUMNS)
    if quads * BLOCKS * _BY_QUAD > blocks * by_block:
        return 0
    return 1 if alike else QUAD_COLUMNS // group


def vectors_of(pieces: int) -> int:
    """Return how many vectors of sums a quad of so many groups has."""
    return 2 if pieces > LANES else 1


def quad_record_bytes(vectors: int) -> int:
    """Return the size of a record that serves so many vectors of sums."""
    return scales_at(vectors) + BLOCK_BYTES * vectors


def scales_at(vectors: int) -> int:
    """Return where the scales begin in a record."""
    return _SUMS_AT + 2 * BLOCK_BYTES * vectors


def _first_column(vector: int, lane: int, vectors: int) -> int:
    """Return the first column of a quad that a lane of its sums belongs to."""
    q, place = divmod(lane, 4)
    if vectors == 1:
        return 128 * place + 32 * q
    return 128 * (2 * vector + place // 2) + 32 * q + 16 * (place % 2)


def _joined(builder: Any, sums: Values, vectors: int) -> Values:
    """Emit `vectors` vectors of sums from the four blocks' lanes."""
    pairs, lanes = simd.vector_type("int16", 2 * LANES), simd.vector_type("int32")
    while len(sums) > vectors:
        packed = [
            simd.called(builder, "llvm.x86.avx512.packssdw.512", pairs, *sums[i : i + 2])
            for i in range(0, len(sums), 2)
        ]
        ones = pairs([1] * 2 * LANES)
        name = "llvm.x86.avx512.pmaddw.d.512"
        sums = [simd.called(builder, name, lanes, one, ones) for one in packed]
    return sums


def quad_numbers(kind: Kind, rows: int, *, full: bool) -> Numbers:
    """Return `codes.numbers_of` for the sums of a quad; fixed zero points go off in integers."""
    vectors, group = vectors_of(kind.quads), QUAD_COLUMNS // kind.quads
    orders = tuple(
        tuple(_first_column(v, i, vectors) // group - v * LANES for i in range(LANES))
        for v in range(vectors)
    )
    scales, zeros = (
        group_numbers(dtype, kind.quads, rows, orders, complete=full)
        for dtype in (kind.scale_dtype, "float32")
    )
    return scales, zeros if kind.has_zeros else fixed_numbers(0.0, rows * vectors)


@functools.cache
def add_quads(pieces: int, rows: int, *, has_zeros: bool, floats: bool = False) -> Intrinsic:
    """Return ``f(totals, scales, zeros, words, x, _)``: totals plus a quad's products, by rows.

    x: address of the quad's record. The integer sum over a lane's columns is exact. Without zeros
    the fixed zero point is taken off in integers, with them as floats.
    """
    vectors = vectors_of(pieces)

    def emit(
        builder: Any, totals: Values, scales: Values, zeros: Values, codes: Values, *rest: Value
    ) -> Values:
        x = rest[0]
        activations = [
            simd.load_vector(builder, x, "int32", BLOCK_BYTES * i) for i in range(BLOCKS * _PLANES)
        ]
        sums_at = _SUMS_AT + BLOCK_BYTES * vectors * has_zeros
        kind = "float32" if has_zeros else "int32"
        taken_off, x_scales = (
            [simd.load_vector(builder, x, t, at + BLOCK_BYTES * i) for i in range(vectors)]
            for t, at in ((kind, sums_at), ("float32", scales_at(vectors)))
        )
        if floats:  # codes are doubled
            x_scales = [builder.fmul(one, simd.constant(0.5)) for one in x_scales]
        results = []
        for row, total in enumerate(totals):
            blocks = codes[BLOCKS * row : BLOCKS * (row + 1)]
            sums = _joined(builder, _sums(builder, blocks, activations, floats), vectors)
            for v, one in enumerate(sums):
                i = vectors * row + v
                if has_zeros:
                    product = builder.sitofp(one, simd.vector_type("float32"))
                    product = simd.fused(builder, builder.fneg(zeros[i]), taken_off[v], product)
                else:
                    less = builder.add(one, taken_off[v])
                    product = builder.sitofp(less, simd.vector_type("float32"))
                product = builder.fmul(product, x_scales[v])  # see `add_integer_products`
                total = simd.fused(builder, product, scales[i], total)
            results.append(total)
        return results

    name = f"add_quads {pieces} {rows} {has_zeros} {floats}"
    return operation(name, emit)


def _sums(builder: Any, blocks: Values, activations: Values, floats: bool) -> Values:
    """Emit each block's lanes: codes times activations, eight products in each."""
    sums = []
    for block, word in enumerate(blocks):
        total = simd.constant(0, "int32")
        for side, plane in enumerate(weight_planes(builder, word, _BITS, floats=floats)):
            total = dot(builder, total, plane, activations[_PLANES * block + side])
        sums.append(total)
    return sums


@functools.cache
def quantise_group(vectors: int) -> Intrinsic:
    """Return ``f(sizes, x, count, planes, scales)``: round 32 activations, of which `count` exist.

    planes, scales: addresses within a record. Returns the largest sizes so far, one word vector.
    """

    def emit(
        builder: Any, sizes: Values, x: Value, count: Value, planes: Value, scales: Value
    ) -> Values:
        codes, scale, largest = group_codes(builder, group_values(builder, x, count, 0))
        store_planes(builder, codes, _PLANES, planes, 0)
        simd.store_vector(builder, simd.shuffled(builder, scale, scale, [0] * vectors), scales, 0)
        return [larger_words(builder, sizes[0], largest)]

    return operation(f"quantise_group {vectors}", emit)


no_sizes = operation("no_sizes", lambda _: [simd.constant(0, "int32")])
"""``f()``: what `quantise_group` begins with."""

mark_sizes = operation("mark_sizes", lambda builder, sizes, flag: mark(builder, flag, sizes[0]))
"""``f(sizes, flag)``: set the int32 at address `flag` where one is NaN's or infinity's."""


@functools.cache
def add_up_quad(vectors: int, zero: int) -> Intrinsic:
    """Return ``f(record)``: add up the codes of a record, for what the zero points take off.

    zero: the fixed one.
    """

    def emit(builder: Any, record: Value) -> None:
        ones, sums = simd.constant(0x01010101, "int32"), []
        for block in range(BLOCKS):
            total = simd.constant(0, "int32")
            for side in range(_PLANES):
                at = BLOCK_BYTES * (_PLANES * block + side)
                total = dot(builder, total, ones, simd.load_vector(builder, record, "int32", at))
            sums.append(total)
        for v, one in enumerate(_joined(builder, sums, vectors)):
            fixed = builder.mul(one, simd.constant(-zero, "int32"))
            simd.store_vector(builder, fixed, record, _SUMS_AT + BLOCK_BYTES * v)
            as_float = builder.sitofp(one, simd.vector_type("float32"))
            simd.store_vector(builder, as_float, record, _SUMS_AT + BLOCK_BYTES * (vectors + v))

    return operation(f"add_up_quad {vectors} {zero}", emit)
