"""How far a rung may be from the truth: the componentwise bound that its `Arithmetic` implies.

Write u for the unit roundoff of the accumulator and h for the longest chain of additions. Every
product reaches the result through at most h additions, each of which multiplies it by 1 + d with
``|d| <= u``, so the sum is off by at most ``((1 + u)^h - 1) |A||B|``. To that come

- what rounding the operands first (TF32, dequantised halves, int8 activations) changes in the
  products: ``|A| dB + dA (|B| + dB)``, with dA, dB the elementwise changes;
- the rounding of every product, where it is not exact or fused;
- half a subnormal for each product that underflows, and the same for the result;
- the rounding of the result: ``u_out |C|``, where it is narrower than the accumulator;
- the error of the reference itself.

Quantised matrices: ``w = s (c - z)`` is computed either so or as ``s sum(c x) - s z sum(x)``. Both
are sums of terms of size ``|s| (c + |z|) |x|``, which therefore takes the place of ``|w| |x|``,
with four more roundings in float32 (the subtraction, two scalings, the correction by z).

Activations quantised to b bits: ``|x - s q| <= s / 2`` with ``s = max|x| / (2^(b-1)-1)`` over 32
terms, whatever groups the matrix has, and three roundings (of s, of x / s, of s q) at code size.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import COMPLEX, UNIT_ROUNDOFF, Problem, numpy_dtype
from gemmule.core.rung import ACTIVATION_GROUP, Arithmetic, Params

Doubles: TypeAlias = NDArray[np.float64]

SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "tf32": 2.0**-136}
SMALLEST |= {"float16": 2.0**-24, "bfloat16": 2.0**-133}
SMALLEST |= {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}
SMALLEST |= {"complex64": SMALLEST["float32"], "complex128": SMALLEST["float64"]}
_FLOAT32_U = UNIT_ROUNDOFF["float32"]
_QUANT_ROUNDINGS = 4


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Sizes of the operands' elements in matrix form, non-finite ones as 0, and their product.

    a: ``(..., m, k)``; for quantised matrices ``|s| (c + |z|)``. b: ``(..., k, n)``. product:
    ``a @ b``. Of a grouped product a: ``(m, 1)``, sums of the tokens' elements, and b: ones; its
    product is that of the operands. reference_error: error of the truth relative to `product`.
    """

    a: Doubles
    b: Doubles
    product: Doubles
    reference_error: float


def overflow_threshold(dtype: str) -> float:
    """Return the least magnitude that rounds to infinity; for float64 its largest number."""
    largest = largest_finite(dtype)
    if dtype in ("float64", "complex128"):
        return largest
    ulp = 2.0 ** math.floor(math.log2(largest)) * 2.0 * UNIT_ROUNDOFF[dtype]
    return largest + ulp / 2.0


@functools.cache
def largest_finite(dtype: str) -> float:
    """Return the largest finite number of a floating dtype."""
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(dtype)).max)


def sum_error(
    problem: Problem,
    arithmetic: Arithmetic,
    params: Params,
    sizes: Magnitudes,
    *,
    whole_codes: bool = False,
) -> Doubles:
    """Return the bound on a rung's sum before its last rounding, elementwise.

    whole_codes: the activations are whole multiples of their scale, so that quantising them adds
    only the rounding of the scale.
    """
    chain = max(arithmetic.chain(problem, params), 1)
    if problem.out in COMPLEX:
        chain = 2 * chain + 1  # a complex product is two real ones
    u = arithmetic.accumulator_u
    if problem.quant is not None:
        chain += _QUANT_ROUNDINGS
        u = max(u, _FLOAT32_U)
    growth = math.expm1(chain * math.log1p(u))
    tiny = SMALLEST.get(arithmetic.accumulator, SMALLEST["float32"])
    if arithmetic.product is not None:
        # Not (1 + growth)(1 + u) - 1: at float64's u = 2^-53 that rounds to 0.
        growth += UNIT_ROUNDOFF[arithmetic.product] * (1.0 + growth)
        tiny += SMALLEST[arithmetic.product]
    spread = _input_error(problem, arithmetic, sizes, whole_codes)
    terms = problem.reduction * (2 if problem.out in COMPLEX else 1)
    error: Doubles = spread + growth * (sizes.product + spread)
    error += terms * tiny * (1.0 + growth) + sizes.reference_error * sizes.product
    return error * (1.0 + (terms + 16) * 2.0**-52)  # what rounding took from the bound itself


def result_error(
    problem: Problem, arithmetic: Arithmetic, magnitude: Doubles, error: Doubles
) -> Doubles:
    """Return the bound on the rounded result, from the bound on the sum and the truth's size."""
    if arithmetic.accumulator not in UNIT_ROUNDOFF:
        narrower = True  # integer sums become floats with one rounding
    else:
        narrower = UNIT_ROUNDOFF[problem.out] > UNIT_ROUNDOFF[arithmetic.accumulator]
    if not narrower:
        return error
    u = UNIT_ROUNDOFF[problem.out]
    bound: Doubles = error * (1.0 + u) + (u * magnitude + SMALLEST[problem.out] / 2.0)
    return bound


def _input_error(
    problem: Problem, arithmetic: Arithmetic, sizes: Magnitudes, whole_codes: bool
) -> Doubles | float:
    """Return what rounding the operands changes in the sums: ``|A| dB + dA (|B| + dB)``.

    Of a grouped product codes alone are rounded, and sizes are those of whole rows of tokens.
    """
    if problem.op == "grouped" and arithmetic.inputs is not None:
        least = SMALLEST[arithmetic.inputs] * (sizes.a @ sizes.b)
        roundings = 3.0 * math.log1p(UNIT_ROUNDOFF[arithmetic.inputs])
        return np.asarray(sizes.product * math.expm1(roundings) + least, np.float64)
    change_a = _rounded(sizes.a, problem.a, arithmetic.inputs, problem.quant is not None)
    change_b: Doubles | None
    if arithmetic.activations_bits is not None:
        change_b = _activation_change(problem, arithmetic.activations_bits, sizes.b, whole_codes)
    else:
        change_b = _rounded(sizes.b, problem.b, arithmetic.inputs, quantized=False)
    if change_a is None and change_b is None:
        return 0.0
    error: Doubles = np.zeros_like(sizes.product)
    if change_b is not None:
        error += sizes.a @ change_b
    if change_a is not None:
        error += change_a @ (sizes.b if change_b is None else sizes.b + change_b)
    return error


def _rounded(size: Doubles, dtype: str, inputs: str | None, quantized: bool) -> Doubles | None:
    """Return the change from rounding an operand to `inputs`; None where it fits exactly."""
    if inputs is None:
        return None
    u = UNIT_ROUNDOFF[inputs]
    if quantized:  # the difference, the scaling and the result are each rounded
        return size * math.expm1(3.0 * math.log1p(u)) + SMALLEST[inputs]
    if u <= UNIT_ROUNDOFF[dtype] and SMALLEST[inputs] <= SMALLEST[dtype]:
        return None
    return size * u + SMALLEST[inputs] / 2.0


def _activation_change(problem: Problem, bits: int, size: Doubles, whole_codes: bool) -> Doubles:
    top = (1 << (bits - 1)) - 1
    if whole_codes:
        return size * (4.0 * _FLOAT32_U)
    scale: Doubles = _group_maxima(problem, size) / top
    return scale * (0.5 + 3.0 * _FLOAT32_U * top)


def _group_maxima(problem: Problem, size: Doubles) -> Doubles:
    """Return, for each element of B, the largest size among those it shares a scale with.

    Where the matrix is transposed or permuted any other of the column may be one of them.
    """
    spec = problem.quant
    k = size.shape[-2]
    if k == 0:
        return size
    group = k if spec is None or spec.transposed or spec.has_perm else ACTIVATION_GROUP
    starts = np.arange(0, k, group)
    maxima: NDArray[Any] = np.maximum.reduceat(size, starts, axis=-2)
    spread: Doubles = np.repeat(maxima, group, axis=-2)[..., :k, :]
    return spread
