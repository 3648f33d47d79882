"""The arithmetic of quantisation: from weights to scales, zero points and codes, and back.

Everything here works on a block of whole rows, row-major, of a matrix ``(r, n)``. Numbers that
belong to a group come as ``(r, n_groups)``, or ``(r, 1)`` / ``(1, 1)`` where a group is a whole row
or the whole matrix.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.quant.files import named_dtype
from gemmule.quant.layouts import row_blocks

Floats: TypeAlias = NDArray[np.floating[Any]]
GroupSize: TypeAlias = int | None

_TILE_COLUMNS = 128


def group_count(n: int, group_size: GroupSize) -> int:
    """Return the number of groups along a row of ``n`` columns; 1 for -1 and None."""
    return 1 if group_size is None or group_size == -1 else -(-n // group_size)


def group_limits(block: Floats, group_size: GroupSize) -> tuple[Floats, Floats]:
    """Return each group's least and greatest element, widened to include 0, as float64.

    A group that holds a NaN or an infinity shows it in one of its limits. ``block`` must have at
    least one column.
    """
    n = block.shape[1]
    step = n if group_size is None or group_size == -1 else group_size
    starts = np.arange(0, n, step)
    low = np.minimum.reduceat(block, starts, axis=1).astype(np.float64)
    high = np.maximum.reduceat(block, starts, axis=1).astype(np.float64)
    return np.minimum(low, 0.0), np.maximum(high, 0.0)


def compute_block(W: NDArray[Any], rows: slice, order: NDArray[np.int32] | None) -> Floats:
    """Return rows of W, columns in stored order, row-major and native, float64 or else float32."""
    block = W[rows] if order is None else W[rows, order]
    compute = np.float64 if W.dtype.itemsize == 8 else np.float32
    if block.shape[1] <= _TILE_COLUMNS or abs(block.strides[1]) <= abs(block.strides[0]):
        return np.ascontiguousarray(block, dtype=compute)
    # Column-major: copied tile by tile, so that the lines a tile touches stay in the L1 cache.
    copied: Floats = np.empty(block.shape, compute)
    for start in range(0, block.shape[1], _TILE_COLUMNS):
        columns = slice(start, start + _TILE_COLUMNS)
        copied[:, columns] = block[:, columns]
    return copied


def matrix_limits(
    W: NDArray[Any], group_size: int | None, order: NDArray[np.int32] | None
) -> tuple[Floats, Floats]:
    """Return each group's limits, float64 ``(m, n_groups)`` or ``(1, 1)``; refuse NaN and Inf."""
    m, n = W.shape
    low, high = np.zeros((2, m, group_count(n, group_size)))
    for rows in row_blocks(m, n):
        block = compute_block(W, rows, order)
        low[rows], high[rows] = group_limits(block, group_size)
        if not np.isfinite(low[rows]).all() or not np.isfinite(high[rows]).all():
            row, column = (int(i) for i in np.argwhere(~np.isfinite(block))[0])
            place = f"{rows.start + row}, {column if order is None else order[column]}"
            raise ValueError(
                f"W[{place}] is {block[row, column]}, but only finite weights have codes: "
                "replace it first, for example with numpy.nan_to_num"
            )
    if group_size is None:
        return low.min(keepdims=True, initial=0.0), high.max(keepdims=True, initial=0.0)
    return low, high


def exact_scales(low: Floats, high: Floats, bits: int, symmetric: bool) -> Floats:
    """Return the least float64 scales for which the limits fit the codes; 1 for a group of zeros.

    Without zero points the codes reach from ``-2^(bits-1)`` to ``2^(bits-1) - 1`` scales, so the
    two limits are measured apart. Overflow gives infinity.
    """
    with np.errstate(over="ignore"):
        if symmetric:
            half = 2 ** (bits - 1)
            scales: Floats = np.maximum(high / (half - 1), low / -half)
        else:
            scales = (high - low) / (2**bits - 1)
    scales[(low == 0) & (high == 0)] = 1.0
    return scales


def round_up(scales: Floats, dtype_name: str) -> Floats:
    """Convert positive float64 numbers to a narrower dtype, rounding towards infinity.

    A scale that is never smaller than the exact one keeps every weight within half a step of a
    code: rounded to nearest, the ends of a group could be clamped by more.
    """
    dtype = named_dtype(dtype_name)
    with np.errstate(over="ignore", under="ignore"):
        rounded = scales.astype(dtype)
    below = rounded.astype(np.float64) < scales
    # The next float above a finite positive one has the next bit pattern.
    patterns = rounded.view(np.dtype(f"u{dtype.itemsize}"))
    patterns[below] += 1
    return rounded


def zero_points(low: Floats, scales: Floats) -> NDArray[np.float32]:
    """Return the codes, 0 .. 2^bits - 1, that stand for weight 0; ``low`` is 0 or below."""
    zeros: NDArray[np.float32] = np.rint(np.abs(low) / scales.astype(np.float64)).astype(np.float32)
    return zeros


def encode(
    block: Floats, scales: Floats, zeros: Floats | float, bits: int, group_size: GroupSize
) -> NDArray[np.uint8]:
    """Return codes ``(r, n)``: ``round(w / scale) + zero``, ties to even, clamped to the bits.

    The arithmetic is that of ``block``'s dtype.
    """
    n = block.shape[1]
    steps = np.divide(block, per_column(scales.astype(block.dtype), n, group_size))
    np.rint(steps, out=steps)
    steps += per_column(np.asarray(zeros, block.dtype), n, group_size)
    np.clip(steps, 0, 2**bits - 1, out=steps)
    return steps.astype(np.uint8)


def decode(
    codes: NDArray[np.uint8],
    scales: Floats,
    zeros: Floats | float,
    group_size: GroupSize,
    dtype: np.dtype[Any],
) -> Floats:
    """Return weights ``scale * (code - zero)`` of shape ``(r, n)``, computed in float ``dtype``.

    The subtraction is one of floats: in 8-bit integers ``code - zero`` would wrap.
    """
    n = codes.shape[1]
    weights = codes.astype(dtype)
    weights -= per_column(np.asarray(zeros, dtype), n, group_size)
    weights *= per_column(scales.astype(dtype), n, group_size)
    return weights


def per_column(values: Floats, n: int, group_size: GroupSize) -> Floats:
    """Spread one number per group over the group's columns; one number for all stays one."""
    if group_size is None or group_size == -1 or values.ndim == 0 or values.shape[1] <= 1:
        return values
    return np.repeat(values, group_size, axis=1)[:, :n]
