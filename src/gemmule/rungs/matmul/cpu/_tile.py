"""The micro-kernel and the packing behind it, in vectors as wide as the CPU's.

A tile of C, `rows` x `vectors` * lanes, stays in registers while slivers of A and B, packed so that
both are read in order, pass by. See "Anatomy of High-Performance Matrix Multiplication" (Goto and
van de Geijn, 2008) and BLIS (Van Zee and van de Geijn, 2015).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmule.backends.cpu import ir, target
from gemmule.backends.cpu.intrinsics import (
    element_pointer,
    emit_multiply_add,
    emit_prefetch,
    llvm_type,
    load,
    narrow,
    prefetch,
    store,
    widen,
)
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel, operation
from gemmule.backends.cpu.simd import load_vector, splat, store_vector
from gemmule.core.problem import ITEMSIZE

LINE_BYTES = 64  # of a cache
_ABREAST = 4  # slivers that are packed at once, so that lines of the source are read whole


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of the register tile: `rows` of A times `vectors` registers of `lanes` columns."""

    rows: int
    vectors: int
    lanes: int

    @property
    def columns(self) -> int:
        """Columns of the tile."""
        return self.vectors * self.lanes


def vector_bytes() -> int:
    """Return the width of the vectors in a tile: of the CPU's registers, or two of SSE."""
    return max(32, target.vector_bytes())


@functools.cache
def register_tile(working: str, narrow: bool) -> Tile:
    """Return the tile that fills the vector registers with sums and leaves some for A and B.

    A narrow tile is one register wide, for a matrix B that is no wider.
    """
    lanes = vector_bytes() // ITEMSIZE[working]
    rows = 12 if vector_bytes() == 64 else 6
    return Tile(rows=2 * rows, vectors=1, lanes=lanes) if narrow else Tile(rows, 2, lanes)


def is_narrow(n: int, working: str) -> bool:
    """Whether B has so few columns that the narrow tile holds them."""
    return n <= vector_bytes() // ITEMSIZE[working]


@functools.cache
def tile_product(working: str, tile: Tile, pitch: int, group: int = 0) -> Intrinsic:
    """Return ``f(a, b, depth, c, c_row, first)``: the tile at c (+)= sliver a times sliver b.

    a, b, c: addresses; b holds `depth` groups of `tile.columns` numbers; a holds `depth` groups of
    `group` numbers (as many as the tile's rows, if not given) or, where `pitch` is not 0, its rows
    `pitch` numbers apart. c_row: numbers between rows of c. depth must be at least 1. first: not 0
    where nothing is at c to be added to.
    """

    emit = functools.partial(
        _emit_tile, working=working, tile=tile, pitch=pitch, group=group or tile.rows
    )
    return operation(f"tile {working} {tile} {pitch} {group}", emit)


def _emit_tile(
    builder: Any, *arguments: Any, working: str, tile: Tile, pitch: int, group: int
) -> None:
    """Emit the loop over the depth with every sum in a register, then store or add them to c.

    Lines of c are asked for first: they come from the last-level cache while the loop runs.
    """
    a, b, depth, c, c_row, first = arguments
    word = ir.IntType(64)
    for r in range(tile.rows):
        for column in range(0, tile.columns, LINE_BYTES // ITEMSIZE[working]):
            at = builder.add(builder.mul(c_row, word(r)), word(column))
            emit_prefetch(builder, builder.ptrtoint(element_pointer(builder, c, at, working), word))
    vector = ir.VectorType(llvm_type(working), tile.lanes)
    sums = tile.rows * tile.vectors
    before = builder.block
    loop = builder.append_basic_block("depth")
    after = builder.append_basic_block("tile")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(word)
    k.add_incoming(word(0), before)
    totals = [builder.phi(vector) for _ in range(sums)]
    for total in totals:
        total.add_incoming(ir.Constant(vector, [0] * tile.lanes), before)
    a_at = k if pitch else builder.mul(k, word(group))
    b_at = builder.mul(k, word(tile.columns))
    right = [
        _load_vector(builder, b, builder.add(b_at, word(v * tile.lanes)), working, vector)
        for v in range(tile.vectors)
    ]
    grown = []
    for r in range(tile.rows):
        pointer = element_pointer(builder, a, builder.add(a_at, word(r * (pitch or 1))), working)
        left = splat(builder, builder.load(pointer), tile.lanes)
        for v in range(tile.vectors):
            total = totals[r * tile.vectors + v]
            grown.append(emit_multiply_add(builder, total, left, right[v]))
    following = builder.add(k, word(1))
    k.add_incoming(following, loop)
    for total, new in zip(totals, grown, strict=True):
        total.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
    builder.position_at_end(after)
    with builder.if_else(builder.icmp_signed("!=", first, word(0))) as (alone, further):
        with alone:
            _put(builder, grown, c, c_row, working, tile, added=False)
        with further:
            _put(builder, grown, c, c_row, working, tile, added=True)


def _put(
    builder: Any, sums: list[Any], c: Any, c_row: Any, working: str, tile: Tile, *, added: bool
) -> None:
    """Store the sums, or add them to what is there."""
    word = ir.IntType(64)
    add = builder.add if working.startswith("int") else builder.fadd
    for number, total in enumerate(sums):
        r, v = divmod(number, tile.vectors)
        at = builder.add(builder.mul(c_row, word(r)), word(v * tile.lanes))
        pointer = element_pointer(builder, c, at, working)
        pointer = builder.bitcast(pointer, total.type.as_pointer())
        if added:
            total = add(builder.load(pointer, align=1, typ=total.type), total)
        builder.store(total, pointer, align=1)


def _load_vector(builder: Any, address: Any, index: Any, working: str, vector: Any) -> Any:
    pointer = element_pointer(builder, address, index, working)
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1, typ=vector)


@functools.cache
def _group_placed(given: str, wanted: str, width: int) -> Intrinsic:
    """Return ``f(source, target)``: `width` numbers in a row, in vector registers.

    They become wider, or narrower as `intrinsics.store` has it.
    """
    narrower = ITEMSIZE[wanted] < ITEMSIZE[given]
    lanes = vector_bytes() // max(ITEMSIZE[given], ITEMSIZE[wanted])

    def emit(builder: Any, source: Any, target: Any) -> None:
        for first in range(0, width, lanes):
            count = min(lanes, width - first)
            numbers = load_vector(builder, source, given, ITEMSIZE[given] * first, count)
            if narrower:
                made = narrow(builder, numbers, wanted, given)
            else:
                made = widen(builder, numbers, given, wanted)
            store_vector(builder, made, target, ITEMSIZE[wanted] * first)

    return operation(f"group {given} {wanted} {width}", emit)


@functools.cache
def pack_kernel(stored: str, working: str, width: int, unit: str) -> Kernel:
    """Return ``pack(source, width_step, depth_step, extent, depth, packed)``.

    The source has `extent` lines (rows of A, columns of B) of `depth` elements; steps are in bytes.
    Slivers of `width` lines follow each other in `packed`, each holding `depth` groups of `width`
    numbers of the working dtype; missing lines are zeros. `unit` names the axis of unit stride:
    ``"width"``, ``"depth"`` or ``"none"``.
    """
    read, write = load(stored, working), store(working, working)
    zero = np.dtype(working).type(0)
    item, number = ITEMSIZE[stored], ITEMSIZE[working]
    along_width, put_group = unit == "width", _group_placed(stored, working, width)
    along_depth = unit == "depth"

    @kernel
    def pack(
        source: int, width_step: int, depth_step: int, extent: int, depth: int, packed: int
    ) -> None:
        whole = extent // width if along_width else 0  # full slivers, several of them in one go
        for begin in range(0, whole, _ABREAST):
            some = min(_ABREAST, whole - begin)
            for k in range(depth):
                row = source + k * depth_step + begin * width * item
                for s in range(some):
                    target = packed + ((begin + s) * depth + k) * width * number
                    put_group(row + s * width * item, target)
        for begin in range(whole * width, extent, width):
            lines = min(width, extent - begin)
            sliver = packed + begin * depth * number
            first = source + begin * width_step
            if along_width:
                for k in range(depth):
                    for w in range(lines):
                        write(sliver + k * width * number, w, read(first + k * depth_step, w))
            else:  # a few steps of the depth at a time, so that the groups stay in the cache
                step = depth_step if unit == "none" else item
                for begin_k in range(0, depth, 32):
                    some = min(32, depth - begin_k)
                    groups = sliver + begin_k * width * number
                    below = width * width_step - begin_k * step
                    ahead = 32 * step if begin_k + 32 < depth else below
                    for w in range(lines):
                        at = first + begin_k * step + w * width_step
                        if along_depth:  # few bytes of each of many pages: no hardware foresees it
                            for byte in range(0, 32 * item, LINE_BYTES):
                                prefetch(at + ahead + byte)
                        for k in range(some):
                            write(groups + w * number, k * width, read(at + k * step, 0))
            for w in range(lines, width):
                for k in range(depth):
                    write(sliver, k * width + w, zero)

    return pack


@functools.cache
def pack_rows_kernel(stored: str, working: str, width: int, pitch: int) -> Kernel:
    """Return the packing of rows that lie along memory: as `pack_kernel`, but rows stay whole.

    Row after row is converted, `pitch` numbers apart, so both sides are read and written in order.
    """
    read, write = load(stored, working), store(working, working)
    zero = np.dtype(working).type(0)
    number = ITEMSIZE[working]

    @kernel
    def pack_rows(
        source: int, width_step: int, depth_step: int, extent: int, depth: int, packed: int
    ) -> None:
        for line in range(extent):
            target, row = packed + line * pitch * number, source + line * width_step
            for k in range(depth):
                write(target, k, read(row, k))
        for line in range(extent, (extent + width - 1) // width * width):
            for k in range(depth):
                write(packed + line * pitch * number, k, zero)

    return pack_rows


@functools.cache
def unpack_kernel(stored: str, working: str) -> Kernel:
    """Return ``unpack(sums, sums_row, C, C_row, height, breadth)``: store sums as dtype `stored`.

    sums_row: numbers between rows of the sums; C_row: bytes between rows of C.
    """
    read, write = load(working, working), store(stored, working)
    number, item, width = ITEMSIZE[working], ITEMSIZE[stored], LINE_BYTES // ITEMSIZE[working]
    put_group = _group_placed(working, stored, width)

    @kernel
    def unpack(sums: int, sums_row: int, C: int, C_row: int, height: int, breadth: int) -> None:
        whole = breadth // width * width
        for i in range(height):
            row, target = sums + i * sums_row * number, C + i * C_row
            for j in range(0, whole, width):
                put_group(row + j * number, target + j * item)
            for j in range(whole, breadth):
                write(target, j, read(row, j))

    return unpack


def unit_axis(layout: str, width_axis: int) -> str:
    """Return which packing axis of an operand of a layout has unit stride.

    width_axis: 0 for A, whose rows are the lines; 1 for B, whose columns are.
    """
    if layout == "strided":
        return "none"
    return "depth" if (layout == "row") == (width_axis == 0) else "width"
