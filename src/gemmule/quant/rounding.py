"""The arithmetic of quantisation: from weights to scales, zero points and codes, and back.

Everything works on blocks of whole rows, row-major, of a matrix ``(r, n)``, or on their groups,
``(r, n_groups, columns of a group)``. Numbers that belong to a group come as ``(r, n_groups)``, or
``(r, 1)`` / ``(1, 1)`` where a group is a whole row or the whole matrix. What makes codes is
written once for NumPy, PyTorch and CuPy; `decode` is NumPy's alone.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.quant.library import Array, library_of

Floats: TypeAlias = NDArray[np.floating[Any]]
GroupSize: TypeAlias = int | None

_TILE_COLUMNS = 128


def group_count(n: int, group_size: GroupSize) -> int:
    """Return the number of groups along a row of ``n`` columns; 1 for -1 and None."""
    return 1 if group_size is None or group_size == -1 else -(-n // group_size)


def group_columns(n: int, group_size: GroupSize) -> int:
    """Return how many of ``n`` columns a group has that is not cut short; all for -1 and None."""
    return n if group_size is None or group_size == -1 else min(group_size, n)


def compute_block(W: Array, rows: slice, order: Array | None) -> Array:
    """Return rows of W, columns in stored order, row-major and native, float64 or else float32."""
    block = W[rows] if order is None else W[rows][:, order]
    compute = "float64" if W.dtype.itemsize == 8 else "float32"
    ours = isinstance(block, np.ndarray)
    if not ours or _runs_along_rows(block):
        return library_of(block).dense(block, compute)
    # Column-major: copied tile by tile, so that the lines a tile touches stay in the L1 cache.
    copied: Floats = np.empty(block.shape, compute)
    for start in range(0, block.shape[1], _TILE_COLUMNS):
        columns = slice(start, start + _TILE_COLUMNS)
        copied[:, columns] = block[:, columns]
    return copied


def _runs_along_rows(block: Floats) -> bool:
    return abs(block.strides[1]) <= abs(block.strides[0])


def grouped(block: Array, group_size: GroupSize) -> Array:
    """Return ``(r, n)``, n > 0, as its groups; a short last one is filled up with zeros."""
    r, n = block.shape
    step = group_columns(n, group_size)
    if n % step:
        xp = library_of(block).xp
        block = xp.concatenate((block, xp.zeros_like(block[:, : step - n % step])), 1)
    return block.reshape(r, -1, step)


def limits(groups: Array) -> tuple[Array, Array]:
    """Return each group's least and greatest element, as float64.

    A group that holds a NaN or an infinity shows it in one of its limits.
    """
    library = library_of(groups)
    low, high = library.xp.amin(groups, -1), library.xp.amax(groups, -1)
    return library.cast(low, "float64"), library.cast(high, "float64")


def refuse_non_finite(low: Array, high: Array, groups: Array, first_row: int, order: Any) -> None:
    """Raise ValueError, naming the place in W, where the groups' limits are not finite."""
    xp = library_of(low).xp
    if bool((xp.isfinite(low) & xp.isfinite(high)).all()):
        return
    row, group, at = (int(i) for i in xp.argwhere(~xp.isfinite(groups))[0])
    column = group * groups.shape[2] + at
    place = first_row + row, column if order is None else int(order[column])
    raise non_finite(place, float(groups[row, group, at]))


def non_finite(place: tuple[int, int], value: float) -> ValueError:
    """Return the error for a weight that has no code."""
    return ValueError(
        f"W[{place[0]}, {place[1]}] is {value}, but only finite weights have codes: "
        "replace it first, for example with numpy.nan_to_num"
    )


def exact_scales(low: Array, high: Array, bits: int, symmetric: bool) -> Array:
    """Return the least float64 scales for which the limits fit the codes.

    The limits are widened to include 0 first. Without zero points the codes reach from
    ``-2^(bits-1)`` to ``2^(bits-1) - 1`` scales, so both are measured apart. Overflow gives
    infinity. A group of zeros gets 0: by another scale a sum of codes, and what takes their zero
    point off again, cancel but for rounding.
    """
    xp = library_of(low).xp
    low, high = xp.clip(low, None, 0.0), xp.clip(high, 0.0, None)
    if symmetric:
        half = 2 ** (bits - 1)
        return xp.maximum(high / (half - 1), low / -half)
    return (high - low) / (2**bits - 1)


def round_up(scales: Array, dtype_name: str) -> Array:
    """Convert float64 numbers that are not negative to a narrower dtype, rounding towards infinity.

    A scale that is never smaller than the exact one keeps every weight within half a step of a
    code: rounded to nearest, the ends of a group could be clamped by more.
    """
    library = library_of(scales)
    rounded = library.cast(scales, dtype_name)
    below = library.cast(rounded, "float64") < scales
    # The next float above a finite positive one has the next bit pattern.
    pattern = f"int{8 * rounded.dtype.itemsize}"
    patterns = rounded.view(library.dtype(pattern))
    patterns += library.cast(below, pattern)
    return rounded


def zero_points(low: Array, scales: Array) -> Array:
    """Return the codes, 0 .. 2^bits - 1, that stand for weight 0."""
    library = library_of(low)
    below = abs(library.xp.clip(low, None, 0.0))
    return library.cast(
        library.xp.round(below / divisors(library.cast(scales, "float64"))), "float32"
    )


def steps(
    groups: Array, scales: Array, zeros: Array | float, bits: int, whole_zeros: bool = True
) -> Array:
    """Return the codes of groups as floats: ``round(w / scale) + zero``, clamped to the bits.

    Ties go to even; the arithmetic is that of ``groups``' dtype. Zero points that are no integers
    (``whole_zeros`` False) are added before rounding.
    """
    xp = library_of(groups).xp
    codes = groups / divisors(spread(scales, groups))
    if not whole_zeros:
        codes += spread(zeros, groups)
    xp.round(codes, out=codes)
    if whole_zeros:
        codes += spread(zeros, groups)
    return xp.clip(codes, 0, 2**bits - 1, out=codes)


def divisors(scales: Array) -> Array:
    """Return what weights are divided by: their scales, but 1 for groups of zeros."""
    xp = library_of(scales).xp
    return xp.where(scales == 0, xp.ones_like(scales), scales)


def spread(values: Array | float, groups: Array) -> Array | float:
    """Return numbers ``(r, n_groups)`` in the groups' dtype, ready to meet their elements."""
    if isinstance(values, float):
        return values
    return library_of(groups).cast(values, dtype_name(groups))[..., None]


def dtype_name(array: Array) -> str:
    """Return the name of a native dtype, of a NumPy array or another library's."""
    dtype = array.dtype
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        return str(dtype)
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


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
    if group_size is None or values.ndim == 0 or values.shape[1] <= 1:  # of a row, too
        return values
    return np.repeat(values, group_size, axis=1)[:, :n]
