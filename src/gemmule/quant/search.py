"""Searching scales and zero points that fit groups better than those of their extremes.

`fit` finds them by one of `METHODS`, for the groups of some rows, or for one group that is the
whole matrix and is read piece by piece. What is made small is ``sum(importance * (w - w')^2)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemmule.quant import rounding
from gemmule.quant.library import Array, library_of

METHODS = ("rtn", "mse", "hqq")  # of `fit`

SHRINKS = tuple(1 - step / 40 for step in range(17))  # of the range, for "mse"; 1 comes first
STARTS = (1.0, 0.925, 0.85, 0.775, 0.7)  # of the range, for "hqq"
TURNS = 5  # of codes and closed-form scales and zero points, from each start
LEAST_SCALE = 2.0**-126
FINEST = 2.0**-16  # scale over the largest weight: with less, zero points would hide the codes

Piece = tuple[Array, Array | None]
Zeros = Array | float


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `gemmule.quantize` is asked for, checked; importance in the order of stored columns."""

    bits: int
    group_size: int | None
    symmetric: bool
    scale_dtype: str
    method: str
    perm: NDArray[np.int32] | None
    importance: NDArray[np.float64] | None


@dataclass(frozen=True, slots=True)
class Task:
    """Groups that need scales.

    `pieces` yields ``(groups, importance or None)``: one piece, or, when `whole`, the pieces that
    make up a single group.
    """

    pieces: Callable[[], Iterator[Piece]]
    bits: int
    symmetric: bool
    scale_dtype: str
    whole: bool = False

    def total(self, of: Callable[[Array, Array | None], Array]) -> Array:
        """Return sums ``(..., r, n_groups)`` over the groups, ``(..., 1, 1)`` when `whole`."""
        found = [of(*piece) for piece in self.pieces()]
        if not self.whole:
            return found[0]
        return sum(part.sum(axis=(-2, -1), keepdims=True) for part in found)

    def rounded_up(self, scales: Array) -> Array:
        """Return float64 scales in the dtype that they are stored in."""
        return rounding.round_up(scales, self.scale_dtype)


def fit(task: Task, method: str, low: Array, high: Array) -> tuple[Array, Zeros]:
    """Return scales in their dtype and zero points (float32; a number when symmetric).

    low, high: the groups' least and greatest weights, float64.
    """
    exact = rounding.exact_scales(low, high, task.bits, task.symmetric)
    scales = task.rounded_up(exact)
    zeros = 2.0 ** (task.bits - 1) if task.symmetric else rounding.zero_points(low, scales)
    if method == "rtn":
        return scales, zeros
    if method == "mse":  # what overflows is no improvement
        return _shrunk(task, exact, zeros), zeros
    return _alternated(task, low, high, scales, zeros)


def squared_error(piece: Piece, codes: Array, scales: Array, zeros: Zeros) -> Array:
    """Return each group's ``sum(importance * (w - w')^2)``; `codes` as floats."""
    groups, importance = piece
    off = codes - rounding.spread(zeros, groups)
    off *= rounding.spread(scales, groups)
    off -= groups
    off *= off
    return weighted(off, importance)


def weighted(values: Array, importance: Array | None) -> Array:
    """Return the sum of each group's values, times their importance where there is one.

    Summed in float64: whatever the order, no two ranges of a group change places.
    """
    library = library_of(values)
    return (values if importance is None else values * importance).sum(
        -1, dtype=library.dtype("float64")
    )


def error_ratio(wrong: float, norm: float) -> float | None:
    """Return the error of a matrix from its sums of squares, None where these overflow."""
    if not np.isfinite([wrong, norm]).all():
        return None
    return float(wrong / norm) ** 0.5 if norm else 0.0


def _shrunk(task: Task, exact: Array, zeros: Zeros) -> Array:
    """Return the best scales for ranges cut by up to two fifths; the zero points stay."""

    def error(*piece: Array, scales: Array) -> Array:
        codes = rounding.steps(piece[0], scales, zeros, task.bits)
        return squared_error(piece, codes, scales, zeros)

    tried = [task.rounded_up(exact * shrink) for shrink in SHRINKS]
    return best_of(tried, [task.total(functools.partial(error, scales=s)) for s in tried])


def best_of(tried: Sequence[Array], errors: Sequence[Array]) -> Array:
    """Return, for each group, the first scales of those tried that have the least error."""
    xp = library_of(tried[0]).xp
    best, least = tried[0], errors[0]
    for scales, found in zip(tried[1:], errors[1:], strict=True):
        better = found < least
        best, least = xp.where(better, scales, best), xp.where(better, found, least)
    return best


def _alternated(
    task: Task, low: Array, high: Array, scales: Array, zeros: Array
) -> tuple[Array, Array]:
    """Return float zero points and scales found by turns with the codes.

    Given codes, the best scale and zero point are those of a line through (code, weight), in
    closed form; given these, each best code is a rounding. The zero-point half of a turn is that
    of HQQ (Badri and Shaji, 2023) for the squared error; HQQ itself keeps the scale.
    """
    library = library_of(low)
    xp, top = library.xp, 2**task.bits - 1
    best = scales, zeros, task.total(lambda *piece: _line(piece, scales, zeros, task.bits)[0])
    least = xp.clip(xp.maximum(abs(low), abs(high)) * FINEST, LEAST_SCALE, None)
    for start in STARTS:
        step = task.rounded_up(xp.maximum((high - low) * (start / top), least))
        zero = top / 2 - (low + high) / 2 / library.cast(step, "float64")
        zero = library.cast(zero, "float32")
        for _ in range(TURNS):
            sums = task.total(lambda *p, s=step, z=zero: _line(p, s, z, task.bits))
            better = sums[0] < best[2]
            tried = step, zero, sums[0]
            best = tuple(xp.where(better, *pair) for pair in zip(tried, best, strict=True))
            step, zero = _closed_form(task, sums, step, zero, least)
    return best[0], best[1]


def _line(piece: Piece, scales: Array, zeros: Array, bits: int) -> Array:
    """Return each group's error and the sums over its (code - zero, weight) for a line, stacked."""
    groups, importance = piece
    library = library_of(groups)
    codes = rounding.steps(groups, scales, zeros, bits, whole_zeros=False)
    error = squared_error(piece, codes, scales, zeros)
    codes -= rounding.spread(zeros, groups)
    mass = groups.shape[-1] if importance is None else importance.sum(-1)
    moments = [weighted(v, importance) for v in (codes, codes * codes, codes * groups, groups)]
    mass = library.xp.zeros_like(error) + mass
    return library.cast(library.xp.stack([error, *moments, mass]), "float64")


def _closed_form(
    task: Task, sums: Array, step: Array, zero: Array, least: Array
) -> tuple[Array, Array]:
    """Return the scale and zero point of the line through the codes that `sums` describes.

    No scale is below `least`: nearly equal weights would get zero points beyond all bounds.
    """
    library = library_of(sums)
    _, codes, squares, both, weights, mass = sums
    slope = (both - codes * weights / mass) / (squares - codes * codes / mass)
    usable = (slope > 0) & library.xp.isfinite(slope)
    slope = library.xp.where(usable, slope, library.cast(step, "float64"))
    step = task.rounded_up(library.xp.maximum(slope, least))
    shift = codes / mass - weights / mass / library.cast(step, "float64")
    return step, library.cast(zero + shift, "float32")
