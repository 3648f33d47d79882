"""The numbers inside the oracle's inputs: exact integers, normal, scaled, cancelling, non-finite.

All functions return values in matrix form, A ``(..., m, k)`` and B ``(..., k, n)`` (n == 1 for a
matvec), as float64 or integers that the operands' dtypes hold after the cast.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import (
    COMPLEX,
    FLOAT4,
    FLOAT8,
    FLOAT8_CODES,
    UNIT_ROUNDOFF,
    Problem,
    QuantSpec,
    numpy_dtype,
)
from gemmule.oracle.weights import extreme_groups, quantized_weights
from gemmule.quant import float4, float8
from gemmule.quant.layouts import pack_nibbles
from gemmule.quant.matrix import QuantizedMatrix

Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple[int, ...]

# Powers of two by which kind "scaled" stretches rows, columns and the summed axis.
STRETCH = {
    "float64": 60,
    "complex128": 60,
    "float32": 30,
    "complex64": 30,
    "bfloat16": 30,
    "float16": 4,
    "float8_e5m2": 3,
    "float8_e4m3fn": 1,
}
EDGES = (0, 1, 31, 32, 63, 64, 127, 128)  # where tiles of common sizes begin and end


def exact_limit(dtype: str) -> float:
    """Return the largest L such that every integer up to L is exact in a float dtype."""
    return 1.0 / UNIT_ROUNDOFF[dtype]


def _nonzero(rng: np.random.Generator, largest: int, shape: Shape) -> Array:
    """Return integers from -largest to largest without 0."""
    values = rng.integers(-largest, largest, shape)
    values += values >= 0
    return values


def float_values(
    rng: np.random.Generator,
    problem: Problem,
    kind: str,
    shape_a: Shape,
    shape_b: Shape,
    accumulator: str | None,
) -> tuple[Array, Array, float]:
    """Return A, B and, for kind ``integers``, the integers that accumulators have to hold."""
    if kind != "integers":
        return *_normal_values(rng, problem, kind, shape_a, shape_b), 0.0
    if problem.out in COMPLEX:
        largest = 4
        parts = [_nonzero(rng, largest, s) for s in (shape_a, shape_a, shape_b, shape_b)]
        exact_below = 2.0 * largest * largest * max(problem.reduction, 1)
        return parts[0] + 1j * parts[1], parts[2] + 1j * parts[3], exact_below
    return _exact_values(rng, problem, shape_a, shape_b, accumulator)


def _normal_values(
    rng: np.random.Generator, problem: Problem, kind: str, shape_a: Shape, shape_b: Shape
) -> tuple[Array, Array]:
    is_complex = problem.out in COMPLEX
    a, b = (
        rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if is_complex else 0.0)
        for shape in (shape_a, shape_b)
    )
    if kind == "scaled":
        _stretch(rng, problem, a, b)
    elif kind == "cancel":
        half = problem.reduction // 2
        same = a[..., :half]
        noise = 0.0 if is_complex else rng.standard_normal(same.shape) * 2.0**-6
        a[..., half : 2 * half] = same + noise
        b[..., half : 2 * half, :] = -b[..., :half, :]
    return a, b


def _stretch(rng: np.random.Generator, problem: Problem, a: Array, b: Array) -> None:
    """Scale rows of A, columns of B, and, inversely in both, the summed axis, by powers of two."""
    most = min(STRETCH[problem.a], STRETCH[problem.b], STRETCH[problem.out]) // 2
    a *= 2.0 ** rng.integers(-most, most + 1, (problem.m, 1))
    b *= 2.0 ** rng.integers(-most, most + 1, (1, b.shape[-1]))
    inner = 2.0 ** rng.integers(-most, most + 1, problem.reduction)
    a *= inner
    b /= inner[:, None]


def _exact_values(
    rng: np.random.Generator,
    problem: Problem,
    shape_a: Shape,
    shape_b: Shape,
    accumulator: str | None,
) -> tuple[Array, Array, float]:
    """Return non-zero integers whose sums are exact in the accumulator and in the result.

    Short sums cannot leave the exact range. In longer ones, randomly chosen pairs of terms cancel
    (equal columns of A against opposite rows of B), and only as many terms stay unpaired as the
    result can count: every element still decides the result, which stays small; partial sums walk
    at random, 8 standard deviations inside the accumulator's range.
    """
    k = problem.reduction
    wide = "float64" if problem.out == "float64" else "float32"
    held = exact_limit(accumulator or wide)
    if problem.a in FLOAT8 and problem.b in FLOAT8:
        held = min(held, 2.0**13)  # the bits that tensor cores keep of sums of 8-bit floats
    limit = min(held, exact_limit(problem.out))
    largest = min(8, math.isqrt(int(limit) // max(k, 1)))
    paired = largest < min(3, math.isqrt(int(limit) // 48) or 1)
    if paired:
        largest = min(3, math.isqrt(int(limit) // 48) or 1)
        while largest > 1 and 4 * largest**2 * math.sqrt(k) > held:
            largest -= 1
    a, b = _nonzero(rng, largest, shape_a), _nonzero(rng, largest, shape_b)
    if paired:
        order = rng.permutation(k)
        count = (k - min(k, int(limit) // largest**2) + 1) // 2
        first, second = order[:count], order[count : 2 * count]
        a[..., second] = a[..., first]
        b[..., second, :] = -b[..., first, :]
        kept = int(held / 8) ** 2
        if k > kept:  # terms beyond what the walk allows are zeros, in whole pairs
            dropped = order[: (k - kept) // 2]
            b[..., dropped, :] = 0
            b[..., order[count : count + len(dropped)], :] = 0
    return a, b, min(held, float(largest**2 * max(k, 1)))


def integer_values(
    rng: np.random.Generator, problem: Problem, shape_a: Shape, shape_b: Shape
) -> tuple[Array, Array]:
    """Return integers from the whole range of the dtypes; every fourth time only extremes."""
    extremes = rng.integers(4) == 0
    return (
        _whole_range(rng, problem.a, shape_a, bool(extremes)),
        _whole_range(rng, problem.b, shape_b, bool(extremes)),
    )


def _whole_range(rng: np.random.Generator, name: str, shape: Shape, extremes: bool) -> Array:
    dtype = np.dtype(name)
    info = np.iinfo(dtype)
    if extremes:
        corners = np.array([info.min, info.max, info.max - 1, 1], dtype)
        return corners[rng.integers(0, 4, shape)]
    return rng.integers(info.min, info.max, shape, dtype=dtype.type, endpoint=True)


def quantized_values(
    rng: np.random.Generator, problem: Problem, kind: str, shape_b: Shape
) -> tuple[QuantizedMatrix, Array, float]:
    """Return a quantised matrix of random codes, B, and the integers accumulators have to hold.

    Kind ``integers``: scales are powers of two (either sign), zero points integers, and B is small
    integers, all so that even ``sum(code * x) - zero * sum(x)`` is exact in float32. Of the other
    kinds every second matrix is one that `gemmule.quantize` makes (see `weights`). With int8
    activations B holds 127/128 of either sign, which has the codes 127 and -127 in any grouping.
    """
    spec = problem.codes
    k = problem.reduction
    top = 2**spec.bits - 1
    if kind != "integers":
        q = _quantized(rng, problem, spec, top, exact=False, made=bool(rng.integers(2)))
        b = rng.standard_normal(shape_b)
        if kind == "scaled":
            b *= 2.0 ** rng.integers(-3, 4, shape_b[-2:])
        elif kind == "cancel":
            half = k // 2
            b[..., half : 2 * half, :] = -b[..., :half, :]
        return q, b, 0.0
    limit = exact_limit("float32")
    if spec.activations != "float":
        b = np.where(rng.integers(0, 2, shape_b) == 0, -127 / 128, 127 / 128)
        return _quantized(rng, problem, spec, top, exact=True), b, math.inf
    top = max(1, min(top, int(limit / (4 * max(k, 1)))))
    largest = max(1, min(3, int(limit / (4 * top * max(k, 1)))))
    q = _quantized(rng, problem, spec, top, exact=True)
    return q, _nonzero(rng, largest, shape_b), limit


def _quantized(
    rng: np.random.Generator,
    problem: Problem,
    spec: QuantSpec,
    top: int,
    *,
    exact: bool,
    made: bool = False,
) -> QuantizedMatrix:
    """Return random codes up to `top` with scales and zero points, in the layout of `spec`.

    made: a matrix made of random weights instead.
    """
    shape = (problem.m, problem.reduction)
    rows, cols = shape[::-1] if spec.transposed else shape
    if problem.a == FLOAT8_CODES:
        return _float8(rng, problem, spec, 0 if made else top, exact=exact)
    if made:
        q = quantized_weights(rng, spec, rows, cols, problem.b)
        q = q.T if spec.transposed else q
        return q if spec.layout == "row" else q.to(layout=spec.layout)
    if spec.scale_dtype in FLOAT4:
        return _floats(rng, spec, (rows, cols), top, exact=exact)
    codes = rng.integers(0, top + 1, (rows, cols), dtype=np.uint8)
    middle = 2 ** (spec.bits - 1)
    if not spec.has_zeros and top < 2**spec.bits - 1:
        codes += np.uint8(max(0, middle - top // 2 - 1))
    if spec.group_size is None:
        groups = (1, 1)
    else:
        per_row = 1 if spec.group_size == -1 else -(-cols // spec.group_size)
        groups = (rows, per_row)
    zeros = None
    if exact:
        scales = np.array([1.0, 2.0, -1.0, -2.0])[rng.integers(0, 4, groups)]
        if spec.has_zeros:
            zeros = rng.integers(0, top + 1, groups).astype(np.float32)
    else:
        scales = rng.uniform(0.5, 2.0, groups) / middle
        if spec.has_zeros:
            zeros = rng.uniform(0.0, top, groups).astype(np.float32)
            if rng.integers(2):
                zeros = np.rint(zeros)
    q = QuantizedMatrix.from_parts(
        pack_nibbles(codes) if spec.bits == 4 else codes,
        scales.astype(numpy_dtype(spec.scale_dtype)),
        zeros,
        shape=(rows, cols),
        bits=spec.bits,
        group_size=spec.group_size,
        perm=rng.permutation(cols).astype(np.int32) if spec.has_perm else None,
        transposed=spec.transposed,
    )
    return q if spec.layout == "row" else q.to(layout=spec.layout)


def _float8(
    rng: np.random.Generator, problem: Problem, spec: QuantSpec, top: int, *, exact: bool
) -> QuantizedMatrix:
    """Return random codes that are 8-bit floats: whole numbers, any, or, of no top, of weights."""
    shape = rows, cols = problem.m, problem.reduction
    if not top:
        size = -1 if spec.group_size is None else spec.group_size
        weights = extreme_groups(rng, rows, cols, spec, problem.b)
        return float8.coded(weights, size, spec.scale_dtype)
    most = min(top, 16) // 2
    whole = rng.integers(-most, most + 1, shape).astype(np.float64)
    spread = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 6, shape)
    codes = (whole if exact else spread.clip(-448, 448)).astype(np.float32)
    groups = rows, 1 if spec.group_size == -1 else -(-cols // int(spec.group_size or 1))
    steps = np.array([1.0, 2.0, -1.0, -2.0])[rng.integers(0, 4, groups)]
    return QuantizedMatrix.from_parts(
        codes.astype(numpy_dtype(FLOAT8_CODES)),
        (steps if exact else rng.uniform(0.5, 2.0, groups)).astype(numpy_dtype(spec.scale_dtype)),
        shape=shape,
        bits=8,
        group_size=spec.group_size,
    )


def _floats(
    rng: np.random.Generator, spec: QuantSpec, shape: tuple[int, int], top: int, *, exact: bool
) -> QuantizedMatrix:
    """Return random codes that are 4-bit floats, of halves up to `top`."""
    (rows, cols), size = shape, int(spec.group_size or 1)
    known = np.flatnonzero(2 * np.abs(float4.VALUES) <= top).astype(np.uint8)
    codes = rng.choice(known, shape)
    groups = (rows, -(-cols // size))
    powers, parts = np.array([1.0, 2.0])[rng.integers(0, 2, groups)], rng.uniform(0.5, 2.0, groups)
    factors = None
    if FLOAT4[spec.scale_dtype] == "nvfp4":
        powers *= rng.choice([-1.0, 1.0], groups)
        factors = 2.0 ** rng.integers(0, 1 if exact else 9, (rows, 1))
        if not exact:
            factors *= rng.uniform(0.5, 1.0, factors.shape)
    q = QuantizedMatrix.from_parts(
        pack_nibbles(codes),
        (powers if exact else parts).astype(np.float32).astype(numpy_dtype(spec.scale_dtype)),
        None if factors is None else factors.astype(np.float32),
        shape=shape,
        bits=spec.bits,
        group_size=spec.group_size,
        perm=rng.permutation(cols).astype(np.int32) if spec.has_perm else None,
        transposed=spec.transposed,
    )
    return q if spec.layout == "row" else q.to(layout=spec.layout)


def placements(problem: Problem) -> list[tuple[str, int, int, float]]:
    """Return every single place and value of a non-finite element: operand, row, column, value.

    Row starts, row ends, and both sides of tile edges; +Inf, -Inf and NaN (float8_e4m3fn knows
    NaN only). A quantised matrix is finite, so there only B is hit.
    """
    k, columns = problem.reduction, 1 if problem.op == "matvec" else problem.n
    operands = [] if problem.quant is not None else [("a", problem.m, k, problem.a)]
    operands.append(("b", k, columns, problem.b))
    return [
        (name, row, column, value)
        for name, rows, cols, dtype in operands
        for row in _places(rows)
        for column in _places(cols)
        for value in _specials(dtype)
    ]


def _places(size: int) -> list[int]:
    return sorted({*(e for e in EDGES if e < size), *([size // 2, size - 1] if size else [])})


def _specials(dtype: str) -> tuple[float, ...]:
    return (math.nan,) if dtype == "float8_e4m3fn" else (math.inf, -math.inf, math.nan)


def nonfinite_values(
    rng: np.random.Generator, problem: Problem, seed: int, a: Any, b: Array
) -> tuple[Any, Array]:
    """Put non-finite elements into A or B: one at a time for the first seeds, then up to four.

    Some elements of the other operand are zero, more of them in short sums, so that Inf * 0 happens
    too.
    """
    places, share = placements(problem), 0.1 if problem.reduction > 2 else 0.5
    if not isinstance(a, QuantizedMatrix):
        a = np.where(rng.random(a.shape) < share, 0.0, a)
    b = np.where(rng.random(b.shape) < share, 0.0, b)
    if not places:
        return a, b
    chosen = [seed] if seed < len(places) else rng.integers(0, len(places), rng.integers(1, 5))
    for index in chosen:
        name, row, column, value = places[int(index)]
        target = a if name == "a" else b
        if target.ndim == 2:
            target[row, column] = value
        elif len(target):
            target[int(index) % len(target), row, column] = value
    return a, b
