"""What follows a product on the host: one pass over its sums, some rows at a time.

So many rows as lie in a core's cache go through all steps before the next come. The error function
is W. J. Cody's (Rational Chebyshev approximations for the error function, 1969), good for doubles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

BLOCK = 1 << 15  # elements that go through all steps together


def _numbers(above: str, below: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(map(float, above.split())), tuple(map(float, below.split()))


_SMALL = _numbers(
    "3.16112374387056560e0 1.13864154151050156e2 3.77485237685302021e2 3.20937758913846947e3 "
    "1.85777706184603153e-1",
    "2.36012909523441209e1 2.44024637934444173e2 1.28261652607737228e3 2.84423683343917062e3",
)
_MIDDLE = _numbers(
    "5.64188496988670089e-1 8.88314979438837594e0 6.61191906371416295e1 2.98635138197400131e2 "
    "8.81952221241769090e2 1.71204761263407058e3 2.05107837782607147e3 1.23033935479799725e3 "
    "2.15311535474403846e-8",
    "1.57449261107098347e1 1.17693950891312499e2 5.37181101862009858e2 1.62138957456669019e3 "
    "3.29079923573345963e3 4.36261909014324716e3 3.43936767414372164e3 1.23033935480374942e3",
)
_LARGE = _numbers(
    "3.05326634961232344e-1 3.60344899949804439e-1 1.25781726111229246e-1 1.60837851487422766e-2 "
    "6.58749161529837803e-4 1.63153871373020978e-2",
    "2.56852019228982242e0 1.87295284992346725e0 5.27905102951428412e-1 6.05183413124413191e-2 "
    "2.33520497626869185e-3",
)


def finish(
    sums: Array, out: Array, scalars: tuple[float, float], operands: Mapping[str, Array], how: Any
) -> None:
    """Write ``activation(alpha sums + beta C + bias) * gate + residual`` to `out`.

    sums: of out's shape, in the dtype that everything is computed in; it may be `out`. scalars:
    alpha and beta. operands: by their names in `gemmule.Epilogue`. how: its activation, or None.
    """
    rows = max(1, BLOCK // max(sums.shape[-1], 1))
    for lead in np.ndindex(sums.shape[:-2]):
        of_entry = {name: one if name == "bias" else one[lead] for name, one in operands.items()}
        for start in range(0, sums.shape[-2], rows):
            block = slice(start, start + rows)
            parts = {
                name: one if one.ndim < 2 or one.shape[0] == 1 != sums.shape[-2] else one[block]
                for name, one in of_entry.items()
            }
            out[lead][block] = finished(sums[lead][block], scalars, parts, how)


def finished(
    sums: Array, scalars: tuple[float, float], operands: Mapping[str, Array], how: Any
) -> Array:
    """Return what `finish` writes, of operands that broadcast with the sums."""
    alpha, beta = (sums.dtype.type(one) for one in scalars)
    parts = {name: one.astype(sums.dtype, copy=False) for name, one in operands.items()}
    with np.errstate(all="ignore"):  # as products, which are silent on a device too
        value: Array = sums * alpha
        if "C" in parts:
            value += beta * parts["C"]
        if "bias" in parts:
            value += parts["bias"]
        if how is not None:
            value = ACTIVATIONS[how](value)
        if "gate" in parts:
            value *= parts["gate"]
        if "residual" in parts:
            value += parts["residual"]
    return value


def _relu(v: Array) -> Array:
    result: Array = np.where(v < 0, v.dtype.type(0), v)
    return result


def _silu(v: Array) -> Array:
    result: Array = v / (1 + np.exp(-v))
    return result


def _gelu_tanh(v: Array) -> Array:
    # v (1 + tanh u) / 2 = v / (1 + exp(-2 u)), which keeps its digits where that is near 0.
    twice = v * (v * v * v.dtype.type(0.07135481627260025) + v.dtype.type(1.5957691216057308))
    result: Array = v / (1 + np.exp(-twice))
    return result


def _gelu(v: Array) -> Array:
    size = np.minimum(np.abs(v), v.dtype.type(40))  # whose tail no dtype holds
    tail = size * (v.dtype.type(0.5) * _erfc(size * v.dtype.type(0.7071067811865476)))
    result: Array = np.where(v < 0, -tail, v - tail)
    return result


def _erfc(x: Array) -> Array:
    """Return ``1 - erf(x)`` of x >= 0, relative errors of some units in the last place."""
    kind, small, large = x.dtype.type, x <= 0.46875, x > 4
    out = np.empty_like(x)
    y = x[small]
    out[small] = 1 - y * _ratio(_SMALL, y * y)
    y = x[large]
    less = 1 / np.maximum(y * y, kind(1))
    far = (kind(0.5641895835477563) - less * _ratio(_LARGE, less)) / y
    out[large] = far * _gaussian(y)
    middle = ~(small | large)  # NaN too
    y = x[middle]
    out[middle] = _gaussian(y) * _ratio(_MIDDLE, y)
    return out


def _gaussian(y: Array) -> Array:
    """Return ``exp(-y^2)``; y in two parts, of which the first has an exact square."""
    first = np.trunc(y * 16) / 16
    result: Array = np.exp(-first * first) * np.exp(-(y - first) * (y + first))
    return result


def _ratio(parts: tuple[tuple[float, ...], tuple[float, ...]], y: Array) -> Array:
    """Return Cody's quotient of polynomials; the last of the upper is of the highest power."""
    kind = y.dtype.type
    upper, lower = kind(parts[0][-1]) * y, y
    for above, below in zip(parts[0][:-2], parts[1][:-1], strict=True):
        upper = (upper + kind(above)) * y
        lower = (lower + kind(below)) * y
    result: Array = (upper + kind(parts[0][-2])) / (lower + kind(parts[1][-1]))
    return result


ACTIVATIONS = {"relu": _relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}
