"""One quantised product: what its kernel is told, who computes which share, how a host runs it.

**The contract of a micro-kernel.** A micro-kernel is a compiled function over a `Product`, which
names all memory by integer addresses. It is of one of two kinds:

- *along the stored rows*: ``f(product, first, end)`` writes the results of these rows, without the
  last named, in all columns. It zeroes what it sums in and finishes what it writes; nobody else
  writes these rows. A share begins at a multiple of what the kernel takes at once (`Way.unit`).
- *across them*: ``f(product, first, end, sums, left, right)`` adds the products of rows
  ``first .. end - 1`` (or groups of rows: `_across`) to the sums of blocks ``left .. right - 1`` of
  columns. The caller zeroes the sums before and brings them into the order of y after.

Rows of codes lie ``row_bytes`` apart, their scales and zero points ``scale_step`` elements. The
kernel reads x as its own `prepare` left it, of any alignment unless that says otherwise, and no
byte behind the codes, scales and zero points. All else (threads, shares, results that are not whole
panels) is derived here, once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.atomics import unpacked_as
from gemmule.backends.cpu.copies import in_rows
from gemmule.backends.cpu.intrinsics import enter, load
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import Pooled
from gemmule.backends.cpu.simd import BLOCK_BYTES
from gemmule.core.problem import Problem
from gemmule.core.rung import Params
from gemmule.rungs._cpu import address
from gemmule.rungs._cpu_workspace import claimed, release, workspace
from gemmule.rungs.quantized.cpu._operands import SERIAL_BYTES, Run, Stored, bound


class Product(NamedTuple):
    """A stored matrix and what it is multiplied by: addresses, counts, and steps in bytes.

    m, n: stored rows and columns. group: columns of one, scale_step: elements from one row's scales
    to the next row's, 0 with one scale for the matrix. first, lanes: the group of each block's
    first lane, and which of those behind it each lane has (see `_operands.Blocks`); or, in place of
    lanes, a kernel's tables. lowest: `LOWEST_BYTES`. x_step: from one block's activations to the
    next, from one panel's, or across the rows from one block of results. columns: of y, with whole
    panels where the kernel wants them. factor: bits of a float32 that sums are multiplied by.
    """

    codes: int
    row_bytes: int
    m: int
    n: int
    group: int
    scales: int
    zeros: int
    scale_step: int
    first: int
    lanes: int
    lowest: int
    x_step: int
    x: int
    y: int
    columns: int
    factor: int


# The lowest byte of each lane: of a mask that LLVM knows it would make two instructions.
LOWEST_BYTES = 0x1111111111111111
load_product, SIZE = unpacked_as(Product), len(Product._fields)
# Activations from so many bytes on lie in memory that is kept: an allocator may give large blocks
# back after each product, and a page that comes anew takes 2 us (virtual machine, November 2026).
_KEPT_FROM = 128 << 10
_number, _SIZE = load("int64", "int64"), SIZE
_MATRIX = Product._fields.index("x")  # fields before it are of the matrix and the kernel alone


def product_of(parts: Stored, **given: int) -> Product:
    """Return the product of a matrix; given: other fields, or those that lie elsewhere."""
    of_matrix = {
        "codes": address(parts.codes),
        "row_bytes": parts.row_bytes,
        "m": parts.m,
        "n": parts.n,
        "group": parts.group,
        "scales": address(parts.scales),
        "zeros": parts.zeros_address,
        "scale_step": parts.scale_step,
        "lowest": LOWEST_BYTES,
        "columns": 1,
    }
    return Product(**(dict.fromkeys(Product._fields, 0) | of_matrix | given))


@kernel
def _share(at: int, number: int) -> None:
    """Compute a share of the rows; words: a `Product`, the unit, how many shares, the kernel."""
    product, unit, count = load_product(at), _number(at, _SIZE), _number(at, _SIZE + 1)
    units = (product.m + unit - 1) // unit
    first, end = units * number // count * unit, units * (number + 1) // count * unit
    enter(_number(at, _SIZE + 2), (product, first, min(end, product.m)))


class Rows:
    """A micro-kernel along the rows, in shares."""

    def __init__(self, rows: Kernel) -> None:
        self._rows, self.shares = rows, Pooled(_share, lambda: self.entry)

    @functools.cached_property
    def entry(self) -> int:
        """The address of the compiled micro-kernel."""
        return self._rows.entry(Product, int, int)

    def run(
        self, product: tuple[int, ...], m: int, unit: int, rows_per_share: int, *, alone: bool
    ) -> None:
        """Compute a product of `m` rows, on the calling thread alone where `alone`."""
        units = -(-m // unit)
        count = -(-units // -(-rows_per_share // unit))
        run = self.shares.alone if alone else self.shares
        run(count, *product, unit, count)


def share_address() -> int:
    """Return the address of what computes a share of a micro-kernel along the rows."""
    return _share.address(2)


Prepare = Callable[[NDArray[Any], int, int], "int | None"]


class Way(NamedTuple):
    """How a micro-kernel along the rows multiplies one matrix.

    product: with all that no x changes; kept: what it points to besides the matrix. unit: rows that
    a share does not split. panel: columns of x that the kernel takes at once, `padded` if y must
    have whole ones; panel_bytes: of their activations. ``prepare(x, place, panel_bytes)`` writes
    those of all panels to memory that begins a cache line, zero-filled if `cleared`, and returns
    the product's factor, or None where this x cannot be multiplied so. most_rows: of a share, if
    limited.
    alone_below: bytes of codes, times columns, that one thread multiplies as fast as two.
    """

    rows: Rows
    product: Product
    kept: Any
    unit: int
    panel: int
    panel_bytes: int
    prepare: Prepare
    cleared: bool = True
    padded: bool = False
    most_rows: int = 1 << 30
    alone_below: int = SERIAL_BYTES


def multiply(
    parts: Stored, way: Way, x: NDArray[Any], y: NDArray[Any], rows_per_share: int
) -> bool:
    """Set ``y = A x`` with x, (n, c) float32; return False, with nothing done, where it cannot."""
    columns = x.shape[1]
    panels = -(-columns // way.panel)
    nbytes = panels * way.panel_bytes
    if nbytes > _KEPT_FROM:
        kept = workspace(nbytes)
        part = claimed(kept)
        try:
            if way.cleared:
                ctypes.memset(part, 0, nbytes)
            return _multiply(parts, way, x, y, rows_per_share, part)
        finally:
            release(kept, part)
    room = np.zeros(nbytes + BLOCK_BYTES, np.uint8)
    return _multiply(parts, way, x, y, rows_per_share, aligned(room))


def _multiply(
    parts: Stored, way: Way, x: NDArray[Any], y: NDArray[Any], rows_per_share: int, place: int
) -> bool:
    """Do it with the activations of all panels at `place`."""
    columns = x.shape[1]
    panels = -(-columns // way.panel)
    factor = way.prepare(x, place, way.panel_bytes)
    if factor is None:
        return False
    whole = not way.padded or panels * way.panel == columns
    target = y if whole else np.empty((parts.m, panels * way.panel), np.float32)
    words = (*way.product[:_MATRIX], place, address(target), target.shape[1], factor)
    small = parts.codes.nbytes * target.shape[1] < way.alone_below
    way.rows.run(words, parts.m, way.unit, min(rows_per_share, way.most_rows), alone=small)
    if not whole:
        y[...] = target[:, :columns]
    return True


def aligned(room: NDArray[Any]) -> int:
    """Return the first address in `room` that begins a cache line."""
    return -(-address(room) // BLOCK_BYTES) * BLOCK_BYTES


def by_kernel(write: Kernel, *, turned: bool = False) -> Prepare:
    """Return the `Way.prepare` of ``f(x, n, columns, out, panel_bytes)``, not 0 where it cannot.

    turned: it takes x as (columns, n).
    """

    def prepare(x: NDArray[Any], place: int, panel_bytes: int) -> int | None:
        given = in_rows(x.T) if turned else x
        return None if write(address(given), *x.shape, place, panel_bytes) else 0

    return prepare


Make = Callable[[Stored, int], Way]


def bind_ways(*makes: Make, columns: int) -> Callable[[Problem, Params], Run]:
    """Return the `bind` of a rung that multiplies by the first of some ways that takes an x.

    makes: each makes the way of a matrix, for up to `columns` columns at once.
    """

    def bind(problem: Problem, params: Params) -> Run:
        rows_per_share, at_once = int(params["rows_per_task"]), min(columns, max(1, problem.n))

        def core(parts: Stored, B: NDArray[Any], C: NDArray[Any]) -> None:
            for make in makes:
                if multiply(parts, parts.kept(make, at_once), B, C, rows_per_share):
                    return

        return bound(core, "float32")

    return bind
