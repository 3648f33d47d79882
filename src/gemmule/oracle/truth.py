"""The right result of a problem, from its operands alone.

Integers are computed exactly modulo 2^64, float64 and complex128 in doubled precision, all other
floats in float64; what NaN and infinities make of a result is derived apart, from a boolean map.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import COMPLEX, INTEGERS, Problem
from gemmule.oracle import exact as exact_sums
from gemmule.oracle.bounds import Magnitudes
from gemmule.quant.matrix import QuantizedMatrix

Array: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

FINITE, PLUS_INF, MINUS_INF, NOT_A_NUMBER, NOT_FINITE = range(5)
CATEGORIES = ("finite", "+Inf", "-Inf", "NaN", "NaN or Inf")


@dataclass(frozen=True, slots=True)
class Truth:
    """The right result in matrix form ``(..., m, n)`` (n == 1 for a matvec).

    values: int64/uint64 modulo 2^64 for integer dtypes, else float64, with `low` added where the
    problem is float64. Complex results lie as real parts above imaginary parts, ``(..., 2 m, n)``.
    sizes: ``|A|``, ``|B|``, ``|A||B|``; None for integers. category: what each element is (FINITE,
    PLUS_INF, MINUS_INF, NOT_A_NUMBER, or NOT_FINITE: any of the last three); None when all are
    finite.
    """

    values: Array
    low: Doubles | None = None
    sizes: Magnitudes | None = None
    category: NDArray[np.int8] | None = None


def reference(problem: Problem, a: Any, b: Array, *, exact: bool = False) -> Truth:
    """Compute the right result of a problem.

    a, b: the operands, shaped as `make_inputs` makes them. exact: promise that float64 holds every
    sum exactly (kind ``integers``), which spares float64 problems the doubled precision.
    """
    b = b[..., None] if problem.op == "matvec" else b
    if problem.out in INTEGERS:
        return Truth(_integer_product(problem, a, b))
    if isinstance(a, QuantizedMatrix):
        a64, size_a = dequantized(a)
    elif problem.out in COMPLEX:
        a64, b = _real_forms(a, b)
        size_a = np.abs(a64)
    else:
        a64 = a.astype(np.float64)
        size_a = np.abs(a64)
    b64 = b.astype(np.float64)
    size_b = np.abs(b64)
    return _of_doubles(problem, (a64, b64), (size_a, size_b), exact=exact)


def _of_doubles(
    problem: Problem,
    operands: tuple[Doubles, Doubles],
    sizes: tuple[Doubles, Doubles],
    *,
    exact: bool,
) -> Truth:
    """Compute the product of doubles, whose `sizes` bound how they are summed."""
    (a64, b64), (size_a, size_b) = operands, sizes
    category = None
    if not (np.isfinite(size_a).all() and np.isfinite(size_b).all()):
        category = nonfinite_map(a64, b64, quantized=problem.quant is not None)
        a64, b64, size_a, size_b = (
            np.where(np.isfinite(v), v, 0.0) for v in (a64, b64, size_a, size_b)
        )
    k = a64.shape[-1]
    low = None
    if problem.out in ("float64", "complex128") and not exact:
        values, low = exact_sums.product(a64, b64)
        error = exact_sums.relative_error(k)
    else:
        values = a64 @ b64
        error = 0.0 if exact else k * 2.0**-53
    return Truth(values, low, Magnitudes(size_a, size_b, size_a @ size_b, error), category)


def grouped_reference(
    problem: Problem, a: Array, w: Any, ends: Array, *, exact: bool = False
) -> Truth:
    """Compute the right rows of a grouped product: those before the last group's end.

    a: (m, k); w: (experts, k, n), or a quantised matrix of ``experts n`` rows of k; ends: where
    each expert's rows of A end.
    """
    coded = dequantized(w) if isinstance(w, QuantizedMatrix) else None
    last = int(ends[-1]) if len(ends) else 0
    shape = (last, problem.n)
    values, low, product = (np.zeros(shape) for _ in range(3))
    category = np.full(shape, FINITE, np.int8)
    begin, error, doubled = 0, 0.0, False
    for expert, end in enumerate(ends):
        rows = slice(begin, int(end))
        begin = int(end)
        if rows.start == rows.stop:
            continue
        if coded is None:
            one = reference(replace(problem, op="matmul"), a[rows], w[expert], exact=exact)
        else:
            mine = slice(expert * problem.n, (expert + 1) * problem.n)
            one = _beside_codes(problem, coded[0][mine], coded[1][mine], a[rows], exact=exact)
        values[rows] = one.values
        if one.low is not None:
            low[rows], doubled = one.low, True
        if one.category is not None:
            category[rows] = one.category
        if one.sizes is not None:
            product[rows], error = one.sizes.product, one.sizes.reference_error
    whole = bool((category == FINITE).all())
    tokens = a[:last].astype(np.float64)
    of_tokens = np.where(np.isfinite(tokens), np.abs(tokens), 0.0).sum(axis=1, keepdims=True)
    sizes = Magnitudes(of_tokens, np.ones((1, problem.n)), product, error)
    return Truth(values, low if doubled else None, sizes, None if whole else category)


def _beside_codes(
    problem: Problem, weights: Doubles, sizes: Doubles, tokens: Array, *, exact: bool
) -> Truth:
    """Compute the rows of tokens beside dequantised columns, (n, k)."""
    x = tokens.astype(np.float64).T
    found = _of_doubles(problem, (weights, x), (sizes, np.abs(x)), exact=exact)
    category = None if found.category is None else found.category.T
    size = found.sizes
    turned = None if size is None else replace(size, product=size.product.T)
    return Truth(found.values.T, None, turned, category)


def _integer_product(problem: Problem, a: Array, b: Array) -> Array:
    """Return the product modulo 2^64, through BLAS in float64 where that is exact."""
    largest = [max(abs(int(np.iinfo(v.dtype).min)), int(np.iinfo(v.dtype).max)) for v in (a, b)]
    if largest[0] * largest[1] * max(a.shape[-1], 1) <= 2**53:
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)
    wide = np.uint64 if problem.out == "uint64" else np.int64
    return a.astype(wide) @ b.astype(wide)


def _real_forms(a: Array, b: Array) -> tuple[Doubles, Doubles]:
    """Return real matrices whose product holds real parts above imaginary parts."""
    top = np.concatenate([a.real, -a.imag], axis=-1)
    bottom = np.concatenate([a.imag, a.real], axis=-1)
    columns = np.concatenate([b.real, b.imag], axis=-2)
    return np.concatenate([top, bottom], axis=-2).astype(np.float64), columns.astype(np.float64)


def dequantized(q: QuantizedMatrix) -> tuple[Doubles, Doubles]:
    """Return ``s (c - z)`` and ``|s| (c + |z|)`` in float64, read from the codes themselves.

    Of codes that are floats the weights and their sizes: there is no difference that cancels.
    """
    stored = q if q.layout == "row" else q.to(layout="row")
    m, n = stored.stored_shape
    if q.bits == 4:
        codes = np.empty((m, n + n % 2))
        codes[:, 0::2] = stored.codes & 15
        codes[:, 1::2] = stored.codes >> 4
        codes = codes[:, :n]
    else:
        codes = stored.codes.astype(np.float64)
    scales = stored.scales.astype(np.float64)
    if q.format == "float8":
        size = max(n, 1) if q.group_size in (None, -1) else int(q.group_size or 1)
        weights = codes * scales[:, np.arange(n) // size]
        return (weights.T, abs(weights.T)) if q.transposed else (weights, abs(weights))
    if q.format is not None:
        return _of_floats(q, stored, codes[:, :n].astype(np.uint8), scales)
    middle = np.full(scales.shape, 2.0 ** (q.bits - 1))
    zeros = middle if q.zeros is None else q.zeros.astype(np.float64)
    if q.group_size is not None and q.group_size > 0:
        group = np.arange(n) // q.group_size
        scales, zeros = scales[:, group], zeros[:, group]
    weights, sizes = scales * (codes - zeros), np.abs(scales) * (codes + np.abs(zeros))
    if q.perm is not None:
        back = np.argsort(q.perm)
        weights, sizes = weights[:, back], sizes[:, back]
    return (weights.T, sizes.T) if q.transposed else (weights, sizes)


def _of_floats(
    q: QuantizedMatrix, stored: QuantizedMatrix, codes: NDArray[np.uint8], scales: Doubles
) -> tuple[Doubles, Doubles]:
    """Return weights of 4-bit floats, exact in float64, and their sizes."""
    import ml_dtypes

    group = np.arange(codes.shape[1]) // (32 if q.format == "mxfp4" else 16)
    weights = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales[:, group]
    if stored.factors is not None:
        weights = weights * stored.factors.astype(np.float64)
    if q.perm is not None:
        weights = weights[:, np.argsort(q.perm)]
    weights = weights.T if q.transposed else weights
    return weights, np.abs(weights)


def nonfinite_map(a: Doubles, b: Doubles, *, quantized: bool = False) -> NDArray[np.int8]:
    """Return what each element of ``A @ B`` is by the IEEE rule, from the operands alone.

    NaN times anything and Inf times 0 are NaN, +Inf and -Inf together are NaN, infinities of one
    sign are that infinity. Of a quantised matrix, a kernel may subtract ``zero * sum(x)`` from
    ``sum(code * x)``, where one infinity gives Inf - Inf: there every element that a non-finite x
    reaches must be NaN or Inf, either.
    """
    nan_a = np.isnan(a).any(axis=-1, keepdims=True)
    nan_b = np.isnan(b).any(axis=-2, keepdims=True)
    a_plus, a_minus, a_zero = _signs(a)
    b_plus, b_minus, b_zero = _signs(b)
    a_inf, b_inf = np.isinf(a), np.isinf(b)
    # Of two factors with these signs one is infinite: products of +Inf, and of -Inf.
    plus, minus = (
        _any([pair for a, b in signs for pair in ((a & a_inf, b), (a, b & b_inf))])
        for signs in (
            ((a_plus, b_plus), (a_minus, b_minus)),
            ((a_plus, b_minus), (a_minus, b_plus)),
        )
    )
    nan = nan_a | nan_b | _any([(a_inf, b_zero), (a_zero, b_inf)]) | (plus & minus)
    category = np.select([nan, plus, minus], [NOT_A_NUMBER, PLUS_INF, MINUS_INF], FINITE)
    if quantized:
        whole = np.isfinite(b).all(axis=-2, keepdims=True)
        category = np.where(~whole, NOT_FINITE, category)
    return category.astype(np.int8)


def _signs(v: Doubles) -> tuple[Mask, Mask, Mask]:
    with np.errstate(invalid="ignore"):
        return v > 0, v < 0, v == 0


def _any(pairs: list[tuple[Mask, Mask]]) -> Mask:
    """Return where, for any of the pairs, some term has both of its factors marked."""
    counts = [x.astype(np.float64) @ y.astype(np.float64) for x, y in pairs]
    found: Mask = np.sum(counts, axis=0) > 0
    return found
