"""Blocks of codes as weights, in the order in which lanes hold them: float32 rows, or tiles."""

from __future__ import annotations

import functools
from typing import Any

from gemmule.backends.cpu import simd
from gemmule.backends.cpu.amx import TILE_BYTES, TILE_ROWS
from gemmule.backends.cpu.intrinsics import load
from gemmule.backends.cpu.jit import Intrinsic, Kernel, kernel, operation
from gemmule.backends.cpu.simd import BLOCK_BYTES, LANES, Value
from gemmule.core.problem import ITEMSIZE
from gemmule.rungs import _cpu_vectors as vectors
from gemmule.rungs._cpu_vectors import registers
from gemmule.rungs.matmul.cpu._tile_steps import STEP_TERMS
from gemmule.rungs.quantized.cpu._product import load_product
from gemmule.rungs.quantized.cpu.blocks import halves
from gemmule.rungs.quantized.cpu.blocks.halves import tiles_of
from gemmule.rungs.quantized.cpu.vector.codes import (
    Kind,
    Values,
    code_of_table,
    numbers_of,
    steps_of,
    tables_of,
)

_index = load("int32", "int32")


@functools.cache
def _put_weights(kind: Kind) -> Intrinsic:
    """Return ``f(scales, zeros, words, out, lowest)``: a block's weights, `place_kernel`'s order.

    Each is scale times (code - zero), as the look-up tables hold it.
    """

    def emit(
        builder: Any, scales: Values, zeros: Values, codes: Values, out: Value, lowest: Value
    ) -> None:
        parts = [registers(builder, some[0]) for some in (scales, zeros, codes)]
        for part, (scale, zero, word) in enumerate(zip(*parts, strict=True)):
            lanes = word.type.count
            if kind.tables:
                (table,) = tables_of(builder, [scale], [zero], kind)
            else:
                step = steps_of(builder, word, zero, kind, lowest)
            for k in kind.order:
                if kind.tables:
                    weight = code_of_table(builder, table, word, k)
                else:
                    weight = builder.fmul(step(k), scale)
                simd.store_vector(builder, weight, out, 64 * k + 4 * lanes * part)

    return operation(f"put_weights {kind}", emit)


@functools.cache
def _put_zeros(count: int, apart: int) -> Intrinsic:
    def emit(builder: Any, out: Value) -> None:
        for i in range(count):
            simd.store_vector(builder, simd.constant(0.0), out, apart * i)

    return operation(f"put_zeros {count} {apart}", emit)


@functools.cache
def _place_kernel(bits: int, pitch: int, pieces: int) -> Kernel:
    """Return ``f(out, row, blocks, block)``: where a row's block of so many goes."""
    row_bytes, in_row = 4 * pitch, 4 * simd.block_columns(bits)
    in_tiles = tiles_of(bits) * pieces * TILE_BYTES

    @kernel
    def in_rows(out: int, row: int, blocks: int, block: int) -> int:
        return out + row * row_bytes + block * in_row

    @kernel
    def in_panels(out: int, row: int, blocks: int, block: int) -> int:
        panel = row // TILE_ROWS * blocks * in_tiles
        return out + panel + block * in_tiles + row % TILE_ROWS * BLOCK_BYTES

    return in_rows if pitch > 0 else in_panels


@functools.cache
def decode_kernel(kind: Kind, pitch: int, pieces: int = 1) -> Kernel:
    """Return ``f(product, row, rows, padded, first, blocks, out, low, high)``: blocks of rows.

    product: address of a `Product`. first: the first of these blocks of 64 bytes. Weights are
    float32, rows `pitch` numbers apart; or, where that is 0, sums of so many bfloat16 `pieces` in
    tiles of `put_halves`, a panel of sixteen rows after the other. Rows behind `rows`, up to
    `padded`, are zeros, codes behind a row's end count as zero codes. low, high: which of these
    rows are decoded now. Asked for are the same blocks of the next stretch, or of the rows that
    tiles meet next.
    """
    load_scales, load_zeros = numbers_of(kind, 1, full=False)
    load_full, load_tail = vectors.load_words(1, full=True), vectors.load_words(1)
    codes_of_lane = simd.codes_per_lane(kind.bits)
    put, clear = _put_weights(kind), _put_zeros(codes_of_lane, 4 * LANES)
    if pitch == 0:
        load_scales, load_zeros = halves.numbers_of(kind)
        put = halves.put_halves(kind, pieces)
        clear = _put_zeros(pieces * tiles_of(kind.bits), TILE_BYTES)
    place_of = _place_kernel(kind.bits, pitch, pieces)
    ask, in_tiles = vectors.prefetch_lines(1, 1, vectors.SECOND_CACHE), pitch == 0

    @kernel
    def decode(
        at: int,
        row: int,
        rows: int,
        padded: int,
        first: int,
        blocks: int,
        out: int,
        low: int,
        high: int,
    ) -> None:
        job = load_product(at)
        groups = max(job.scale_step, 1)
        soon = padded * job.row_bytes if in_tiles else BLOCK_BYTES * blocks
        for i in range(low, min(high, rows)):
            codes = job.codes + (row + i) * job.row_bytes
            place = (row + i) * job.scale_step
            for block in range(first, first + blocks):
                start, left = codes + BLOCK_BYTES * block, job.row_bytes - BLOCK_BYTES * block
                ask(start + soon, 0)
                group, lanes = _index(job.first, block), job.lanes + 64 * block
                index, count = place + group, groups - group
                scales = load_scales(job.scales, index, 0, count, lanes)
                zeros = load_zeros(job.zeros, index, 0, count, lanes)
                to = place_of(out, i, blocks, block - first)
                if left >= BLOCK_BYTES:
                    put(scales, zeros, load_full(start, 0, 64), to, job.lowest)
                else:
                    put(scales, zeros, load_tail(start, 0, left), to, job.lowest)
        for i in range(max(low, rows), high):
            for block in range(blocks):
                clear(place_of(out, i, blocks, block))

    return decode


# Rows of codes, scales and zero points that are asked for ahead of those that become pairs.
_ROWS_AHEAD = 32


@functools.cache
def pairs_kernel(kind: Kind) -> Kernel:
    """Return what `decode_kernel` does, as `put_pairs` has it.

    Of each block panels of sixteen columns, of `padded` terms each. low and high are even. Behind
    an odd row stands the same again, and zeros behind that: what meets them must be zeros.
    """
    load_scales, load_zeros = halves.numbers_of(kind, 2)
    load_full, load_tail = vectors.load_words(1, full=True), vectors.load_words(1)
    put, panels = halves.put_pairs(kind), simd.codes_per_lane(kind.bits)
    clear, scale_bytes = _put_zeros(1, 0), ITEMSIZE[kind.scale_dtype]
    ask = vectors.prefetch_lines(1)

    @kernel
    def decode(
        at: int,
        row: int,
        rows: int,
        padded: int,
        first: int,
        blocks: int,
        out: int,
        low: int,
        high: int,
    ) -> None:
        job = load_product(at)
        groups, panel, step = max(job.scale_step, 1), 2 * LANES * padded, 2 * LANES
        for i in range(low, min(high, rows), 2):
            one = row + i
            other = min(one + 1, row + rows - 1)
            for ahead in range(one + _ROWS_AHEAD, one + _ROWS_AHEAD + 2):
                ask(job.codes + ahead * job.row_bytes + BLOCK_BYTES * first, 0)
                soon = ahead * job.scale_step + _index(job.first, first)
                ask(job.scales + soon * scale_bytes, 0)
                ask(job.zeros + soon * 4, 0)
            for block in range(first, first + blocks):
                a = job.codes + one * job.row_bytes + BLOCK_BYTES * block
                b = job.codes + other * job.row_bytes + BLOCK_BYTES * block
                left, lanes = job.row_bytes - BLOCK_BYTES * block, job.lanes + 64 * block
                group = _index(job.first, block)
                p, q = one * job.scale_step + group, other * job.scale_step + group
                scales = load_scales(job.scales, p, 0, groups - group, lanes)
                zeros = load_zeros(job.zeros, p, 0, groups - group, lanes)
                others = load_scales(job.scales, q, 0, groups - group, lanes)
                points = load_zeros(job.zeros, q, 0, groups - group, lanes)
                to = out + i // STEP_TERMS * TILE_BYTES + i % STEP_TERMS * step
                to += (block - first) * panels * panel
                if left >= BLOCK_BYTES:
                    words, next_words = load_full(a, 0, 64), load_full(b, 0, 64)
                    put(scales, zeros, words, others, points, next_words, to, panel, job.lowest)
                else:
                    words, next_words = load_tail(a, 0, left), load_tail(b, 0, left)
                    put(scales, zeros, words, others, points, next_words, to, panel, job.lowest)
        for i in range(max(low, (rows + 1) // 2 * 2), high, 2):
            to = out + i // STEP_TERMS * TILE_BYTES + i % STEP_TERMS * step
            for k in range(panels * blocks):
                clear(to + k * panel)

    return decode
