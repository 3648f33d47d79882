"""Products of one vector across the stored rows: results in parts, added up and put in order.

A micro-kernel across the rows (`_product`) adds rows to sums by blocks of columns. Either each
share is a part of the rows, with sums of its own that others then add up, or, where every thread's
part of the matrix stays in a cache of its own, a share is a part of the blocks, over all rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.intrinsics import enter, load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import own_cache_bytes, share_count
from gemmule.backends.cpu.steps import ALIGNMENT, Prepare, Step, Steps, X, Y, buffer
from gemmule.core.problem import ITEMSIZE
from gemmule.rungs.quantized.cpu import _product
from gemmule.rungs.quantized.cpu._product import Product, load_product

_put = store("float32", "float32")

# A part's rows at least: its results, 4 bytes a column, are written, read and added.
PART_ROWS = 48
PARTS_PER_THREAD = 2
# Bytes of results that one share joins, and of all parts that the caller joins alone.
JOIN_BYTES, JOIN_ALONE = 16384, 1 << 18


class Split(NamedTuple):
    """What shares know beside their product: y, in how many parts, and of how many, by what."""

    y: int
    parts: int
    units: int
    blocks: int
    panels: int


_load_split, _AT = unpacked_as(Split), 8 * _product.SIZE


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


@dataclass(frozen=True, slots=True)
class Across:
    """The products of a matrix with vectors across its rows.

    product: but for x and y; nbytes: of its codes. panels: the micro-kernel; units: of rows, as it
    counts them. in_order: see `_join_kernels`; item: the dtype of the results. prepare, x_bytes:
    what writes x to a buffer, where it is not read as it lies, and how much of that it fills. kept:
    what addresses in `product` point to.
    """

    product: Product
    nbytes: int
    panels: Kernel
    in_order: Kernel
    units: int
    x_bytes: int = 0
    prepare: Kernel | None = None
    item: str = "float32"
    kept: Any = None

    @property
    def blocks(self) -> int:
        """How many blocks of columns there are."""
        return -(-self.product.n * ITEMSIZE[self.item] // self.product.x_step)

    def split(self, *, by_columns: bool = True) -> tuple[bool, int]:
        """Return whether blocks are shared, not rows, and how many shares there are.

        Blocks are where every thread's share stays in a cache of its own: it need not lie in one
        piece, and whole results need no other thread to add them up; and there must be enough.
        """
        nbytes = self.nbytes
        by_rows = share_count(nbytes, self.product.m // PART_ROWS, PARTS_PER_THREAD)
        if not by_columns or nbytes > own_cache_bytes() or 2 * self.blocks < by_rows:
            return False, by_rows
        return True, share_count(nbytes, self.blocks, PARTS_PER_THREAD)

    def steps(self, split: tuple[bool, int]) -> Steps:
        """Return the product in such shares."""
        (by_columns, parts), step, blocks = split, self.product.x_step, self.blocks
        join, columns = _join_kernels(self.in_order, self.item)
        if by_columns:
            steps = [Step(columns.address(2), parts)]
        else:
            joins = -(-blocks // max(1, JOIN_BYTES // step))
            alone = parts == 1 or parts * blocks * step <= JOIN_ALONE
            steps = [Step(_add_rows.address(2), parts), Step(join.address(2), joins, alone=alone)]
        x_bytes = -(-self.x_bytes // ALIGNMENT) * ALIGNMENT
        x = X if self.prepare is None else buffer()
        told = self.product._asdict() | {"x": x, "y": buffer(x_bytes)}
        return Steps(
            steps,
            (*told.values(), Y, parts, self.units, blocks, self.panels.entry(Product, *[int] * 5)),
            buffer_bytes=x_bytes + (1 if by_columns else parts) * blocks * step,
            prepare=None if self.prepare is None else Prepare(self.prepare, self.product.m),
            kept=self.kept,
        )
