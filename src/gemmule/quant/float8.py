"""Codes that are floats of 8 bits (e4m3), with a scale for each group: experts' weights of W8A16.

The largest weight of a group is 448 times its scale, the largest e4m3 number; the others are
rounded to the nearest. Matrices that models keep so, as DeepSeek's do, are taken as they are by
`QuantizedMatrix.from_parts`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmule.core.problem import FLOAT8_CODES, numpy_dtype
from gemmule.quant import checks, rounding
from gemmule.quant.layouts import row_blocks
from gemmule.quant.library import closed, opened, place_of
from gemmule.quant.matrix import QuantizedMatrix

LARGEST = 448.0


def coded(W: Any, group_size: int, scale_dtype: str) -> QuantizedMatrix:
    """Return the matrix of weights on any device in such codes, where it lies; rounded on the host.

    Raises as `gemmule.quantize` does.
    """
    W, device = opened(W)
    checks.float_matrix(W)
    device = device or place_of(W)
    host = closed(W) if isinstance(W, np.ndarray) or device is None else closed(W).to_host()
    size = checks.group_size(group_size)
    dtype = checks.one_of("scale_dtype", scale_dtype, checks.SCALE_DTYPES)
    (m, n), codes = host.shape, np.zeros(host.shape, numpy_dtype(FLOAT8_CODES))
    scales = np.zeros((m, rounding.group_count(n, size)), numpy_dtype(dtype))
    for rows in row_blocks(m, n):
        groups = rounding.grouped(rounding.compute_block(host, rows, None), size)
        low, high = rounding.limits(groups)
        rounding.refuse_non_finite(low, high, groups, rows.start, None)
        sizes = np.maximum(-low, high).astype(np.float64)
        wanted = rounding.round_up(sizes / LARGEST, dtype)
        scales[rows] = wanted
        ratios = groups / rounding.divisors(scales[rows].astype(groups.dtype))[..., None]
        found = ratios.astype(np.float32).astype(codes.dtype)
        codes[rows] = found.reshape(len(groups), -1)[:, :n]
    shape = m, n
    made = QuantizedMatrix.from_parts(codes, scales, shape=shape, bits=8, group_size=size)
    return made if device is None else made.to(device)
