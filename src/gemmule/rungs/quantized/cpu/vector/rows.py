"""Micro-kernels along the rows in vector registers, and the products that they make.

Of one vector two rows at a time that lie half a share apart; of a few columns four rows by four
columns, x in chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu import simd
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import load
from gemmule.backends.cpu.jit import Intrinsic, kernel
from gemmule.backends.cpu.pool import share_count, team
from gemmule.backends.cpu.steps import Prepare, Step, Steps, Y, buffer
from gemmule.backends.cpu.target import has_wide_vectors
from gemmule.core.problem import FLOAT4, Problem
from gemmule.core.rung import Params
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs import _cpu_vectors as vectors
from gemmule.rungs._cpu import address
from gemmule.rungs.quantized.cpu import _product
from gemmule.rungs.quantized.cpu._operands import (
    SERIAL_BYTES,
    Blocks,
    Run,
    Stored,
    blocks_of,
    bound,
    scale_dtype_of,
    stored,
    takes_floats,
)
from gemmule.rungs.quantized.cpu._product import Product, Rows, Way, by_kernel, product_of
from gemmule.rungs.quantized.cpu.vector import activations, floats
from gemmule.rungs.quantized.cpu.vector.codes import (
    Kind,
    Numbers,
    by_words,
    kind_of,
    lifted_zeros,
    numbers_of,
)
from gemmule.rungs.quantized.cpu.vector.integers import (
    FLOAT_ZERO,
    add_integer_products,
    record_bytes,
)
from gemmule.rungs.quantized.cpu.vector.quads import (
    BLOCKS,
    add_quads,
    quad_numbers,
    quad_pieces,
    quad_record_bytes,
    vectors_of,
)

_index = load("int32", "int32")

# Rows at once that meet one column. A processor prefetches best what is read in order, in few
# places, page after page, so they lie half a share apart: each belongs to a stretch that is read
# from end to end. GB/s, cold, two cores of a Xeon with AVX-512, November 2026, 4096, 8192, 16384
# columns, int4 with 8-bit activations: four neighbouring rows, each line asked for twice, 26.0,
# 27.2, 24.5; one stretch, a page and 1 KiB ahead, 29.3, 27.9, 31.7; two, 3 KiB ahead, 29.3, 31.9,
# 34.5, 2.5 KiB 29.3, 32.2, 33.8, 4 KiB 28.6, 30.4, 31.1; four, 2 KiB ahead, 27.6, 27.3, 27.7.
STRETCHES = 2
AHEAD_BYTES = 3072

# Activations of one chunk of a panel: they stay in L1 beside the totals.
CHUNK_BYTES = 16384
# Codes of a share that meets several panels of columns: half of a 1 MiB L2.
SHARE_BYTES = 512 * 1024


def stretches(integers: bool) -> int:
    """Return how many rows meet one column at once: four where AVX2 spends much on each's end."""
    return STRETCHES if integers or has_wide_vectors() else 2 * STRETCHES


def _operations(kind: Kind, rows: int) -> tuple[Numbers, Numbers, Intrinsic]:
    """Return what loads numbers in full blocks and in others, and what adds products of a block."""
    if kind.quads > 0:
        full, rest = (quad_numbers(kind, rows, full=one) for one in (True, False))
        return full, rest, add_quads(kind.quads, rows, has_zeros=kind.has_zeros, floats=kind.floats)
    full, rest = (numbers_of(kind, rows, full=one) for one in (True, False))
    if kind.integers:
        return (
            full,
            rest,
            add_integer_products(kind.bits, 1, kind.has_zeros, rows, floats=kind.floats),
        )
    return full, rest, floats.add_products(kind, rows)


@functools.cache
def vector_rows(kind: Kind) -> Rows:
    """Return the micro-kernel of one vector; x: what the kernels of `activations` make of it."""
    blocks = BLOCKS if kind.quads > 0 else 1
    at_once, length = stretches(kind.integers), simd.BLOCK_BYTES * blocks
    (load_scales, load_zeros), (tail_scales, tail_zeros), add = _operations(kind, at_once)
    no_totals, store_sums = vectors.zeros_of(at_once), vectors.store_sums(1, at_once)
    load_full, load_tail = (
        vectors.load_words(at_once, blocks, full=True),
        vectors.load_words(at_once, blocks),
    )
    prefetch_rows = vectors.prefetch_lines(at_once, blocks)

    # In one kernel: each call of another would take the product and its vectors through memory.
    @kernel
    def rows(job: Product, first: int, end: int) -> None:
        whole, left = job.row_bytes // length, job.row_bytes % length
        full, groups = (end - first) // at_once, max(job.scale_step, 1)
        for number in range(end - first - full * (at_once - 1)):
            # What is left when all stretches are as long are single rows, which meet themselves.
            step = full if number < full else 0
            row = first + number + (0 if number < full else full * (at_once - 1))
            start, code_step = job.codes + row * job.row_bytes, step * job.row_bytes
            place, scale_step = row * job.scale_step, step * job.scale_step
            totals = no_totals()
            for i in range(whole):
                at, group = start + length * i, _index(job.first, blocks * i)
                prefetch_rows(at + AHEAD_BYTES, code_step)
                words, lanes = load_full(at, code_step, length), job.lanes + length * i
                index, count = place + group, groups - group
                scales = load_scales(job.scales, index, scale_step, count, lanes)
                zeros = load_zeros(job.zeros, index, scale_step, count, lanes)
                totals = add(totals, scales, zeros, words, job.x + i * job.x_step, job.lowest)
            if left > 0:
                at, group = start + length * whole, _index(job.first, blocks * whole)
                words, lanes = load_tail(at, code_step, left), job.lanes + length * whole
                index, count = place + group, groups - group
                scales = tail_scales(job.scales, index, scale_step, count, lanes)
                zeros = tail_zeros(job.zeros, index, scale_step, count, lanes)
                totals = add(totals, scales, zeros, words, job.x + whole * job.x_step, job.lowest)
            store_sums(totals, job.y + 4 * row, 4 * step)

    return Rows(rows)


@functools.cache
def columns_rows(kind: Kind, columns: int) -> Rows:
    """Return the micro-kernel of panels of a few columns, four rows at a time.

    x is taken in chunks that stay in L1 while all rows of a share pass; the totals wait in memory
    between two chunks.
    """
    load_scales, load_zeros = numbers_of(kind, simd.ROWS, full=False)
    if kind.integers:
        add = add_integer_products(kind.bits, columns, kind.has_zeros, floats=kind.floats)
    else:
        add = floats.add_columns(kind, columns)
    count = simd.ROWS * columns
    load_totals, store_totals = vectors.load_totals(count), vectors.store_totals(count)
    store_sums, load_tail = vectors.store_sums(columns), vectors.load_words()
    prefetch_rows = vectors.prefetch_lines(simd.ROWS)

    @kernel
    def tiles(job: Product, first: int, end: int) -> None:
        blocks, groups = (job.row_bytes + 63) // 64, max(job.scale_step, 1)
        chunk = max(1, CHUNK_BYTES // job.x_step)
        full, left = (end - first) // 4, (end - first) % 4
        kept = np.empty((full + left) * count * 16, np.float32)
        for panel in range(job.columns // columns):
            kept[:] = 0
            for low in range(0, blocks, chunk):
                high = min(blocks, low + chunk)
                for quad in range(full + left):
                    step = 1 if quad < full else 0  # 0: one row, four times
                    row = first + (4 * quad if quad < full else 3 * full + quad)
                    code_step, scale_step = step * job.row_bytes, step * job.scale_step
                    place = kept.ctypes.data + quad * count * 64
                    totals = load_totals(place)
                    for block in range(low, high):
                        at = job.codes + row * job.row_bytes + 64 * block
                        if panel == 0:
                            prefetch_rows(at + 64 * chunk, code_step)
                        words = load_tail(at, code_step, job.row_bytes - 64 * block)
                        group = _index(job.first, block)
                        index = row * job.scale_step + group
                        some, lanes = groups - group, job.lanes + 64 * block
                        scales = load_scales(job.scales, index, scale_step, some, lanes)
                        zeros = load_zeros(job.zeros, index, scale_step, some, lanes)
                        x = job.x + (panel * blocks + block) * job.x_step
                        totals = add(totals, scales, zeros, words, x, job.lowest)
                    if high == blocks:
                        y = job.y + 4 * (row * job.columns + panel * columns)
                        store_sums(totals, y, 4 * step * job.columns)
                    else:
                        store_totals(totals, place)

    return Rows(tiles)


def _columns(parts: Stored, columns: int, *, integers: bool) -> Way:
    """Return how a matrix is multiplied by `columns` columns at once, as they are or rounded."""
    blocks = blocks_of(parts.n, parts.bits, parts.group)
    kind = kind_of(parts, integers=integers)
    x_step = columns * (record_bytes(parts.bits) if integers else 4 * blocks.columns)
    make = activations.quantise_kernel if integers else activations.arrange_kernel
    return Way(
        rows=vector_rows(kind) if columns == 1 else columns_rows(kind, columns),
        product=_product_by(parts, blocks, x_step=x_step),
        kept=blocks,
        unit=simd.ROWS,
        panel=columns,
        panel_bytes=blocks.count * x_step,
        prepare=by_kernel(make(parts.bits, columns), turned=True),
        padded=True,
        most_rows=max(simd.ROWS, SHARE_BYTES // parts.row_bytes & -simd.ROWS),
        alone_below=SERIAL_BYTES * columns,
    )


float_columns, integer_columns = (
    functools.partial(_columns, integers=rounded) for rounded in (False, True)
)


def _product_by(parts: Stored, blocks: Blocks, **given: int) -> Product:
    return product_of(parts, first=address(blocks.first), lanes=address(blocks.lanes), **given)


def along(parts: Stored, integers: bool, shares_per_thread: int, now: tuple[int, int]) -> Steps:
    """Return the product of one vector along the rows, as it is or rounded to 8 bits.

    now: by which threads, of which pool.
    """
    blocks = blocks_of(parts.n, parts.bits, parts.group)
    lifted = None if integers else parts.kept(lifted_zeros)
    quads = quad_pieces(parts.n, parts.bits, parts.group) if integers else 0
    count, vectors = blocks.count, vectors_of(quads)
    if quads > 0:
        count, x_step = -(-count // BLOCKS), quad_record_bytes(vectors)
        zero = FLOAT_ZERO if scale_dtype_of(parts) in FLOAT4 else 2 ** (parts.bits - 1)
        prepare = activations.quantise_quads_kernel(vectors, zero)
    elif integers:
        x_step = record_bytes(parts.bits)
        prepare = activations.quantise_kernel(parts.bits)
    else:
        x_step = 4 * blocks.columns
        prepare = activations.arrange_kernel(parts.bits, words=by_words(blocks.pieces))
    zeros = parts.zeros_address if lifted is None else lifted.place
    product = _product_by(parts, blocks, x_step=x_step, zeros=zeros)
    kind = kind_of(parts, integers=integers, lifted=lifted is not None, quads=quads)
    shares = share_count(parts.codes.nbytes, parts.m, shares_per_thread)
    told = product._asdict() | {"x": buffer(), "y": Y}
    return Steps(
        [Step(_product.share_address(), shares)],
        (*told.values(), 1, shares, vector_rows(kind).entry),
        buffer_bytes=count * x_step,
        prepare=Prepare(prepare, parts.n),
        kept=(blocks, lifted),
    )


def bind_vector(*, integers: bool) -> Callable[[Problem, Params], Run]:
    """Return the `bind` of a rung for one vector of float32, rounded to 8 bits where `integers`.

    An x that holds NaN or infinity is multiplied as it is.
    """

    def bind(problem: Problem, params: Params) -> Run:
        shares = int(params["shares_per_thread"])

        def core(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
            places = 0, address(x), address(y)
            if not parts.kept(along, integers, shares, team())(*places):
                parts.kept(along, False, shares, team())(*places)

        return bound(core, "float32")

    return bind


def job_of_vector(*, integers: bool) -> Callable[..., Job | None]:
    """Return the `job` of such a rung: what a builtin function is bound to."""

    def job(problem: Problem, params: Params, matrix: QuantizedMatrix, x: Any) -> Job | None:
        if not takes_floats(problem, matrix):
            return None
        shares = int(params["shares_per_thread"])
        return matrix.kept(stored).kept(along, integers, shares, team()).job()

    return job
