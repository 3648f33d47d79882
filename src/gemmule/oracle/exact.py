"""Products in doubled precision: the truth behind float64 results.

Each product ``a * b`` is split into its rounded value and its exact error (Dekker's product with
Veltkamp's splitting, so no fused multiply-add is needed), and the pairs are summed in a tree of
error-free additions (Knuth). The result ``high + low`` is wrong by at most
``relative_error(k) * (|A| |B|)``, some 2^-100, against 2^-53 for float64 itself. NumPy's longdouble
is not used: its 64 bits leave too little room below a short chain of float64 additions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

LARGEST = 2.0**480  # products and the splitting stay far from overflow below this
_SPLITTER = 2.0**27 + 1.0
_BLOCK = 1 << 19  # products held at once


def relative_error(reduction: int) -> float:
    """Return the error of `product` relative to ``|A| |B|``, for a sum of `reduction` products.

    One exact product and ``log2`` tree levels, each losing at most a few 2^-106.
    """
    return (math.log2(max(reduction, 1)) + 4.0) * 2.0**-102


def two_sum(a: Doubles, b: Doubles) -> tuple[Doubles, Doubles]:
    """Return ``s, e`` with ``s = fl(a + b)`` and ``s + e == a + b`` exactly."""
    s = a + b
    shadow = s - a
    return s, (a - (s - shadow)) + (b - shadow)


def _split(a: Doubles) -> tuple[Doubles, Doubles]:
    scaled = a * _SPLITTER
    high = scaled - (scaled - a)
    return high, a - high


def two_product(a: Doubles, b: Doubles) -> tuple[Doubles, Doubles]:
    """Return ``p, e`` with ``p = fl(a b)`` and ``p + e == a b`` unless e underflows."""
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    p = a * b
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


def product(A: Doubles, B: Doubles) -> tuple[Doubles, Doubles]:
    """Return ``A @ B`` as an unevaluated sum ``high + low`` of float64 arrays.

    A: ``(..., m, k)``, B: ``(..., k, n)``, finite. Raises ValueError where an element reaches
    2^480, since the splitting could overflow.

    >>> high, low = product(np.array([[1.0, 2.0**-60]]), np.array([[1.0], [1.0]]))
    >>> float(high[0, 0]), float(low[0, 0]) == 2.0**-60
    (1.0, True)
    """
    for name, operand in (("A", A), ("B", B)):
        if operand.size and not np.abs(operand).max() < LARGEST:
            raise ValueError(
                f"{name} holds {np.abs(operand).max():.3g}; the doubled-precision product takes "
                "finite elements below 2^480. Scale the operand by a power of two."
            )
    batch = np.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    m, k, n = A.shape[-2], A.shape[-1], B.shape[-1]
    high, low = np.zeros((2, *batch, m, n))
    if k == 0:
        return high, low
    step = max(1, _BLOCK // max(1, math.prod(batch) * k * n))
    for start in range(0, m, step):
        rows = slice(start, start + step)
        pairs = two_product(A[..., rows, :, None], B[..., None, :, :])
        high[..., rows, :], low[..., rows, :] = _tree(*pairs)
    return high, low


def _tree(high: Doubles, low: Doubles) -> tuple[Doubles, Doubles]:
    """Sum pairs along the axis before the last, halving its length each time; overwrites both."""
    length = high.shape[-2]
    while length > 1:
        half = (length + 1) // 2
        left, right = slice(0, length - half), slice(half, length)
        s, e = two_sum(high[..., left, :], high[..., right, :])
        e += low[..., left, :] + low[..., right, :]
        total = s + e
        low[..., left, :] = e - (total - s)
        high[..., left, :] = total
        length = half
    return high[..., 0, :], low[..., 0, :]
