"""Micro-kernels of sixteen rows with a few columns, and the products that they make."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.intrinsics import load, prefetch, store
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, block_columns
from gemmule.core.problem import Problem
from gemmule.core.rung import ACTIVATION_GROUP
from gemmule.rungs._cpu_vectors import zeros_of
from gemmule.rungs.quantized.cpu._operands import SERIAL_BYTES, Stored, scale_dtype_of
from gemmule.rungs.quantized.cpu._product import Prepare, Product, Rows, Way, by_kernel, product_of
from gemmule.rungs.quantized.cpu.tiles.ops import (
    RECORD_BYTES,
    TILE_COLUMNS,
    add_columns,
    add_scaled,
    add_tile,
    chunk_records,
    plane_bytes,
    quantise_block,
    take_chunk,
)

_get, _put = load("float32", "float32"), store("float32", "float32")


@functools.cache
def tile_rows(
    bits: int, columns: int, scale_dtype: str, has_zeros: bool, integers: bool, pieces: int
) -> Rows:
    """Return the micro-kernel of panels of so many columns; `pieces`: groups of a chunk, or 1.

    x: for every panel of a record's columns, or its own, x_step bytes apart, what each chunk meets.
    """
    scale, width, fixed = load(scale_dtype, "float32"), block_columns(bits), 2 ** (bits - 1)
    add: Intrinsic | Kernel
    if integers:
        take, add, size = (
            take_chunk(bits, decoded=False),
            _integer_panel(bits, has_zeros, pieces),
            plane_bytes(bits),
        )
        chunk_bytes, in_record = chunk_records(bits) * RECORD_BYTES, LANES // columns
    else:
        take, size = take_chunk(bits, decoded=True, pieces=pieces), 64 * width
        add = _float_panel(bits, columns, pieces)
        chunk_bytes, in_record = 4 * columns * width, 1

    @kernel
    def tiles(job: Product, first: int, end: int) -> None:
        chunks, panels = (job.row_bytes + 63) // 64, (job.columns + columns - 1) // columns
        per_group = chunks if job.group >= job.n else max(job.group // width, 1)
        memory = np.empty(size + 64 * (panels * columns + 2 * pieces + 1), np.uint8)
        codes = (memory.ctypes.data + 63) // 64 * 64
        scales, zeros = codes + size, codes + size + 64 * pieces
        totals, groups = zeros + 64 * pieces, max(job.scale_step, 1)
        for i in range(pieces * LANES):
            _put(zeros, i, np.float32(fixed))
        for row in range(first, end, LANES):
            last = min(LANES, end - row) - 1
            for i in range(panels * columns * LANES):
                _put(totals, i, np.float32(0))
            for chunk in range(chunks):
                at = job.codes + row * job.row_bytes + 64 * chunk
                for i in range(LANES):
                    prefetch(at + LANES * job.row_bytes + i * job.row_bytes)
                if chunk % per_group == 0:
                    first_group = chunk // per_group * pieces
                    for i in range(LANES):
                        place = (row + min(i, last)) * job.scale_step
                        for piece in range(pieces):
                            at_group = place + min(first_group + piece, groups - 1)
                            _put(scales, LANES * piece + i, scale(job.scales, at_group))
                            if has_zeros:
                                _put(zeros, LANES * piece + i, _get(job.zeros, at_group))
                take(at, job.row_bytes, last, job.row_bytes - 64 * chunk, zeros, codes)
                for panel in range(panels):
                    x = job.x + chunk * chunk_bytes + panel // in_record * job.x_step
                    x += panel % in_record * 4 * columns
                    add(codes, x, scales, zeros, totals + panel * columns * 64)
            for i in range(last + 1):
                for c in range(job.columns):
                    _put(job.y, (row + i) * job.columns + c, _get(totals, c * LANES + i))

    return Rows(tiles)


@functools.cache
def _integer_panel(bits: int, has_zeros: bool, pieces: int) -> Intrinsic | Kernel:
    """Return `add_tile` for all pieces of a chunk, one after the other: together they spill."""
    if pieces == 1:
        return add_tile(bits, has_zeros)
    add, count = add_tile(bits, has_zeros, pieces), min(pieces, chunk_records(bits))
    scales_bytes, planes_bytes = 64 * pieces // count, plane_bytes(bits) // count
    records_bytes = chunk_records(bits) // count * RECORD_BYTES

    @kernel
    def add_pieces(planes: int, x: int, scales: int, zeros: int, totals: int) -> None:
        for i in range(count):
            place = i * scales_bytes
            at, x_at = planes + i * planes_bytes, x + i * records_bytes
            add(at, x_at, scales + place, zeros + place, totals)

    return add_pieces


@functools.cache
def _float_panel(bits: int, columns: int, pieces: int) -> Kernel:
    """Return what `add_tile` does for `columns` columns of floats, whose zero points are off."""
    add, put_scaled, no_sums = add_columns(columns), add_scaled(columns), zeros_of(columns)
    width = block_columns(bits) // pieces

    @kernel
    def add_panel(weights: int, x: int, scales: int, zeros: int, totals: int) -> None:
        for piece in range(pieces):
            sums = no_sums()
            for k in range(piece * width, (piece + 1) * width, 4):
                sums = add(sums, weights + 64 * k, x + 4 * columns * k)
            put_scaled(sums, scales + 64 * piece, totals)

    return add_panel


@functools.cache
def quantise_tile_kernel(bits: int, has_zeros: bool) -> Kernel:
    """Return ``f(x, n, columns, out, panel_bytes) -> 0``: all records of x, (n, columns) float32.

    out: zero-filled; records behind the last column of the matrix are left as they are.
    """
    block = quantise_block(bits, has_zeros)

    @kernel
    def quantise(x: int, n: int, columns: int, out: int, panel_bytes: int) -> int:
        for panel in range((columns + LANES - 1) // LANES):
            for record in range((n + ACTIVATION_GROUP - 1) // ACTIVATION_GROUP):
                low = record * ACTIVATION_GROUP
                block(
                    x + 4 * (low * columns + LANES * panel),
                    4 * columns,
                    n - low,
                    columns - LANES * panel,
                    out + panel * panel_bytes + record * RECORD_BYTES,
                )
        return 0

    return quantise


@functools.cache
def _arrange_kernel(panel: int) -> Kernel:
    """Return ``f(x, n, columns, out, panel_bytes) -> 0``: x in panels, of which out has zeros."""

    @kernel
    def arrange(x: int, n: int, columns: int, out: int, panel_bytes: int) -> int:
        for low in range(0, columns, panel):
            to = out + low // panel * panel_bytes
            for row in range(n):
                for c in range(min(panel, columns - low)):
                    _put(to, row * panel + c, _get(x, row * columns + low + c))
        return 0

    return arrange


def rounded_records(bits: int, has_zeros: bool) -> Prepare:
    """Return the `Way.prepare` that rounds an x to 8 bits, unless it holds NaN or infinity."""
    quantise = by_kernel(quantise_tile_kernel(bits, has_zeros))

    def prepare(x: NDArray[Any], place: int, panel_bytes: int) -> int | None:
        return quantise(x, place, panel_bytes) if np.isfinite(x).all() else None

    return prepare


def integer_tiles(parts: Stored, columns: int) -> Way:
    """Return how a matrix is multiplied by columns rounded to 8 bits."""
    has_zeros = parts.zeros is not None
    size = -(-parts.row_bytes // BLOCK_BYTES) * chunk_records(parts.bits) * RECORD_BYTES
    prepare = rounded_records(parts.bits, has_zeros)
    return _way(parts, TILE_COLUMNS, LANES, size, prepare, integers=True)


def float_tiles(parts: Stored, columns: int) -> Way:
    """Return how a matrix is multiplied by columns of floats as they are."""
    panel = TILE_COLUMNS if columns <= TILE_COLUMNS else 2 * TILE_COLUMNS
    size = -(-parts.row_bytes // BLOCK_BYTES) * block_columns(parts.bits) * 4 * panel
    return _way(parts, panel, panel, size, by_kernel(_arrange_kernel(panel)))


def _way(
    parts: Stored, columns: int, panel: int, size: int, prepare: Prepare, *, integers: bool = False
) -> Way:
    width = block_columns(parts.bits)
    pieces = 1 if parts.group >= parts.n else max(width // parts.group, 1)
    kind = parts.bits, columns, scale_dtype_of(parts), parts.zeros is not None, integers, pieces
    return Way(
        rows=tile_rows(*kind),
        product=product_of(parts, x_step=size),
        kept=None,
        unit=LANES,
        panel=panel,
        panel_bytes=size,
        prepare=prepare,
        alone_below=LANES * SERIAL_BYTES,
    )


def groups_are_records(problem: Problem, least: int = ACTIVATION_GROUP) -> bool:
    """Whether groups are whole chunks, or a chunk whole groups, each whole records.

    least: as many columns as a group has at least, half a record or a whole one.
    """
    spec = problem.quant
    if groups_are_chunks(problem) or spec is None or spec.group_size is None:
        return groups_are_chunks(problem)
    return block_columns(spec.bits) % spec.group_size == 0 and spec.group_size % least == 0


def groups_are_chunks(problem: Problem) -> bool:
    """Whether no 64 bytes of a row meet two groups."""
    spec = problem.quant
    if spec is None:
        return False
    size = spec.group_size
    return size is None or size == -1 or size >= problem.k or size % block_columns(spec.bits) == 0
