"""Codes as weights in bfloat16, in tiles, and x in the same order: products of rounded weights.

A *chunk* is 64 bytes of codes. The code k of each 16 bits of it goes to tile k: a row of the tile
is 32 weights, so that decoding moves none of them, and of x, which is smaller, pairs of rows are
put together as they meet there (`put_columns`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from gemmule.backends.cpu import ir, simd
from gemmule.backends.cpu.amx import TILE_BYTES, TILE_ROWS
from gemmule.backends.cpu.intrinsics import emit_prefetch, load, narrow, store, widen
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel, operation
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, Value
from gemmule.backends.cpu.target import missing_features
from gemmule.core.problem import ITEMSIZE
from gemmule.rungs._cpu_vectors import transposed
from gemmule.rungs.quantized.cpu.vector import codes
from gemmule.rungs.quantized.cpu.vector.codes import Kind, Numbers, Values

_WORDS = 2 * LANES  # of 16 bits in a vector, and terms of a tile
_PICK, _PICK_OF_TWO = "llvm.x86.avx512.permvar.hi.512", "llvm.x86.avx512.vpermi2var.hi.512"
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


def _pieces(builder: Any, pair: Values, count: int) -> list[Value]:
    """Emit twice sixteen floats as sums of so many bfloat16, the first ones those of `_rounded`."""
    (low, high), found = pair, [_rounded(builder, pair[0], pair[1])]
    while len(found) < count:
        halves = [
            widen(
                builder, simd.shuffled(builder, found[-1], found[-1], some), "bfloat16", "float32"
            )
            for some in (range(LANES), range(LANES, _WORDS))
        ]
        low, high = (builder.fsub(one, off) for one, off in zip((low, high), halves, strict=True))
        found.append(_rounded(builder, low, high))
    return found


def looked_up(kind: Kind, rows: int = 1) -> bool:
    """Whether nibbles are looked up among the weights of their group, a chunk of so many rows.

    A register holds the tables of two groups, or of one in two rows; four are looked into.
    """
    return kind.bits == 4 and kind.pieces in (1, 2, 4, 8 // rows)


def numbers_of(kind: Kind, rows: int = 1) -> Numbers:
    """Return what loads scales and zero points: a vector for each group where there are tables."""
    if not looked_up(kind, rows):
        return codes.numbers_of(kind, 1, full=False)
    zeros = codes.fixed_numbers(kind.zero, kind.pieces)
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
def put_halves(kind: Kind, pieces: int = 1) -> Intrinsic:
    """Return ``f(scales, zeros, words, out, lowest)``: a chunk of a row as rows of its tiles.

    A weight is the sum of so many bfloat16, of which each tile's lie behind each other.
    """
    tiles, tables = tiles_of(kind.bits), looked_up(kind)

    def emit(
        builder: Any, scales: Values, zeros: Values, words: Values, out: Value, lowest: Value
    ) -> None:
        (word,) = words
        if tables:
            rows = _looked_up(builder, codes.tables_of(builder, scales, zeros, kind), word, pieces)
        else:
            step = codes.steps_of(builder, word, zeros[0], kind, lowest)
            both = (
                [builder.fmul(step(part), scales[0]) for part in (k, tiles + k)]
                for k in range(tiles)
            )
            rows = (one for pair in both for one in _pieces(builder, pair, pieces))
        for k, row in enumerate(rows):
            if kind.bits == 4 and not tables:  # in the order of words, as look-ups have it
                row = simd.shuffled(builder, row, row, _INTERLEAVED)
            simd.store_vector(builder, row, out, TILE_BYTES * k)

    return operation(f"put_halves {kind} {pieces}", emit)


def _looked_up(builder: Any, tables: Values, word: Value, pieces: int) -> Iterator[Value]:
    """Emit the weights of nibble k of every 16 bits, piece by piece."""
    groups = len(tables)
    if groups == 1:
        tables = tables * 2  # the index ends in five bits
    both = [_pieces(builder, tables[i : i + 2], pieces) for i in range(0, len(tables), 2)]
    group = [16 * (i * groups // _WORDS) % 64 for i in range(_WORDS)]
    nibbles = builder.bitcast(word, simd.vector_type("int16", _WORDS))
    found = [_picked(builder, list(some), nibbles, group) for some in zip(*both, strict=True)]
    return itertools.chain.from_iterable(zip(*found, strict=True))


def _picked(builder: Any, tables: Values, nibbles: Value, place: list[int]) -> Iterator[Value]:
    """Emit what nibbles stand for in one, two or four tables of 32; two for each half of four.

    place: what is above the four bits of the index of each word.
    """
    words = nibbles.type
    for k in range(4):
        index = builder.lshr(nibbles, words([4 * k] * _WORDS)) if k else nibbles
        if any(place):
            index = builder.or_(builder.and_(index, words([15] * _WORDS)), words(place))
        if len(tables) == 1:
            yield simd.called(builder, _PICK, words, tables[0], index)
            continue
        found = [
            simd.called(builder, _PICK_OF_TWO, words, tables[i], index, tables[i + 1])
            for i in range(0, len(tables), 2)
        ]
        halves = [i + i * 2 // _WORDS * _WORDS for i in range(_WORDS)]
        yield simd.shuffled(builder, found[0], found[-1], halves)


@functools.cache
def put_pairs(kind: Kind) -> Intrinsic:
    """Return ``f(numbers, others, out, panel_bytes, lowest)``: a chunk of two rows of codes.

    numbers, others: scales, zero points and words of a row. As pairs of terms: code k of each lane
    goes to panel k, and one row of a tile is both rows' codes of sixteen lanes in turns.
    """
    lanes_codes, tables = simd.codes_per_lane(kind.bits), looked_up(kind, 2)

    def emit(builder: Any, *given: Any) -> None:
        *numbers, out, panel_bytes, lowest = given
        both = [(numbers[i], numbers[i + 1], numbers[i + 2][0]) for i in (0, 3)]
        if tables:
            rows = _looked_up_pairs(builder, both, kind)
        else:
            steps = [codes.steps_of(builder, w, z[0], kind, lowest) for _, z, w in both]
            rows = (
                _in_turns(
                    builder,
                    *(
                        builder.fmul(step(k), scales[0])
                        for step, (scales, *_) in zip(steps, both, strict=True)
                    ),
                )
                for k in range(lanes_codes)
            )
        for row in rows:
            simd.store_vector(builder, row, out, 0)
            out = builder.add(out, panel_bytes)

    return operation(f"put_pairs {kind}", emit)


def _in_turns(builder: Any, one: Value, other: Value) -> Value:
    both = _rounded(builder, one, other)
    return simd.shuffled(builder, both, both, _INTERLEAVED)


def _looked_up_pairs(builder: Any, both: Any, kind: Kind) -> Iterator[Value]:
    """Emit the weights of code k of each lane, of one row in even words, of the other in odd ones.

    A group's table is that of one row, then that of the other.
    """
    words, lanes = simd.vector_type("int16", _WORDS), simd.vector_type("int32")
    tables = [codes.tables_of(builder, scales, zeros, kind) for scales, zeros, _ in both]
    each = [_rounded(builder, *pair) for pair in zip(*tables, strict=True)]
    (*_, one), (*_, other) = both
    lower, half = lanes([0xFFFF] * LANES), lanes([16] * LANES)
    place = [i % 2 * 16 + i * len(each) // _WORDS % 2 * 32 for i in range(_WORDS)]
    for word in (
        builder.or_(builder.and_(one, lower), builder.shl(other, half)),
        builder.or_(builder.lshr(one, half), builder.and_(other, builder.not_(lower))),
    ):
        yield from _picked(builder, each, builder.bitcast(word, words), place)


@functools.cache
def in_columns(bits: int) -> Intrinsic:
    """Return ``f(sums, apart, out)``: some rows of sums of a chunk's panels, in order of columns.

    As many rows as a transpose of sixteen vectors takes: two or four. Panels are halves of groups
    of 32 columns `apart` bytes apart, rows 128 bytes; of `out`, a chunk.
    """
    panels, row_bytes = simd.codes_per_lane(bits), 4 * simd.block_columns(bits)

    def emit(builder: Any, sums: Value, apart: Value, out: Value) -> None:
        at = [builder.add(sums, builder.mul(apart, apart.type(k // 2))) for k in range(panels)]
        given = [
            simd.load_vector(builder, at[k], "float32", 128 * row + 64 * (k % 2))
            for row in range(LANES // panels)
            for k in range(panels)
        ]
        for lane, found in enumerate(transposed(builder, given)):
            for row in range(LANES // panels):
                part = simd.shuffled(builder, found, found, range(panels * row, panels * (row + 1)))
                simd.store_vector(builder, part, out, row_bytes * row + 4 * panels * lane)

    return operation(f"in_columns {bits}", emit)


def _pairs(bits: int, words: bool) -> list[tuple[int, int, int, int]]:
    """Return for each pair of terms of a chunk its tile, its row there, and both terms.

    Of nibbles a row of a tile holds one of each 16 bits; of bytes too where codes are decoded in
    `words` of 16 bits, else one of each 32, then another.
    """
    tiles, found = tiles_of(bits), []
    apart = 2 if bits == 8 and words else 4
    for k in range(tiles):
        for j in range(TILE_ROWS):
            low = 2 * apart * j + k
            if bits == 8 and not words:
                low = 8 * (j % 8) + 2 * (j // 8) + k
            found.append((k, j, low, low + apart))
    return found


@functools.cache
def _put_columns(bits: int, turned: bool, words: bool, pieces: int) -> Intrinsic:
    """Return ``f(x, step, last, out)``: a chunk's terms of sixteen columns of bfloat16 as tiles.

    The terms of a column lie behind each other, `step` bytes from one column to the next, and those
    behind the `last` are that again; where `turned`, the columns of a term do, `step` bytes from
    one term to the next, and there are sixteen.
    """

    def of_columns(builder: Any, x: Value, step: Value, last: Value) -> list[Value]:
        """Emit the 32-bit lanes of all columns, two terms each."""
        found, lines = [], []
        for i in range(LANES):
            there = builder.icmp_signed("<", last, last.type(i))
            number = builder.select(there, last, last.type(i))
            lines.append(builder.add(x, builder.mul(step, number)))
        nbytes = 2 * simd.block_columns(bits)
        for at in range(0, nbytes, BLOCK_BYTES):
            for line in lines:
                emit_prefetch(builder, builder.add(line, line.type(nbytes + at)))
            found += transposed(
                builder, [simd.load_vector(builder, line, "int32", at) for line in lines]
            )
        return [builder.bitcast(one, simd.vector_type("int16", _WORDS)) for one in found]

    def emit(builder: Any, x: Value, step: Value, last: Value, out: Value) -> None:
        lanes = [] if turned else of_columns(builder, x, step, last)
        for tile, row, first, second in _pairs(bits, words):
            if turned:
                lines = [builder.add(x, builder.mul(step, step.type(i))) for i in (first, second)]
                one, other = (simd.load_vector(builder, at, "int16") for at in lines)
                order = _INTERLEAVED
            else:
                one, other = lanes[first // 2], lanes[second // 2]
                order = [i // 2 * 2 + first % 2 + _WORDS * (i % 2) for i in range(_WORDS)]
            both = simd.shuffled(builder, one, other, order)
            simd.store_vector(builder, both, out, pieces * TILE_BYTES * tile + BLOCK_BYTES * row)

    return operation(f"put_columns {bits} {turned} {words} {pieces}", emit)


@functools.cache
def pack_kernel(bits: int, unit: str, words: bool = False, pieces: int = 1) -> Kernel:
    """Return ``f(x, column_step, term_step, columns, terms, out)``: up to sixteen columns as tiles.

    x: bfloat16, steps in bytes; unit: the axis of unit stride, as `_tile.unit_axis` has it; words:
    of `_pairs`; pieces: from tile to tile there is room for so many. What is not there, up to the
    end of a chunk, is 0; or, of columns whose terms lie side by side, the last one again.
    """
    read, write, clear = load("int16", "int32"), store("int16", "int32"), store("int64", "int64")
    tiles, chunk, tile_bytes = tiles_of(bits), simd.block_columns(bits), pieces * TILE_BYTES
    turned = unit == "width"
    put = _put_columns(bits, turned, words, pieces)
    least = {"width": LANES, "depth": 1, "none": LANES + 1}[unit]  # columns that are put at once
    bytes_in_words = bits == 8 and words

    @kernel
    def pack(x: int, column_step: int, term_step: int, columns: int, terms: int, out: int) -> None:
        whole = terms // chunk if columns >= least else 0
        step = term_step if turned else column_step
        for number in range(whole):
            to = out + number * tiles * tile_bytes
            put(x + number * chunk * term_step, step, columns - 1, to)
        for number in range(whole, (terms + chunk - 1) // chunk):
            here, to = x + number * chunk * term_step, out + number * tiles * tile_bytes
            for i in range(tiles * TILE_BYTES // 8):
                clear(to + i * 8 // TILE_BYTES * tile_bytes, i % (TILE_BYTES // 8), 0)
            for term in range(min(chunk, terms - number * chunk)):
                # `_pairs`, from term to place
                row, half = term // 8, term // 4 % 2
                if bytes_in_words:
                    row, half = term // 4, term // 2 % 2
                elif tiles == 2:
                    row += term // 2 % 2 * 8
                place = to + term % tiles * tile_bytes + row * BLOCK_BYTES + half * 2
                for column in range(columns):
                    value = read(here + column * column_step + term * term_step, 0)
                    write(place, 2 * column, value)

    return pack


EXTREMES_BYTES = 2 * BLOCK_BYTES


@functools.cache
def put_pieces(stored: str, pieces: int) -> Intrinsic:
    """Return ``f(x, count, next, next_count, out, apart, extremes)``: floats as bfloat16 pieces.

    So many elements from x on, sixteen at most, and as many from `next` on, as 32 numbers in each
    of the pieces, `apart` bytes apart; what is not there is 0. extremes: as `scale_chunk` has them,
    of the upper halves of float32.
    """

    def emit(builder: Any, x: Value, count: Value, *rest: Value) -> None:
        following, others, out, apart, extremes = rest
        element, both = ir.IntType(8 * ITEMSIZE[stored]), []
        for at, some in ((x, count), (following, others)):
            raw = simd.masked_load(builder, at, element, LANES, some)
            kind = simd.vector_type(stored)
            both.append(widen(builder, builder.bitcast(raw, kind), stored, "float32"))
        _note(builder, both, extremes)
        for found in _pieces(builder, both, pieces):
            simd.store_vector(builder, found, out, 0)
            out = builder.add(out, apart)

    return operation(f"put_pieces {stored} {pieces}", emit)


def _note(builder: Any, both: list[Value], extremes: Value) -> None:
    """Emit what `_tile_steps.note_extremes` does, of the upper halves of twice sixteen floats."""
    words, least_of, most_of = simd.vector_type("int32"), [], []
    for one in both:
        size = builder.and_(builder.bitcast(one, words), simd.constant(0x7FFFFFFF, "int32"))
        least_of.append(builder.sub(size, simd.constant(1, "int32")))  # zeros become the largest
        most_of.append(size)
    for name, found, at in (("umin", least_of, 0), ("umax", most_of, BLOCK_BYTES)):
        kind = simd.vector_type("int16")
        upper = [builder.trunc(builder.lshr(one, words([16] * LANES)), kind) for one in found]
        joined = simd.shuffled(builder, upper[0], upper[1], range(_WORDS))
        noted = simd.load_vector(builder, extremes, "int16", at, _WORDS)
        called = simd.called(builder, f"llvm.{name}.v32i16", noted.type, noted, joined)
        simd.store_vector(builder, called, extremes, at)


@functools.cache
def scale_chunk(bits: int, power: int) -> Intrinsic:
    """Return ``f(tiles, extremes)``: multiply a chunk of x by a power of two, and add it up.

    The sums of its columns go behind its tiles. extremes: of the magnitudes before, as bits, 32
    least ones that are not zero, less one, and 32 largest, in which this chunk's are noted. What
    is subnormal, or would be infinite, comes out wrong: they tell.
    """
    count = TILE_ROWS * tiles_of(bits)

    def emit(builder: Any, tiles: Value, extremes: Value) -> None:
        least, most = (simd.load_vector(builder, extremes, "int16", at, 32) for at in (0, 64))
        words, wide = least.type, simd.vector_type("int32")
        lower, upper = simd.constant(16, "int32"), simd.constant(0xFFFF0000, "int32")
        totals = [simd.constant(0.0)] * 4
        for row in range(count):
            given = simd.load_vector(builder, tiles, "int16", BLOCK_BYTES * row, 32)
            size = builder.and_(given, words([0x7FFF] * 32))
            less = builder.sub(size, words([1] * 32))  # zeros become the largest
            least = simd.called(builder, "llvm.umin.v32i16", words, least, less)
            most = simd.called(builder, "llvm.umax.v32i16", words, most, size)
            there = builder.icmp_unsigned("!=", size, words([0] * 32))
            grown = builder.add(given, words([power << 7] * 32))
            grown = builder.select(there, grown, given)
            simd.store_vector(builder, grown, tiles, BLOCK_BYTES * row)
            pair = builder.bitcast(grown, wide)
            for half, one in enumerate((builder.shl(pair, lower), builder.and_(pair, upper))):
                at = row % 2 * 2 + half
                totals[at] = builder.fadd(totals[at], builder.bitcast(one, totals[at].type))
        total = builder.fadd(builder.fadd(*totals[:2]), builder.fadd(*totals[2:]))
        simd.store_vector(builder, total, tiles, BLOCK_BYTES * count)
        simd.store_vector(builder, least, extremes, 0)
        simd.store_vector(builder, most, extremes, BLOCK_BYTES)

    return operation(f"scale_chunk {bits} {power}", emit)
