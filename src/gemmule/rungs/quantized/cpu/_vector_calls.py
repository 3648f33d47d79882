"""The product with one vector as a call: x put in order, then shares of the rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import packed, unpacked
from gemmule.backends.cpu.intrinsics import enter, load
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.shares import run_shares
from gemmule.rungs.quantized.cpu._activations import (
    arrange_vector_kernel,
    quantise_quads_kernel,
    quantise_vector_kernel,
)
from gemmule.rungs.quantized.cpu._narrow_ops import by_words
from gemmule.rungs.quantized.cpu._quad_ops import vectors_of
from gemmule.rungs.quantized.cpu._vector_kernels import RowsJob, rows_kernels

_number = load("int64", "int64")


class VectorKernels(NamedTuple):
    """The product with one vector, and the address of what computes a share of it.

    on_arrays: the product, given x and y as arrays, which costs a call half a microsecond less than
    to find where they lie. rows: the entry of the kernel that a share calls. job: for a `Job`
    (`calls.builtin`), with words (pool, helpers, share, matrix, n, shares, bytes of room).
    """

    product: Kernel
    on_arrays: Kernel
    share: int
    rows: int
    job: Kernel


def _job(product: Kernel) -> Kernel:
    """Return `VectorKernels.job`."""
    load_head = unpacked(7)

    @kernel
    def job(at: int, A: int, x: int, y: int) -> Any:
        pool, helpers, task, matrix, n, shares, x_bytes = load_head(at)
        room = np.zeros(x_bytes, np.uint8)
        place = (room.ctypes.data + 63) // 64 * 64
        strange = product(pool, helpers, task, matrix, place, x, y, n, shares)
        room[0] = 0  # Numba frees it behind the place that names it last
        return strange

    return job


@functools.cache
def vector_kernels(
    bits: int,
    pieces: int,
    scale_dtype: str,
    has_zeros: bool,
    integers: bool,
    lifted: bool = False,
    quads: int = 0,
) -> VectorKernels:
    """Return the kernels for one vector, which they put in the order of the lanes themselves.

    The product is called with (pool, helpers, share, matrix, room, x, y, n, shares): what
    `helpers_and_pool` returned, the share's address, that of the matrix's part of a `RowsJob`, as
    64-bit numbers with the step of x and `rows` behind them, and those of zero-filled room for x,
    of x and of y. One call from Python, with plain numbers: a tuple costs 9 us more when nothing is
    cached. Returns not 0, with nothing done, for an x that cannot be rounded.
    """
    rows = rows_kernels(bits, 1, pieces, scale_dtype, has_zeros, integers, lifted, quads).rows
    if quads > 0:
        prepare = quantise_quads_kernel(vectors_of(quads))
    else:
        words = by_words(pieces)
        prepare = quantise_vector_kernel(bits) if integers else arrange_vector_kernel(bits, words)

    @kernel
    def product(
        pool: int,
        helpers: int,
        task: int,
        matrix: int,
        room: int,
        x: int,
        y: int,
        n: int,
        shares: int,
    ) -> Any:
        strange = prepare(x, n, room)
        if strange == 0:
            run_shares(pool, helpers, task, packed((matrix, room, y, shares)), shares)
        return strange

    @kernel
    def on_arrays(
        pool: int,
        helpers: int,
        task: int,
        matrix: int,
        room: int,
        x: Any,
        y: Any,
        n: int,
        shares: int,
    ) -> Any:
        return product(pool, helpers, task, matrix, room, x.ctypes.data, y.ctypes.data, n, shares)

    entry = rows.entry(RowsJob, int, int)
    return VectorKernels(product, on_arrays, _share_of.address(2), entry, _job(product))


@kernel
def _share_of(words: int, share: int) -> None:
    at, room = _number(words, 0), _number(words, 1)
    y, shares = _number(words, 2), _number(words, 3)
    job = RowsJob(
        _number(at, 0),
        _number(at, 1),
        _number(at, 2),
        _number(at, 3),
        _number(at, 4),
        _number(at, 5),
        _number(at, 6),
        _number(at, 7),
        _number(at, 8),
        room,
        _number(at, 9),
        1,
        y,
        4,
        4,
        _number(at, 11),
    )
    low, high = share * job.m // shares, (share + 1) * job.m // shares
    enter(_number(at, 10), (job, low, high))
