"""Kernels of the product in tile registers: packing into tiles, and blocks of C from them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from gemmule.backends.cpu.amx import TILE_BYTES, TILE_ROWS, configured, released
from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.atomics import write as set_word
from gemmule.backends.cpu.intrinsics import call_c, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import Pooled, in_pool
from gemmule.rungs._cpu_workspace import claimed, release
from gemmule.rungs.matmul.cpu import _tile_steps as steps
from gemmule.rungs.matmul.cpu._tile_steps import (
    EXTREMES_BYTES,
    SHAPES,
    STEP_TERMS,
    SUMS_BYTES,
    SUMS_PITCH,
    least_and_most,
)

_put, _get = store("int64", "int64"), load("int64", "int64")
GROUP = 2 * TILE_ROWS  # rows, or columns, of the sums that the registers hold


@functools.cache
def place_kernel(paired: bool, unit: str) -> Kernel:
    """Return ``place(source, line_step, term_step, lines, terms, tile)``: 16-bit numbers to a tile.

    A tile of A holds 32 terms of a row behind each other; one of B (`paired`) two terms of each of
    sixteen columns, then the next two. unit: which axis has unit stride in memory, ``"depth"`` (the
    terms), ``"width"`` (the lines) or ``"none"``.
    """
    read, write = load("uint16", "int32"), store("uint16", "int32")
    read_pair, write_pair = load("int32", "int32"), store("int32", "int32")
    down_lines, along_lines, strided = unit == "depth", unit == "width", unit == "none"
    place_whole = steps.place_tile(paired, along_lines)

    @kernel
    def place(
        source: int, line_step: int, term_step: int, lines: int, terms: int, tile: int
    ) -> None:
        step = 2 if along_lines else line_step  # known when the kernel is compiled
        if lines == TILE_ROWS and terms == STEP_TERMS and not strided:
            place_whole(source, term_step if along_lines else line_step, tile)
        elif paired and down_lines:
            for line in range(lines):
                row = source + line * line_step
                for pair in range(terms // 2):
                    write_pair(tile + 64 * pair, line, read_pair(row, pair))
                if terms % 2:
                    write(tile + 32 * (terms - 1), 2 * line, read(row, terms - 1))
        elif paired:
            for term in range(terms):
                row, target = source + term * term_step, tile + 64 * (term // 2) + 2 * (term % 2)
                for line in range(lines):
                    write(target, 2 * line, read(row + line * step, 0))
        elif down_lines:
            for line in range(lines):
                for term in range(terms):
                    write(tile + 64 * line, term, read(source + line * line_step, term))
        else:
            for term in range(terms):
                row = source + term * term_step
                for line in range(lines):
                    write(tile + 64 * line, term, read(row + line * step, 0))

    return place


@functools.cache
def places_kernel(paired: bool, unit: str) -> Kernel:
    """Return `place_kernel` of up to 32 lines, in two tiles: its last arguments are both."""
    place, both, along_lines = place_kernel(paired, unit), steps.place_two(paired), unit == "width"

    @kernel
    def places(
        source: int, line_step: int, term_step: int, lines: int, terms: int, tile: int, other: int
    ) -> None:
        if along_lines and lines == GROUP and terms == STEP_TERMS:
            both(source, term_step, tile, other)
        else:
            place(source, line_step, term_step, min(lines, TILE_ROWS), terms, tile)
            below, rest = source + TILE_ROWS * line_step, max(0, lines - TILE_ROWS)
            place(below, line_step, term_step, rest, terms, other)

    return places


@functools.cache
def _pack_step(pieces: int) -> Kernel:
    """Return what packs 32 terms of 32 lines; arguments as of `_pack_kernel`, and which terms."""
    note, split = steps.note_extremes(), steps.split_halves()

    @kernel
    def pack_step(
        number: int,
        places: int,
        source: int,
        line_step: int,
        term_step: int,
        lines: int,
        packed: int,
        extremes: int,
        terms: int,
        step: int,
    ) -> None:
        panel = (terms + STEP_TERMS - 1) // STEP_TERMS * pieces * TILE_BYTES
        here, noted = min(GROUP, lines - GROUP * number), extremes + EXTREMES_BYTES * number
        if step == 0:
            for i in range(8):
                _put(noted, i, -1)
                _put(noted, 8 + i, 0)
        tile = packed + 2 * number * panel + step * pieces * TILE_BYTES
        some = min(STEP_TERMS, terms - STEP_TERMS * step)
        if here < GROUP or some < STEP_TERMS:
            for i in range(TILE_BYTES // 8):
                _put(tile, i, 0)
                _put(tile + panel, i, 0)
        begin = source + GROUP * number * line_step + STEP_TERMS * step * term_step
        call_c(places, (begin, line_step, term_step, here, some, tile, tile + panel))
        for half in range(2):
            note(tile + half * panel, noted)
            if pieces == 2:
                split(tile + half * panel)

    return pack_step


@functools.cache
def _pack_kernel(pieces: int) -> Kernel:
    """Return what packs 32 lines of an operand: two panels, and what `note_extremes` notes.

    places: the address of a `places_kernel`; steps in bytes; packed, extremes: where the tiles and
    the extremes of all lines go.
    """
    one = _pack_step(pieces)

    @kernel
    def pack(
        number: int,
        places: int,
        source: int,
        line_step: int,
        term_step: int,
        lines: int,
        packed: int,
        extremes: int,
        terms: int,
    ) -> None:
        lie = source, line_step, term_step, lines
        for step in range((terms + STEP_TERMS - 1) // STEP_TERMS):
            one(number, places, *lie, packed, extremes, terms, step)

    return pack


@functools.cache
def pack_shares(pieces: int) -> Pooled:
    """Return the packing of an operand, a share for each 32 lines; words as `_pack_kernel` says."""
    return in_pool(_pack_kernel(pieces), 8)


@kernel
def store_group(
    sums: int, C: int, C_row: int, C_item: int, m: int, n: int, row: int, column: int, unpack: int
) -> None:
    """Store 32 rows of 32 sums where they belong in C, as far as there are rows and columns."""
    target = C + row * C_row + column * C_item
    call_c(unpack, (sums, SUMS_PITCH, target, C_row, min(GROUP, m - row), min(GROUP, n - column)))


# The exponent fields of the least elements of A and B that are not zero sum to this at least where
# no sum can be subnormal: the last bit of a product is 2^14 below its first.
LEAST_EXPONENTS = 2 * 127 - 126 + 14
_INFINITY = 0x7C00  # of float16


_MOST_EXPONENTS = 2 * 15 + 8  # of float16 elements' largest: 32 products sum to less than 2^15


@kernel
def carried(pieces: int, least_a: int, most_a: int, least_b: int, most_b: int) -> bool:
    """Whether tiles compute what IEEE arithmetic does, up to roundings, of operands' extremes.

    pieces: 0 where float16 is summed as it is.
    """
    if pieces == 0:
        return (most_a >> 10) + (most_b >> 10) <= _MOST_EXPONENTS
    if pieces == 2:
        return max(most_a, most_b) < _INFINITY
    first, second = (least_a + 1) >> 7, (least_b + 1) >> 7
    return min(first, second) > 0 and first + second >= LEAST_EXPONENTS


class Tiled(NamedTuple):
    """A product in blocks of C, each of which packs what it reads of A and B, pass by pass.

    What other threads have packed a core fetches line by line out of their caches: that took more
    time than to pack it again. Of `together` blocks below each other, which are one thread's, the
    first packs B for all. refused: where shares say that not all is `carried`; places_a,
    places_b: addresses of each `places_kernel`, or 0 where the operand comes packed, and then its
    least and its most; steps in bytes; rows, columns: of a block, in groups of 32; depth: tiles of
    32 terms of a pass; unpack: the address of an `unpack_kernel`; workspace: has parts of
    `block_bytes`.
    """

    A: int
    B: int
    C: int
    refused: int
    places_a: int
    A_line: int
    A_term: int
    least_a: int
    most_a: int
    places_b: int
    B_line: int
    B_term: int
    least_b: int
    most_b: int
    C_row: int
    C_item: int
    m: int
    n: int
    k: int
    rows: int
    columns: int
    depth: int
    together: int
    unpack: int
    workspace: int


def block_bytes(w: Tiled, pieces: int) -> int:
    """Return what a block works in: sums that wait for another pass and four more; tiles."""
    count = -(-w.k // STEP_TERMS)
    some, passes = min(count, w.depth), -(-count // w.depth)
    sums = (w.rows * w.columns if count > w.depth else 1) + 1
    tiles = 2 * pieces * TILE_BYTES * (some + w.columns * (count if w.together > 1 else some))
    return sums * SUMS_BYTES + tiles + EXTREMES_BYTES * w.columns + 16 * passes


@functools.cache
def block_shares(pieces: int, by: str) -> Pooled:
    """Return the product of a `Tiled`, a share for blocks `together`; see `block_kernel`."""
    block, words = block_kernel(pieces, by), unpacked_as(Tiled)

    @kernel
    def share(at: int, number: int) -> None:
        w = words(at)
        part, undone = claimed(w.workspace), 0
        down, across = w.rows * GROUP, w.columns * GROUP
        turns = (w.n + across - 1) // across
        first = number // turns * w.together
        for turn in range(min(w.together, (w.m + down - 1) // down - first)):
            if undone == 0:
                undone = block(w, w.A, w.B, w.C, first + turn, number % turns, turn, part)
        if undone != 0:
            set_word(w.refused, 1)
        release(w.workspace, part)

    return Pooled(share)


@functools.cache
def small_kernel(pieces: int, by: str) -> Kernel:
    """Return ``f(words, A, B, C)``: a `Tiled` of one block; not 0: operands are not `carried`."""
    block, words = block_kernel(pieces, by), unpacked_as(Tiled)

    @kernel
    def small(at: int, A: int, B: int, C: int) -> Any:
        w = words(at)
        part = claimed(w.workspace)
        undone = block(w, A, B, C, 0, 0, 0, part)
        release(w.workspace, part)
        return undone

    return small


@functools.cache
def _panels_kernel(pieces: int) -> Kernel:
    """Return ``f(groups, places, ...)``: `_pack_kernel` of so many groups, and their extremes.

    Memory is read along its rows: of lines that lie side by side all groups take the same terms,
    before they take the next.
    """
    one, extremes = _pack_step(pieces), least_and_most

    @kernel
    def panels(
        groups: int,
        places: int,
        source: int,
        line_step: int,
        term_step: int,
        lines: int,
        packed: int,
        noted: int,
        terms: int,
    ) -> Any:
        count, lie = (terms + STEP_TERMS - 1) // STEP_TERMS, (source, line_step, term_step, lines)
        outer, inner = (count, groups) if line_step < term_step else (groups, count)
        for i in range(outer):
            for j in range(inner):
                group, step = (j, i) if line_step < term_step else (i, j)
                one(group, places, *lie, packed, noted, terms, step)
        least, most = 1 << 16, 0
        for group in range(groups):
            low, high = extremes(noted + group * EXTREMES_BYTES)
            least, most = min(least, low), max(most, high)
        return least, most

    return panels


@functools.cache
def sums_kernel(pieces: int, by: str) -> Kernel:
    """Return ``f(registers, place, a, b, panel_a, panel_b, some, begin)``: add to 32 x 32 sums."""
    start, resume, keep = steps.start_sums(), steps.resume_rows(), steps.keep_rows()
    add = steps.add_products((pieces, pieces), "b" if pieces == 1 else "")
    step_bytes, by_tiles = pieces * TILE_BYTES, by == "tiles"
    dots = steps.add_dots("bfloat16" if by_tiles else by)

    @kernel
    def sums(
        registers: int,
        place: int,
        a: int,
        b: int,
        panel_a: int,
        panel_b: int,
        some: int,
        begin: int,
    ) -> None:
        if not by_tiles:
            for part in range(4):
                one, other = a + part // 2 * panel_a, b + part % 2 * panel_b
                at = place + 4 * TILE_ROWS * (part // 2 * SUMS_PITCH + part % 2)
                dots(at, one, other, some, begin)
        else:
            if begin == 0:
                start(registers)
            else:
                resume(registers, place)
            for step in range(some):
                one, other = a + step * step_bytes, b + step * step_bytes
                add(registers, one, other, panel_a // pieces, panel_b // pieces)
            keep(registers, place)

    return sums


@functools.cache
def block_kernel(pieces: int, by: str) -> Kernel:
    """Return ``f(product, A, B, C, down, column, turn, part)``: a block.

    part: of the workspace. Rows of A are packed 32 at a time into memory that stays in the first
    cache, where they meet all columns of B. down, column: of the block among blocks. turn: not 0
    where the block above it has packed B in this part. by: see `tile_products.bind`. Not 0:
    operands are not `carried`.
    """
    shapes, forget, pack = configured(*SHAPES), released(), _panels_kernel(pieces)
    step_bytes, by_tiles, add = pieces * TILE_BYTES, by == "tiles", sums_kernel(pieces, by)
    rule = 0 if by == "float16" else pieces

    @kernel
    def block(
        w: Tiled, A: int, B: int, C: int, down: int, column: int, turn: int, registers: int
    ) -> int:
        count = (w.k + STEP_TERMS - 1) // STEP_TERMS
        top, left = down * w.rows, column * w.columns
        height = min(w.rows, (w.m + GROUP - 1) // GROUP - top)
        width = min(w.columns, (w.n + GROUP - 1) // GROUP - left)
        several, sums = count > w.depth, registers + SUMS_BYTES
        room_a = sums + (w.rows * w.columns if several else 1) * SUMS_BYTES
        room_b = room_a + 2 * min(count, w.depth) * step_bytes
        held = count if w.together > 1 else min(count, w.depth)
        noted = room_b + 2 * w.columns * held * step_bytes
        known = noted + EXTREMES_BYTES * w.columns
        least_a, most_a, least_b, most_b = w.least_a, w.most_a, w.least_b, w.most_b
        undone = 0
        for begin in range(0, count, w.depth):
            some, low = min(w.depth, count - begin), begin * STEP_TERMS
            terms = min(some * STEP_TERMS, w.k - low)
            b, panel_b = room_b, some * step_bytes
            if w.places_b != 0:
                at = known + 16 * (begin // w.depth)
                b += 2 * w.columns * begin * step_bytes if w.together > 1 else 0
                if turn == 0:
                    source, lines = B + GROUP * left * w.B_line + low * w.B_term, w.n - GROUP * left
                    way = w.places_b, source, w.B_line, w.B_term, lines, b, noted, terms
                    least_b, most_b = pack(width, *way)
                    _put(at, 0, least_b)
                    _put(at, 1, most_b)
                least_b, most_b = _get(at, 0), _get(at, 1)
            else:
                panel_b = count * step_bytes
                b = B + 2 * left * panel_b + begin * step_bytes
            if by_tiles:
                shapes()
            for i in range(height):
                row, panel_a = GROUP * (top + i), count * step_bytes
                a = A + row // TILE_ROWS * panel_a + begin * step_bytes
                if w.places_a != 0:
                    a, panel_a, source = room_a, some * step_bytes, A + row * w.A_line
                    lie = source + low * w.A_term, w.A_line, w.A_term, w.m - row
                    least_a, most_a = pack(1, w.places_a, *lie, a, noted, terms)
                if not carried(rule, least_a, most_a, least_b, most_b):
                    undone = 1
                for j in range(width if undone == 0 else 0):
                    place = sums + ((i * width + j) * SUMS_BYTES if several else 0)
                    add(registers, place, a, b + 2 * j * panel_b, panel_a, panel_b, some, begin)
                    if begin + w.depth >= count:
                        target = C, w.C_row, w.C_item, w.m, w.n
                        store_group(place, *target, row, GROUP * (left + j), w.unpack)
            if by_tiles:
                forget()
        return undone

    return block
