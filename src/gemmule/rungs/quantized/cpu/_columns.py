"""Host side of the products across stored rows: results in parts, one for each thread."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cpu.jit import thread_count
from gemmule.backends.cpu.simd import LANES, ROWS
from gemmule.rungs.quantized.cpu._operands import (
    SERIAL_BYTES,
    Stored,
    address,
    blocks_of,
    scale_dtype_of,
)
from gemmule.rungs.quantized.cpu._plain_kernels import kind_of, matrix_of
from gemmule.rungs.quantized.cpu._plain_spread import panel_kernel, panel_threaded_kernel
from gemmule.rungs.quantized.cpu._transposed_kernels import PanelsJob, panels_kernels


def part_count(parts: Stored, *, threads: bool = True) -> int:
    """Return into how many shares the stored rows are split: one for each thread that pays."""
    if not threads or parts.codes.nbytes < SERIAL_BYTES:
        return 1
    return max(1, min(thread_count(), parts.m // (2 * ROWS)))


def spread_rows(parts: Stored, x: NDArray[Any], y: NDArray[Any]) -> None:
    """Set ``y = A^T x`` in vector registers; x: (m,), y: (n,) float32."""
    blocks = blocks_of(parts.n, parts.bits, parts.group)
    shares = part_count(parts)
    results = np.zeros((shares, blocks.count, blocks.columns), np.float32)
    job = PanelsJob(
        codes=address(parts.codes),
        row_bytes=parts.row_bytes,
        m=parts.m,
        scales=address(parts.scales),
        zeros=parts.zeros_address,
        scale_step=parts.scale_step,
        groups=max(parts.scale_step, 1),
        first=address(blocks.first),
        lanes=address(blocks.lanes),
        x=address(quads := _quads(x)),
        y=address(results),
        block_step=results.strides[1],
        part_bytes=results.strides[0],
    )
    kernels = panels_kernels(
        parts.bits, blocks.per_lane, scale_dtype_of(parts), parts.zeros is not None
    )
    if shares == 1:
        kernels.serial(job, 0, quads.shape[0], job.y)
    else:
        kernels.threaded(job, shares)
    total = results.sum(axis=0) if shares > 1 else results[0]
    width = blocks.columns // LANES
    in_order = total.reshape(blocks.count, width, LANES).transpose(0, 2, 1).reshape(-1)
    y[...] = in_order[: parts.n]


def _quads(x: NDArray[Any]) -> NDArray[Any]:
    """Return x in fours, and what is left over as single elements with three zeros each."""
    full = x.size // ROWS
    left = x.size - full * ROWS
    quads = np.zeros((full + left, ROWS), np.float32)
    quads[:full] = x[: full * ROWS].reshape(full, ROWS)
    quads[full:, 0] = x[full * ROWS :]
    return quads


def spread_rows_plainly(parts: Stored, x: NDArray[Any], y: NDArray[Any], *, threads: bool) -> None:
    """Set ``y = A^T x`` in plain loops, in the dtype of x and y (float32 or float64)."""
    kind = kind_of(parts, str(x.dtype.name))
    shares = part_count(parts, threads=threads)
    sides = 8 // parts.bits
    results = np.zeros((shares, sides, -(-parts.n // sides)), x.dtype)
    even, side_bytes = address(results), results.strides[1] if sides == 2 else 0
    matrix = matrix_of(parts)
    if shares == 1:
        panel_kernel(kind)(matrix, address(x), even, even + side_bytes, 0, parts.m)
    else:
        panel_threaded_kernel(kind)(
            matrix, address(x), even, even + side_bytes, results.strides[0], shares
        )
    total = results.sum(axis=0)
    for side in range(sides):
        y[side::sides] = total[side, : y[side::sides].size]
