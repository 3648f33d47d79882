"""Products of one vector across the stored rows: results in parts, added up and put in order.

A micro-kernel across the rows (`_product`) adds rows to sums by blocks of columns. Either each
share is a part of the rows, with sums of its own that others then add up, or, where every thread's
part of the matrix stays in a cache of its own, a share is a part of the blocks, over all rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import packed, unpacked, unpacked_as, write
from gemmule.backends.cpu.intrinsics import enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import own_cache_bytes, shares_of
from gemmule.backends.cpu.shares import run_shares
from gemmule.core.problem import ITEMSIZE
from gemmule.rungs.quantized.cpu import _product
from gemmule.rungs.quantized.cpu._operands import Stored
from gemmule.rungs.quantized.cpu._product import OneVector, Product, load_product

_SIZE, _X_AT, _Y_AT = _product.SIZE, _product.X_AT, _product.Y_AT
_put = store("float32", "float32")

# A part's rows at least: its results, 4 bytes a column, are written, read and added.
PART_ROWS = 48
PARTS_PER_THREAD = 2
# Results begin at a pair of a cache's lines, as processors fetch them: threads that write to
# neighbouring blocks would take each other's lines else.
RESULTS_ALIGNMENT = 128
# Bytes of results that one share joins, and of all parts that the caller joins alone.
JOIN_BYTES, JOIN_ALONE = 16384, 1 << 18

# Words of a call, in a row: the pool, helpers, what computes a share, what joins (0: shares
# are of blocks), bytes of room for x and what aligns the results; a `Product`; a `Split`.
_HEAD = 5


class Split(NamedTuple):
    """What shares know beside their product: y, in how many parts, and of how many, by what."""

    y: int
    parts: int
    units: int
    blocks: int
    panels: int


_load_split, _AT = unpacked_as(Split), 8 * _SIZE


@kernel
def _add_rows(at: int, part: int) -> None:
    """Compute a part of the rows' results, to be joined."""
    product, split = load_product(at), _load_split(at + _AT)
    sums = product.y + part * split.blocks * product.x_step
    for i in range(split.blocks * product.x_step // 4):
        _put(sums, i, np.float32(0))
    low, high = split.units * part // split.parts, split.units * (part + 1) // split.parts
    enter(split.panels, (product, low, high, sums, 0, split.blocks))


@functools.cache
def _join_kernels(in_order: Kernel, item: str) -> tuple[Kernel, Kernel]:
    """Return ``join(words, number)`` of some blocks, and ``add_columns(words, part)`` of all rows.

    in_order: ``f(sums, count, step, y)`` writes a block's results to y.
    """
    get, put, size = load(item, item), store(item, item), ITEMSIZE[item]

    @kernel
    def join_blocks(at: int, parts: int, first: int, end: int) -> None:
        product, split = load_product(at), _load_split(at + _AT)
        columns, part_bytes = product.x_step // size, split.blocks * product.x_step
        for block in range(first, end):
            sums = product.y + block * product.x_step
            for part in range(1, parts):
                for i in range(columns):
                    put(sums, i, get(sums, i) + get(sums + part * part_bytes, i))
            low = block * columns
            in_order(sums, min(columns, product.n - low), product.x_step, split.y + size * low)

    @kernel
    def join(at: int, number: int) -> None:
        some, split = max(1, JOIN_BYTES // load_product(at).x_step), _load_split(at + _AT)
        end = min((number + 1) * some, split.blocks)
        join_blocks(at, split.parts, number * some, end)

    @kernel
    def add_columns(at: int, part: int) -> None:
        product, split = load_product(at), _load_split(at + _AT)
        first = split.blocks * part // split.parts
        end = split.blocks * (part + 1) // split.parts
        for i in range(first * product.x_step // 4, end * product.x_step // 4):
            _put(product.y, i, np.float32(0))
        enter(split.panels, (product, 0, split.units, product.y, first, end))
        join_blocks(at, 1, first, end)

    return join, add_columns


@functools.cache
def _product_kernels(prepare: Kernel) -> tuple[Kernel, Kernel]:
    """Return ``product(words, x, y, room)`` and, as a `Job` has it, ``job(words, A, x, y)``.

    prepare: ``f(x, m, room)`` returns the address of x as the micro-kernel reads it.
    """
    load_head, load_words = unpacked(_HEAD), unpacked(_SIZE + len(Split._fields))

    @kernel
    def product(at: int, x: int, y: int, room: int) -> None:
        pool, helpers, share, join, x_bytes = load_head(at)
        words = packed(load_words(at + 8 * _HEAD))
        given, split = load_product(words), _load_split(words + _AT)
        results = room + x_bytes - RESULTS_ALIGNMENT
        write(words + _X_AT, prepare(x, given.m, room))
        write(words + _Y_AT, -(-results // RESULTS_ALIGNMENT) * RESULTS_ALIGNMENT)
        write(words + _AT, y)
        run_shares(pool, helpers, share, words, split.parts)
        if join == 0:
            return
        some = max(1, JOIN_BYTES // given.x_step)
        helpers = helpers if split.parts * split.blocks * given.x_step > JOIN_ALONE else 0
        run_shares(pool, helpers, join, words, (split.blocks + some - 1) // some)

    @kernel
    def job(at: int, A: int, x: int, y: int) -> int:
        _, _, _, join, x_bytes = load_head(at)
        step, split = load_product(at + 8 * _HEAD).x_step, _load_split(at + 8 * _HEAD + _AT)
        results = (split.parts if join != 0 else 1) * split.blocks * step
        room = np.empty((x_bytes + results) // 4, np.float32)
        product(at, x, y, room.ctypes.data)
        room[0] = 0  # Numba frees it behind the place that names it last
        return 0

    return product, job


@kernel
def as_it_is(x: int, m: int, room: int) -> int:
    """Leave x where it lies."""
    return x


class Across(OneVector):
    """What products across the rows of a matrix share; `product` is the same for all of them.

    units: of rows, as the micro-kernel counts them; x_bytes: of room that `prepare` fills; item:
    the dtype of the results. kept: what addresses in `product` point to.
    """

    def __init__(
        self,
        parts: Stored,
        product: Product,
        panels: Kernel,
        in_order: Kernel,
        *,
        units: int,
        x_bytes: int = 0,
        prepare: Kernel = as_it_is,
        item: str = "float32",
        kept: Any = None,
    ) -> None:
        self.kernel, job = _product_kernels(prepare)
        super().__init__(job, kept)
        self.product, self.x_bytes = product, x_bytes + RESULTS_ALIGNMENT
        self.units, self.nbytes = units, parts.codes.nbytes
        self.blocks = -(-parts.n * ITEMSIZE[item] // product.x_step)
        self._panels, self._item, self._in_order = panels, item, in_order

    def split(self, *, by_columns: bool = True) -> tuple[int, ...]:
        """Return whether blocks are shared, not rows; how many shares; the helpers; the pool.

        Blocks are where every thread's share stays in a cache of its own: it need not lie in one
        piece, and whole results need no other thread to add them up; and there must be enough.
        """
        by_rows = shares_of(self.nbytes, self.product.m // PART_ROWS, PARTS_PER_THREAD)
        few = self.nbytes > own_cache_bytes() or 2 * self.blocks < by_rows[0]
        if few or not by_columns:
            return False, *by_rows
        return True, *shares_of(self.nbytes, self.blocks, PARTS_PER_THREAD)

    def words(self, split: tuple[int, ...]) -> tuple[int, ...]:
        """Return the words of a call."""
        by_columns, parts, helpers, pool = split
        join, columns = _join_kernels(self._in_order, self._item)
        steps = (columns.address(2), 0) if by_columns else (_add_rows.address(2), join.address(2))
        panels = self._panels.entry(Product, *[int] * 5)
        behind = Split(0, parts, self.units, self.blocks, panels)
        return pool, helpers, *steps, self.x_bytes, *self.product, *behind
