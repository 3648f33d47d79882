"""Codes that are floats of 4 bits (e2m1) in blocks: the formats MXFP4 and NVFP4.

A code is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. MXFP4 has a power of two (e8m0) for each
32 columns, as the OCP Microscaling specification 1.0 defines it. NVFP4 has an e4m3 number for each
16 columns, and a float32 for the whole, kept here for each row: so rows may be cut, and matrices of
several such numbers stand behind each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import FLOAT4, numpy_dtype
from gemmule.quant import rounding
from gemmule.quant.layouts import Codes, pack_nibbles, row_blocks, row_codes
from gemmule.quant.search import SHRINKS, error_ratio

Floats = NDArray[Any]
Matrix = TypeVar("Matrix", bound=Any)
log = logging.getLogger("gemmule")

BITS = 4
GROUP_SIZES = {"mxfp4": 32, "nvfp4": 16}
SCALE_DTYPES = {name: dtype for dtype, name in FLOAT4.items()}
METHODS = ("rtn", "mse")
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What each code stands for."""
_LARGEST = 6.0
_LARGEST_SCALE = {"mxfp4": 2.0**127, "nvfp4": 448.0}
_LEAST_SCALE = 2.0**-127  # of mxfp4, which has no 0


def weights_of(
    codes: Codes, scales: Floats, factors: Floats | None, group_size: int, dtype: np.dtype[Any]
) -> Floats:
    """Return weights ``code * scale * factor`` of codes one a byte, rounded once."""
    weights: Floats = VALUES.astype(dtype)[codes]
    weights *= rounding.per_column(scales.astype(dtype), codes.shape[1], group_size)
    if factors is not None:
        weights *= factors.astype(dtype)
    return weights


class Coded(NamedTuple):
    """The parts of a matrix in such codes, and the error of `gemmule.quantize`."""

    codes: Codes
    scales: Floats
    factors: NDArray[np.float32] | None
    error: float | None


def coded(
    W: Floats,
    form: str,
    method: str,
    order: NDArray[np.int32] | None,
    importance: Floats | None,
    matrices: int,
) -> Coded:
    """Return the codes of matrices behind each other on the host, block of rows by block of rows.

    W: of so many matrices of as many rows each, which have factors of their own.
    """
    (m, n), size = W.shape, GROUP_SIZES[form]
    codes = np.zeros((m, -(-n // 2)), np.uint8)
    scales = np.zeros((m, rounding.group_count(n, size)), numpy_dtype(SCALE_DTYPES[form]))
    factors = _factors(W, order, matrices) if form == "nvfp4" else None
    wrong = norm = 0.0
    for rows in row_blocks(m, n):
        groups = rounding.grouped(rounding.compute_block(W, rows, order), size)
        low, high = rounding.limits(groups)
        rounding.refuse_non_finite(low, high, groups, rows.start, order)
        count = np.zeros(groups.shape[1:], groups.dtype)
        count.reshape(-1)[:n] = 1.0 if importance is None else importance
        factor = np.ones((1, 1)) if factors is None else factors[rows].astype(np.float64)
        found = _best(groups, np.maximum(-low, high), factor, form, method, count)
        codes[rows] = pack_nibbles(found[1].reshape(len(groups), -1)[:, :n])
        scales[rows] = found[0]
        wrong += found[2]
        norm += float((count * np.square(groups, dtype=np.float64)).sum())
    return Coded(codes, scales, factors, error_ratio(wrong, norm))


def _factors(W: Floats, order: NDArray[np.int32] | None, matrices: int) -> NDArray[np.float32]:
    """Return each row's number for the whole of NVFP4: its largest weight has the largest scale."""
    sizes = np.zeros((W.shape[0], 1))
    for rows in row_blocks(*W.shape):
        groups = rounding.grouped(rounding.compute_block(W, rows, order), -1)
        low, high = rounding.limits(groups)
        rounding.refuse_non_finite(low, high, groups, rows.start, order)
        sizes[rows] = np.maximum(-low, high)
    matrices = max(matrices, 1)  # of no experts, too
    whole = sizes.reshape(matrices, -1).max(1, initial=0)
    factors = (whole / (_LARGEST * _LARGEST_SCALE["nvfp4"])).astype(np.float32)
    factors[factors == 0] = 1
    return np.repeat(factors, len(sizes) // matrices)[:, None]


Found = tuple[Floats, Codes, float]


def _best(
    groups: Floats, sizes: Floats, factor: Floats, form: str, method: str, count: Floats
) -> Found:
    """Return scales and codes of groups, of the first scales or of those of least squared error."""
    best: Any = None
    for scales in _candidates(sizes / factor, form, method):
        wide = scales.astype(np.float64) * factor
        codes = _nearest(groups, wide)
        steps = VALUES.astype(np.float64)[codes] * wide[..., None]
        wrong = (count * np.square(groups - steps)).sum(-1)
        if best is None:
            best = scales, codes, wrong
            continue
        better = wrong < best[2]
        for kept, new in zip(best, (scales, codes, wrong), strict=True):
            kept[better] = new[better]
    return best[0], best[1], float(best[2].sum())


def _candidates(sizes: Floats, form: str, method: str) -> Iterator[Floats]:
    """Yield scales of groups whose largest weights have these sizes; by "rtn" the first alone."""
    dtype = numpy_dtype(SCALE_DTYPES[form])
    if form == "mxfp4":  # the exponent of the largest weight, less that of the largest code
        exponents = np.frexp(sizes)[1] - 3
        for more in (0, 1) if method == "mse" else (0,):
            scales = np.ldexp(1.0, np.clip(exponents + more, -127, 127))
            yield np.where(sizes == 0, _LEAST_SCALE, scales).astype(np.float32).astype(dtype)
        return
    for part in (*SHRINKS, 1.5) if method == "mse" else (1.0,):
        scales = np.minimum(sizes * (part / _LARGEST), _LARGEST_SCALE[form])
        yield scales.astype(np.float32).astype(dtype)


def _nearest(groups: Floats, scales: Floats) -> Codes:
    """Return the nearest codes of weights over their scales: ties go to the even code."""
    import ml_dtypes

    ratios = groups / rounding.divisors(scales)[..., None]
    found: Codes = ratios.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return np.where(scales[..., None] == 0, np.uint8(0), found)


def widened(matrix: Matrix) -> Matrix:
    """Return a matrix of such codes as one of 8 bits, symmetric, of the same weights.

    To a GPU go so all of which no proved rung takes 4-bit floats (`places.reads_floats`).
    A code's double is a whole number, and half a scale of MXFP4 is a bfloat16. A scale of NVFP4
    times its factor is rounded to float32. Codes take twice the bytes.
    """
    log.warning(
        "%s codes become 8-bit codes of the same weights, of twice the bytes: no kernel that is "
        "proved on a GPU multiplies them as they are here",
        matrix.format,
    )
    m, n = matrix.stored_shape
    twice = (128 + 2 * VALUES).astype(np.uint8)
    codes = np.empty((m, n), np.uint8)
    for rows in row_blocks(m, n):
        codes[rows] = twice[row_codes(matrix.codes, rows, n, BITS)]
    scales = matrix.scales.astype(np.float32)
    if matrix.factors is None:
        halved: Floats = (scales / 2).astype(numpy_dtype("bfloat16"))
    else:
        halved = scales * matrix.factors / 2
    return replace(matrix, codes=_kept(codes), scales=_kept(halved), zeros=None, bits=8)


def _kept(part: Floats) -> Floats:
    part.flags.writeable = False
    return part
