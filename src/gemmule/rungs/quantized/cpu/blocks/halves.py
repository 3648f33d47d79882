"""Codes as weights in bfloat16, in tiles, and x in the same order: products of rounded weights.

A *chunk* is 64 bytes of codes. The code k of each 16 bits of it goes to tile k: a row of the tile
is 32 weights, so that decoding moves none of them, and of x, which is smaller, pairs of rows are
put together as they meet there (`put_columns`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from gemmule.backends.cpu import ir, simd
from gemmule.backends.cpu.amx import TILE_BYTES, TILE_ROWS
from gemmule.backends.cpu.intrinsics import emit_prefetch, load, narrow, store
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel, operation
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, Value
from gemmule.backends.cpu.target import missing_features
from gemmule.rungs._cpu_vectors import transposed
from gemmule.rungs.quantized.cpu.vector import codes
from gemmule.rungs.quantized.cpu.vector.codes import Kind, Numbers, Values

_WORDS = 2 * LANES  # of 16 bits in a vector, and terms of a tile
_INTERLEAVED = [i // 2 + LANES * (i % 2) for i in range(_WORDS)]


def tiles_of(bits: int) -> int:
    """Return how many tiles a chunk becomes."""
    return 16 // bits


@functools.cache
def _bfloat() -> Any:
    """Return LLVM's type of a bfloat16, which llvmlite does not name."""

    class Bfloat(ir.Type):  # type: ignore[misc]
        def _to_string(self) -> str:
            return "bfloat"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Bfloat)

        def __hash__(self) -> int:
            return hash(Bfloat)

    return Bfloat()


def _rounded(builder: Any, low: Value, high: Value) -> Value:
    """Emit 32 bfloat16 of twice sixteen floats, rounded to nearest even."""
    words = simd.vector_type("int16", _WORDS)
    if missing_features("avx512bf16") is None:
        name, kind = "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(_bfloat(), _WORDS)
        return builder.bitcast(simd.called(builder, name, kind, high, low), words)
    first, second = (narrow(builder, one, "bfloat16", "float32") for one in (low, high))
    return simd.shuffled(builder, first, second, range(_WORDS))


def looked_up(kind: Kind) -> bool:
    """Whether nibbles are looked up among the weights of their group: up to four groups a chunk."""
    return kind.bits == 4 and kind.pieces in (1, 2, 4)


def numbers_of(kind: Kind) -> Numbers:
    """Return what loads scales and zero points: a vector for each group where there are tables."""
    if not looked_up(kind):
        return codes.numbers_of(kind, 1, full=False)
    zeros = codes.fixed_numbers(8.0, kind.pieces)
    if kind.has_zeros:
        zeros = _each_group("float32", kind.pieces)
    return _each_group(kind.scale_dtype, kind.pieces), zeros


@functools.cache
def _each_group(dtype: str, pieces: int) -> Intrinsic:
    """Return ``f(address, index, step, count, lanes)``: a group's number in all lanes, of each.

    Of groups behind the `count` ones of a row the last one's.
    """

    def emit(builder: Any, address: Value, index: Value, _: Value, count: Value, *__: Value) -> Any:
        last = builder.sub(count, count.type(1))
        for piece in range(pieces):
            within = builder.icmp_signed("<", last, last.type(piece))
            at = builder.add(index, builder.select(within, last, last.type(piece)))
            yield codes.alike(builder, address, at, dtype)

    return operation(f"each_group {dtype} {pieces}", lambda *given: list(emit(*given)))


@functools.cache
def put_halves(kind: Kind) -> Intrinsic:
    """Return ``f(scales, zeros, words, out, lowest)``: a chunk of a row as rows of its tiles."""
    tiles, tables = tiles_of(kind.bits), looked_up(kind)

    def emit(
        builder: Any, scales: Values, zeros: Values, words: Values, out: Value, lowest: Value
    ) -> None:
        (word,) = words
        if tables:
            rows = _looked_up(builder, codes.tables_of(builder, scales, zeros), word)
        else:
            step = codes.steps_of(builder, word, zeros[0], kind, lowest)
            rows = (
                _rounded(builder, *(builder.fmul(step(part), scales[0]) for part in (k, tiles + k)))
                for k in range(tiles)
            )
        for k, row in enumerate(rows):
            if kind.bits == 4 and not tables:  # in the order of words, as look-ups have it
                row = simd.shuffled(builder, row, row, _INTERLEAVED)
            simd.store_vector(builder, row, out, TILE_BYTES * k)

    return operation(f"put_halves {kind}", emit)


def _looked_up(builder: Any, tables: Values, word: Value) -> Iterator[Value]:
    """Emit the weights of nibble k of every 16 bits; two groups' tables make a vector.

    The index is the nibble and, above it, which group its word is of.
    """
    words, pieces = simd.vector_type("int16", _WORDS), len(tables)
    if pieces == 1:
        tables = tables * 2  # the index ends in five bits
    both = [_rounded(builder, *tables[i : i + 2]) for i in range(0, len(tables), 2)]
    nibbles = builder.bitcast(word, words)
    group = words([16 * (i * pieces // _WORDS) for i in range(_WORDS)])
    for k in range(4):
        index = builder.lshr(nibbles, words([4 * k] * _WORDS)) if k else nibbles
        if pieces > 1:
            index = builder.or_(builder.and_(index, words([15] * _WORDS)), group)
        if len(both) == 1:
            name = "llvm.x86.avx512.permvar.hi.512"
            yield simd.called(builder, name, words, both[0], index)
        else:
            name = "llvm.x86.avx512.vpermi2var.hi.512"
            yield simd.called(builder, name, words, both[0], index, both[1])


def _pairs(bits: int) -> list[tuple[int, int, int, int]]:
    """Return for each pair of terms of a chunk its tile, its row there, and both terms.

    Of nibbles a row of a tile holds one of each 16 bits; of bytes one of each 32, then another.
    """
    tiles, apart, found = tiles_of(bits), 4, []
    for k in range(tiles):
        for j in range(TILE_ROWS):
            low = 8 * j + k if bits == 4 else 8 * (j % 8) + 2 * (j // 8) + k
            found.append((k, j, low, low + apart))
    return found


@functools.cache
def _put_columns(bits: int, turned: bool) -> Intrinsic:
    """Return ``f(x, step, out)``: a chunk's terms of sixteen columns of bfloat16 as tiles.

    The terms of a column lie behind each other, `step` bytes from one column to the next; where
    `turned`, the columns of a term do, `step` bytes from one term to the next.
    """

    def of_columns(builder: Any, x: Value, step: Value) -> list[Value]:
        """Emit the 32-bit lanes of all columns, two terms each."""
        found = []
        lines = [builder.add(x, builder.mul(step, step.type(i))) for i in range(LANES)]
        nbytes = 2 * simd.block_columns(bits)
        for at in range(0, nbytes, BLOCK_BYTES):
            for line in lines:
                emit_prefetch(builder, builder.add(line, line.type(nbytes + at)))
            found += transposed(
                builder, [simd.load_vector(builder, line, "int32", at) for line in lines]
            )
        return [builder.bitcast(one, simd.vector_type("int16", _WORDS)) for one in found]

    def emit(builder: Any, x: Value, step: Value, out: Value) -> None:
        lanes = [] if turned else of_columns(builder, x, step)
        for tile, row, first, second in _pairs(bits):
            if turned:
                lines = [builder.add(x, builder.mul(step, step.type(i))) for i in (first, second)]
                one, other = (simd.load_vector(builder, at, "int16") for at in lines)
                order = _INTERLEAVED
            else:
                one, other = lanes[first // 2], lanes[second // 2]
                order = [i // 2 * 2 + first % 2 + _WORDS * (i % 2) for i in range(_WORDS)]
            both = simd.shuffled(builder, one, other, order)
            simd.store_vector(builder, both, out, TILE_BYTES * tile + BLOCK_BYTES * row)

    return operation(f"put_columns {bits} {turned}", emit)


@functools.cache
def pack_kernel(bits: int, unit: str) -> Kernel:
    """Return ``f(x, column_step, term_step, columns, terms, out)``: up to sixteen columns as tiles.

    x: bfloat16, steps in bytes; unit: the axis of unit stride, as `_tile.unit_axis` has it. What is
    not there, up to the end of a chunk, is 0.
    """
    read, write, clear = load("int16", "int32"), store("int16", "int32"), store("int64", "int64")
    tiles, chunk, quick = tiles_of(bits), simd.block_columns(bits), unit != "none"
    turned = unit == "width"
    put = _put_columns(bits, turned)

    @kernel
    def pack(x: int, column_step: int, term_step: int, columns: int, terms: int, out: int) -> None:
        whole = terms // chunk if quick and columns == LANES else 0
        step = term_step if turned else column_step
        for number in range(whole):
            put(x + number * chunk * term_step, step, out + number * tiles * TILE_BYTES)
        for number in range(whole, (terms + chunk - 1) // chunk):
            here, to = x + number * chunk * term_step, out + number * tiles * TILE_BYTES
            for i in range(tiles * TILE_BYTES // 8):
                clear(to, i, 0)
            for term in range(min(chunk, terms - number * chunk)):
                # `_pairs`, from term to place
                row, half = term // 8, term // 4 % 2
                if tiles == 2:
                    row += term // 2 % 2 * 8
                place = to + term % tiles * TILE_BYTES + row * BLOCK_BYTES + half * 2
                for column in range(columns):
                    value = read(here + column * column_step + term * term_step, 0)
                    write(place, 2 * column, value)

    return pack
