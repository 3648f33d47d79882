"""Products of sixteen rows at a time with a few columns of 8-bit activations."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gemmule.backends.cpu.intrinsics import load, prefetch, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import Pooled
from gemmule.backends.cpu.simd import LANES
from gemmule.rungs.quantized.cpu._integers import ACTIVATION_GROUP
from gemmule.rungs.quantized.cpu._row_ops import zeros_of
from gemmule.rungs.quantized.cpu._tasks import in_tasks
from gemmule.rungs.quantized.cpu._tile_ops import (
    RECORD_BYTES,
    TILE_COLUMNS,
    add_columns,
    add_scaled,
    add_tile,
    chunk_columns,
    chunk_records,
    decode_chunk,
    plane_bytes,
    quantise_block,
    transpose_chunk,
)

_get = load("float32", "float32")
_put = store("float32", "float32")
_put_long = store("int64", "int64")


class TileJob(NamedTuple):
    """What a product works on: addresses, steps in bytes, counts.

    x holds for every sixteen columns of the result one record for each 32 columns of the matrix,
    `panel_bytes` in all. chunks_per_group: chunks that share scales; `scale_step` elements from one
    row's scales to the next row's.
    """

    codes: int
    row_bytes: int
    m: int
    scales: int
    zeros: int
    scale_step: int
    chunks_per_group: int
    x: int
    panel_bytes: int
    y: int
    columns: int


@functools.cache
def tile_kernels(bits: int, scale_dtype: str, has_zeros: bool) -> Pooled:
    """Return the tasks of products with one kind of matrix."""
    transpose, add = transpose_chunk(bits), add_tile(bits, has_zeros)
    scale = load(scale_dtype, "float32")
    chunk_bytes_of_x, planes_size = chunk_records(bits) * RECORD_BYTES, plane_bytes(bits)

    @kernel
    def tiles(job: TileJob, first: int, end: int) -> None:
        chunks = (job.row_bytes + 63) // 64
        halves = (job.columns + TILE_COLUMNS - 1) // TILE_COLUMNS
        totals = np.empty(halves * TILE_COLUMNS * LANES + 2 * LANES, np.float32)
        planes = np.empty(planes_size + 64, np.uint8)
        at_totals, at_planes = totals.ctypes.data, (planes.ctypes.data + 63) // 64 * 64
        at_scales = at_totals + 4 * halves * TILE_COLUMNS * LANES
        at_zeros = at_scales + 4 * LANES
        for row in range(first, end, LANES):
            last = min(LANES, end - row) - 1
            totals[:] = 0
            for chunk in range(chunks):
                at = job.codes + row * job.row_bytes + 64 * chunk
                for i in range(LANES):
                    prefetch(at + LANES * job.row_bytes + i * job.row_bytes)
                if chunk % job.chunks_per_group == 0:
                    group = chunk // job.chunks_per_group
                    for i in range(LANES):
                        place = (row + min(i, last)) * job.scale_step + group
                        _put(at_scales, i, scale(job.scales, place))
                        if has_zeros:
                            _put(at_zeros, i, _get(job.zeros, place))
                transpose(at, job.row_bytes, last, job.row_bytes - 64 * chunk, at_planes)
                x = job.x + chunk * chunk_bytes_of_x
                for half in range(halves):
                    add(
                        at_planes,
                        x + half // 2 * job.panel_bytes + half % 2 * 4 * TILE_COLUMNS,
                        at_scales,
                        at_zeros,
                        at_totals + half * TILE_COLUMNS * 64,
                    )
            for i in range(last + 1):
                for c in range(job.columns):
                    _put(job.y, (row + i) * job.columns + c, totals[c * LANES + i])
        totals[0] = planes[0] = 0  # Numba frees an array behind the place that names it last

    return in_tasks(tiles, TileJob)


@functools.cache
def float_tile_kernels(bits: int, columns: int, scale_dtype: str, has_zeros: bool) -> Pooled:
    """Return the kernels for float activations, `columns` of them to a panel.

    x: for every panel ``(chunks * columns of a chunk, columns)`` floats; y: ``(m, panels *
    columns)``, so that no column is left over.
    """
    decode, add, put_scaled = decode_chunk(bits), add_columns(columns), add_scaled(columns)
    no_sums, scale = zeros_of(columns), load(scale_dtype, "float32")
    width = chunk_columns(bits)
    fixed_zero = np.float32(2 ** (bits - 1))

    @kernel
    def tiles(job: TileJob, first: int, end: int) -> None:
        chunks, panels = (job.row_bytes + 63) // 64, job.columns // columns
        totals = np.empty(job.columns * LANES + 64, np.float32)
        weights = np.empty(64 * width + 64, np.uint8)
        place = (totals.ctypes.data + 63) // 64 * 64  # last row, zero points, then totals
        at_zeros, at_totals = place + 64, place + 128
        at_weights = (weights.ctypes.data + 63) // 64 * 64
        scales = np.empty(LANES, np.float32)
        at_scales = scales.ctypes.data
        for i in range(LANES):
            _put(at_zeros, i, fixed_zero)
        for row in range(first, end, LANES):
            last = min(LANES, end - row) - 1
            _put_long(place, 0, last)
            for i in range(job.columns * LANES):
                _put(at_totals, i, np.float32(0))
            for chunk in range(chunks):
                at = job.codes + row * job.row_bytes + 64 * chunk
                for i in range(LANES):
                    prefetch(at + LANES * job.row_bytes + i * job.row_bytes)
                if chunk % job.chunks_per_group == 0:
                    group = chunk // job.chunks_per_group
                    for i in range(LANES):
                        index = (row + min(i, last)) * job.scale_step + group
                        _put(at_scales, i, scale(job.scales, index))
                        if has_zeros:
                            _put(at_zeros, i, _get(job.zeros, index))
                decode(at, job.row_bytes, place, job.row_bytes - 64 * chunk, at_weights)
                for panel in range(panels):
                    x = job.x + panel * job.panel_bytes + chunk * width * columns * 4
                    sums = no_sums()
                    for k in range(0, width, 4):
                        sums = add(sums, at_weights + 64 * k, x + 4 * columns * k)
                    put_scaled(sums, at_scales, at_totals + 64 * columns * panel)
            for i in range(last + 1):
                for c in range(job.columns):
                    value = _get(at_totals, c * LANES + i)
                    _put(job.y, (row + i) * job.columns + c, value)
        totals[0] = weights[0] = scales[0] = 0  # Numba frees an array that nothing names any more

    return in_tasks(tiles, TileJob)


@functools.cache
def quantise_tile_kernel(bits: int, has_zeros: bool) -> Kernel:
    """Return ``f(x, n, columns, out, panel_bytes)``: all records of x, (n, columns) float32.

    out: zero-filled; records behind the last column of the matrix are left as they are.
    """
    block = quantise_block(bits, has_zeros)

    @kernel
    def quantise(x: int, n: int, columns: int, out: int, panel_bytes: int) -> None:
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

    return quantise
