"""Register tiles of few columns: halves are read once, as stored, and meet every column of a group.

*Along* a row a tile holds sums of `rows` x `columns`, each spread over the lanes of one register.
*Across* the rows it holds `vectors` registers of neighbouring results for each column.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gemmule.backends.cpu import intrinsics, ir, simd
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.rungs._cpu_vectors import SECOND_CACHE
from gemmule.rungs.matmul.cpu._tile import vector_bytes

STEP = 32  # terms of a row that a tile takes at a time: a line of halves
LINE_BYTES = 64


def lanes() -> int:
    """Return the numbers of a register."""
    return vector_bytes() // 4


# Rows of a tile along them, and registers of one across, by its columns: so many that the sums and
# what is loaded fill the registers, of which AVX2 has half as many.
_WIDE = {8: (3, 2), 6: (4, 4), 4: (4, 4), 2: (4, 4)}
_NARROW = {6: (2, 2), 4: (3, 2), 2: (4, 4)}


def _sizes() -> dict[int, tuple[int, int]]:
    return _WIDE if vector_bytes() == 64 else _NARROW


def tile_columns(few: int) -> int:
    """Return how many columns a tile meets: few groups of them, with few empty places.

    To widen weights once more, for another group, takes about as long as another column.
    """
    return min(_sizes(), key=lambda width: -(-few // width) * (width + 1))


def tile_rows(columns: int) -> int:
    """Return how many rows share what is loaded of the columns."""
    return _sizes()[columns][0]


def tile_vectors(columns: int) -> int:
    """Return how many registers of results a tile across holds for each column."""
    return _sizes()[columns][1]


def _widened(builder: Any, halves: simd.Value, a: str) -> list[simd.Value]:
    """Emit a vector of twice as many halves as a register has numbers, as two registers.

    The upper half of a pair's word is a bfloat16 widened as it stands, the lower one a shift away:
    so even elements come before odd ones.
    """
    count = lanes()
    if a == "bfloat16":
        words, floats = simd.vector_type("int32", count), simd.vector_type("float32", count)
        pairs = builder.bitcast(halves, words)
        lower = builder.shl(pairs, words([16] * count))
        upper = builder.and_(pairs, words([0xFFFF0000] * count))
        return [builder.bitcast(lower, floats), builder.bitcast(upper, floats)]
    parts = []
    for first in (0, count):
        part = simd.shuffled(builder, halves, halves, range(first, first + count))
        parts.append(intrinsics.widen(builder, part, a, "float32"))
    return parts


class _Loop:
    """A loop in LLVM code, of at least no turn, that carries vectors in registers."""

    def __init__(self, builder: Any, count: simd.Value, start: list[simd.Value], name: str) -> None:
        self.builder, self.count = builder, count
        before = builder.block
        self.head = builder.append_basic_block(f"{name} head")
        body, self.after = (builder.append_basic_block(f"{name} {w}") for w in ("body", "after"))
        builder.branch(self.head)
        builder.position_at_end(self.head)
        self.index = builder.phi(ir.IntType(64))
        self.index.add_incoming(ir.IntType(64)(0), before)
        self.carried = [builder.phi(one.type) for one in start]
        for phi, one in zip(self.carried, start, strict=True):
            phi.add_incoming(one, before)
        builder.cbranch(builder.icmp_signed("<", self.index, count), body, self.after)
        builder.position_at_end(body)

    def close(self, grown: list[simd.Value]) -> list[simd.Value]:
        """End the body with what the next turn begins with; return what the last one left."""
        builder = self.builder
        following = builder.add(self.index, self.index.type(1))
        self.index.add_incoming(following, builder.block)
        for phi, one in zip(self.carried, grown, strict=True):
            phi.add_incoming(one, builder.block)
        builder.branch(self.head)
        builder.position_at_end(self.after)
        return self.carried


@functools.cache
def tile_along(a: str, rows: int, columns: int) -> Intrinsic:
    """Return ``f(A, apart, x, steps, tail, ahead, turn, jump, sums)``: write the tile's sums.

    A: address of the first row of dtype `a`; apart: bytes to the next of the tile. x: address of
    the columns, step by step, `columns` times STEP float32 numbers each, ordered as `_widened`.
    steps: whole ones; tail: terms of the last, cut one, or 0. Lines are asked for `ahead` bytes
    ahead, from step `turn` on `jump`. sums: rows * columns float32 numbers, row by row, and room
    up to whole registers.
    """

    def products(
        builder: Any,
        halves: Callable[[int, int], simd.Value],
        x_at: simd.Value,
        totals: list[simd.Value],
    ) -> list[simd.Value]:
        grown, width = list(totals), 4 * lanes()
        for part in range(STEP // (2 * lanes())):
            wide = [_widened(builder, halves(r, part), a) for r in range(rows)]
            for side in range(2):
                for j in range(columns):
                    place = 4 * STEP * j + width * (2 * part + side)
                    factor = simd.load_vector(builder, x_at, "float32", place, lanes())
                    for r in range(rows):
                        k = r * columns + j
                        grown[k] = intrinsics.emit_multiply_add(
                            builder, grown[k], wide[r][side], factor
                        )
        return grown

    def emit(builder: Any, *arguments: simd.Value) -> None:
        A, apart, x, steps, tail, ahead, turn, jump, sums = arguments
        some = 4 * lanes()
        places = simd.row_addresses(builder, A, apart, rows)
        nothing = simd.constant(0.0, lanes=lanes())

        def at_step(step: simd.Value) -> tuple[list[simd.Value], simd.Value]:
            on = builder.mul(step, step.type(LINE_BYTES))
            factors = builder.mul(step, step.type(4 * STEP * columns))
            return [builder.add(place, on) for place in places], builder.add(x, factors)

        loop = _Loop(builder, steps, [nothing] * (rows * columns), "step")
        here, x_at = at_step(loop.index)
        late = builder.icmp_signed(">=", loop.index, turn)
        asked = builder.select(late, jump, ahead)
        for place in here:
            intrinsics.emit_prefetch(builder, builder.add(place, asked), SECOND_CACHE)

        def whole(r: int, part: int) -> simd.Value:
            return simd.load_vector(builder, here[r], a, some * part, 2 * lanes())

        totals = loop.close(products(builder, whole, x_at, loop.carried))

        is_cut = builder.icmp_signed(">", tail, tail.type(0))
        loop = _Loop(builder, builder.zext(is_cut, tail.type), totals, "tail")
        ends, x_at = at_step(steps)

        def cut(r: int, part: int) -> simd.Value:
            left = builder.sub(tail, tail.type(2 * lanes() * part))
            none = builder.icmp_signed("<", left, tail.type(0))
            left = builder.select(none, tail.type(0), left)
            at = builder.add(ends[r], tail.type(some * part))
            return simd.masked_load(builder, at, intrinsics.llvm_type(a), 2 * lanes(), left)

        totals = loop.close(products(builder, cut, x_at, loop.carried))
        for number, vector in enumerate(_lane_sums(builder, totals)):
            simd.store_vector(builder, vector, sums, some * number)

    return operation(f"tile along {a} {rows} {columns} {lanes()}", emit)


def _lane_sums(builder: Any, totals: list[simd.Value]) -> list[simd.Value]:
    """Emit the sum of each register's lanes, as many to a register as it has lanes."""
    width = lanes()
    found = []
    for first in range(0, len(totals), width):
        group = totals[first : first + width]
        segment = width
        while len(group) > 1:
            group += group[-1:] * (len(group) % 2)
            pairs = zip(group[::2], group[1::2], strict=True)
            group = [_folded(builder, a, b, segment) for a, b in pairs]
            segment //= 2
        while segment > 1:  # fewer sums than lanes: those behind them are repeated
            group = [_folded(builder, group[0], group[0], segment)]
            segment //= 2
        found.append(group[0])
    return found


def _folded(builder: Any, left: simd.Value, right: simd.Value, segment: int) -> simd.Value:
    """Emit the segments of two registers, each folded to half its length, left ones first."""
    width, half = lanes(), segment // 2
    begins = [*range(0, width, segment), *range(width, 2 * width, segment)]
    sides = []
    for begin in (0, half):
        order = [b + begin + i for b in begins for i in range(half)]
        sides.append(simd.shuffled(builder, left, right, order))
    return builder.fadd(*sides)


@functools.cache
def tile_across(a: str, vectors: int, columns: int) -> Intrinsic:
    """Return ``f(A, step, x, count, ahead, sums)``: sums += `count` lines of A times x.

    A: address of ``vectors * lanes()`` neighbours of dtype `a`; step: bytes to the next line, which
    is asked for `ahead` bytes ahead. x: address of `columns` float32 numbers a line. sums: address
    of `vectors` registers for each column, ordered as `_widened`.
    """

    def emit(builder: Any, *arguments: simd.Value) -> None:
        A, step, x, count, ahead, sums = arguments
        width, all_sums = 4 * lanes(), range(vectors * columns)
        before = [simd.load_vector(builder, sums, "float32", width * i, lanes()) for i in all_sums]
        loop = _Loop(builder, count, before, "line")
        at = builder.add(A, builder.mul(loop.index, step))
        for line in range(0, 2 * lanes() * vectors, LINE_BYTES):
            asked = builder.add(builder.add(at, ahead), at.type(line))
            intrinsics.emit_prefetch(builder, asked, SECOND_CACHE)
        wide = []
        for pair in range(vectors // 2):
            loaded = simd.load_vector(builder, at, a, width * pair, 2 * lanes())
            wide += _widened(builder, loaded, a)
        grown = list(loop.carried)
        for j in range(columns):
            index = builder.add(builder.mul(loop.index, at.type(columns)), at.type(j))
            number = builder.load(intrinsics.element_pointer(builder, x, index, "float32"), align=4)
            factor = simd.splat(builder, number, lanes())
            for v in range(vectors):
                k = j * vectors + v
                grown[k] = intrinsics.emit_multiply_add(builder, grown[k], wide[v], factor)
        for i, total in enumerate(loop.close(grown)):
            simd.store_vector(builder, total, sums, width * i)

    return operation(f"tile across {a} {vectors} {columns} {lanes()}", emit)
