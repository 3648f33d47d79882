"""Products of sixteen rows with sixteen columns of 8-bit activations in tile registers.

A *chunk* is 64 bytes of each of sixteen rows; nibbles become bytes in a small array first. A record
(see `tiles.ops`) is what 32 columns of x hold for sixteen columns of the result: its eight vectors
of four activations are a tile as they lie. One instruction multiplies both, 8,192 products; their
sums are exact, and leave through memory to be scaled, as each record has scales of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gemmule.backends.cpu import ir, simd
from gemmule.backends.cpu.amx import (
    TILE_BYTES,
    TILE_ROWS,
    configured,
    load_tile,
    multiply_tiles,
    released,
    store_tile,
    zero_tile,
)
from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Intrinsic, kernel, operation
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, Value, block_columns
from gemmule.core.rung import ACTIVATION_GROUP
from gemmule.rungs._cpu_vectors import SECOND_CACHE, prefetch_lines
from gemmule.rungs.quantized.cpu._operands import SERIAL_BYTES, Stored, scale_dtype_of
from gemmule.rungs.quantized.cpu._product import Product, Rows, Way, product_of
from gemmule.rungs.quantized.cpu.tiles.kernels import rounded_records
from gemmule.rungs.quantized.cpu.tiles.ops import (
    RECORD_BYTES,
    WORDS,
    chunk_records,
    row_of_codes,
)
from gemmule.rungs.quantized.cpu.vector.integers import weight_planes

# Tiles 0 to 3 hold the sums of up to four records, 4 and 5 weights, 6 and 7 activations.
_SHAPES = ((TILE_ROWS, 64),) * 4 + ((TILE_ROWS, ACTIVATION_GROUP),) * 2 + ((WORDS, 64),) * 2

# Sections of a task's memory: sums on their way out of tiles, scales and zero points, weights.
_TABLES = 4 * TILE_BYTES
_TABLE_BYTES = 2 * 4 * LANES
_WEIGHTS = _TABLES + 4 * _TABLE_BYTES
_TOTALS = _WEIGHTS + 2 * TILE_BYTES

_get, _put = load("float32", "float32"), store("float32", "float32")


@functools.cache
def unpack_chunk(bits: int) -> Intrinsic:
    """Return ``f(address, row_step_bytes, last_row, count, out)``: a chunk, one byte a code.

    Sixteen rows from `address` on, `count` bytes of each (the rest are zeros); rows behind
    `last_row` repeat it. Nibbles come in the order of a record: of every eight columns first the
    four even ones, then the odd ones.
    """

    def emit(
        builder: Any, address: Value, step: Value, last: Value, count: Value, out: Value
    ) -> None:
        for i in range(TILE_ROWS):
            row = row_of_codes(builder, address, step, i, (last, count))
            if bits == 8:
                simd.store_vector(builder, row, out, 64 * i)
                continue
            words = builder.bitcast(row, simd.vector_type("int32"))
            even, odd = weight_planes(builder, words, bits)
            for half in range(2):
                order = [8 * half + lane // 2 + LANES * (lane % 2) for lane in range(LANES)]
                mixed = simd.shuffled(builder, even, odd, order)
                simd.store_vector(builder, mixed, out, 128 * i + 64 * half)

    return operation(f"amx unpack_chunk {bits}", emit)


@functools.cache
def add_records(bits: int, has_zeros: bool, span: int) -> Intrinsic:
    """Return ``f(work, weights, row_step_bytes, x, totals)``: add a chunk's products to totals.

    work: the task's memory, with tables of 16 scales and 16 zero points for every `span` records;
    x: the chunk's records; totals: sixteen rows of sixteen columns. Without zero points the sums
    start from what the fixed one takes off, which the records hold; it is the same for all rows.
    """

    def emit(
        builder: Any, work: Value, weights: Value, step: Value, x: Value, totals: Value
    ) -> None:
        records = range(chunk_records(bits))
        for r in records:
            at, left, right = r * RECORD_BYTES, 4 + r % 2, 6 + r % 2
            start = at + 64 * (WORDS + 1)
            if has_zeros:
                zero_tile(builder, r)
            else:
                load_tile(builder, r, x, 0, start)
            load_tile(builder, left, weights, step, ACTIVATION_GROUP * r)
            load_tile(builder, right, x, 64, at)
            multiply_tiles(builder, "tdpbusd", r, left, right)
            store_tile(builder, r, work, TILE_BYTES * r)
        for first in records[::span]:
            table = _TABLES + _TABLE_BYTES * (first // span)
            parts = [simd.constant(0.0)] * TILE_ROWS
            for r in records[first : first + span]:
                parts = _scaled(builder, parts, r, work, x, table if has_zeros else None)
            for i, part in enumerate(parts):
                total = simd.load_vector(builder, totals, "float32", 64 * i)
                total = simd.fused(builder, part, simd.spread(builder, work, table + 4 * i), total)
                simd.store_vector(builder, total, totals, 64 * i)

    return operation(f"amx add_records {bits} {has_zeros} {span}", emit)


def _scaled(
    builder: Any, parts: list[Value], record: int, work: Value, x: Value, table: int | None
) -> list[Value]:
    """Emit ``parts + (sums - zero * sum of x) * scale of x`` for one record, row by row."""
    at = record * RECORD_BYTES + 64 * WORDS
    scale = simd.load_vector(builder, x, "float32", at)
    of_x = simd.load_vector(builder, x, "float32", at + 64)
    results = []
    for i, part in enumerate(parts):
        sums = simd.load_vector(builder, work, "int32", TILE_BYTES * record + 64 * i)
        product = builder.sitofp(sums, scale.type)
        if table is not None:
            negated = simd.spread(builder, work, table + 4 * LANES + 4 * i)
            product = simd.fused(builder, negated, of_x, product)
        results.append(simd.fused(builder, product, scale, part))
    return results


def _copy(builder: Any, source: Value, target: Value, count: Value) -> None:
    lanes = simd.vector_type("int32")
    numbers = simd.splat(builder, builder.trunc(count, ir.IntType(32)))
    mask = builder.icmp_signed("<", lanes(list(range(LANES))), numbers)
    row = simd.load_vector(builder, source, "float32")
    pointer = builder.inttoptr(target, row.type.as_pointer())
    name, aligned_to = "llvm.masked.store.v16f32.p0", ir.IntType(32)(1)
    simd.called(builder, name, ir.VoidType(), row, pointer, aligned_to, mask)


_copy_some = operation("amx copy_some", _copy)  # the first `count` of 16 floats


@kernel
def put_rows(job: Product, totals: int, row: int, last: int, panel: int) -> None:
    """Write rows of sixteen totals where they belong in the result."""
    for i in range(last + 1):
        target = job.y + 4 * ((row + i) * job.columns + LANES * panel)
        _copy_some(totals + 64 * i, target, job.columns - LANES * panel)


@functools.cache
def integer_rows(bits: int, scale_dtype: str, has_zeros: bool, span: int) -> Rows:
    """Return the micro-kernel for one kind of matrix; `span` records of a chunk share scales."""
    configure, release = configured(*_SHAPES), released()
    unpack, add, put = unpack_chunk(bits), add_records(bits, has_zeros, span), put_rows
    scale, prefetch_rows = (
        load(scale_dtype, "float32"),
        prefetch_lines(TILE_ROWS, near=SECOND_CACHE),
    )
    tables = chunk_records(bits) // span
    chunk_bytes_of_x = chunk_records(bits) * RECORD_BYTES
    whole, unpacked_step, width = bits == 8, 8 * 64 // bits, block_columns(bits)

    @kernel
    def fill(job: Product, work: int, row: int, last: int, group: int) -> None:
        groups = max(job.scale_step, 1)
        for t in range(tables):
            at, mine = work + _TABLES + t * _TABLE_BYTES, min(group + t, groups - 1)
            for i in range(TILE_ROWS):
                place = (row + min(i, last)) * job.scale_step + mine
                _put(at, i, scale(job.scales, place))
                if has_zeros:
                    _put(at, LANES + i, -_get(job.zeros, place))

    @kernel
    def tiles(job: Product, first: int, end: int) -> None:
        chunks, panels = (job.row_bytes + 63) // 64, (job.columns + LANES - 1) // LANES
        per_group = chunks if job.group >= job.n else max(job.group // width, 1)
        memory = np.empty(_TOTALS + panels * TILE_BYTES + 64, np.uint8)
        work = (memory.ctypes.data + 63) // 64 * 64
        totals = work + _TOTALS
        configure()
        for row in range(first, end, TILE_ROWS):
            last = min(TILE_ROWS, end - row) - 1
            for i in range(panels * TILE_BYTES // 4):
                _put(totals, i, np.float32(0))
            for chunk in range(chunks):
                at = job.codes + row * job.row_bytes + 64 * chunk
                below = job.codes + (row + TILE_ROWS) * job.row_bytes
                prefetch_rows(below + chunk * 64, job.row_bytes)
                if chunk % per_group == 0:
                    fill(job, work, row, last, chunk // per_group * tables)
                count = job.row_bytes - 64 * chunk
                weights, step = work + _WEIGHTS, unpacked_step
                if whole and last == TILE_ROWS - 1 and count >= 64:
                    weights, step = at, job.row_bytes
                else:
                    unpack(at, job.row_bytes, last, count, weights)
                x = job.x + chunk * chunk_bytes_of_x
                for panel in range(panels):
                    add(work, weights, step, x + panel * job.x_step, totals + panel * TILE_BYTES)
            for panel in range(panels):
                put(job, totals + panel * TILE_BYTES, row, last, panel)
        release()

    return Rows(tiles)


def integer_tiles(parts: Stored, columns: int) -> Way:
    """Return how a matrix is multiplied by columns rounded to 8 bits."""
    bits, has_zeros = parts.bits, parts.zeros is not None
    records = chunk_records(bits)
    size = -(-parts.row_bytes // BLOCK_BYTES) * records * RECORD_BYTES
    span = min(parts.group, block_columns(bits)) // ACTIVATION_GROUP
    span = records if parts.group >= parts.n else span
    return Way(
        rows=integer_rows(bits, scale_dtype_of(parts), has_zeros, span),
        product=product_of(parts, x_step=size),
        kept=None,
        unit=TILE_ROWS,
        panel=LANES,
        panel_bytes=size,
        prepare=rounded_records(bits, has_zeros),
        alone_below=LANES * SERIAL_BYTES,
    )
