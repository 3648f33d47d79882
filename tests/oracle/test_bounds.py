"""What the bounds of the oracle are made of, by hand, and where results overflow."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gemmule.core.problem import (
    COMPLEX,
    FLOAT8,
    FLOATS,
    UNIT_ROUNDOFF,
    Problem,
    QuantSpec,
    numpy_dtype,
)
from gemmule.core.rung import Arithmetic
from gemmule.oracle.bounds import SMALLEST, Magnitudes, overflow_threshold, result_error, sum_error
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.judge import check, judge, sums_are_exact
from gemmule.oracle.problems import make_problem
from gemmule.oracle.truth import reference
from oracle_mutants import F32, arithmetic


def grown(additions: int, dtype: str = "float32") -> float:
    return math.expm1(additions * math.log1p(UNIT_ROUNDOFF[dtype]))


U32, TF32, CODE = UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF["tf32"], 1.0 / 127.0
SPEC = QuantSpec(8, -1, False, "row", "float32", False)
GROUPED = replace(SPEC, group_size=2)
BOUNDS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "sums": ({}, {}, grown(7)),
    "no additions": ({}, {"chain": lambda p, q: 0}, grown(1)),
    "float64": ({"out": "float64"}, {"accumulator": "float64"}, grown(7, "float64")),
    "complex": ({"a": "complex64", "b": "complex64", "out": "complex64"}, {}, grown(15)),
    "quantised": ({"a": "uint8", "quant": SPEC}, {}, grown(11)),
    "exact sums, scaled": ({"a": "uint8", "quant": SPEC}, {"accumulator": "int32"}, grown(11)),
    "rounded products": (
        {"a": "float16", "b": "float16"},
        {"product": "float16"},
        grown(7) + 2.0**-11 * (1 + grown(7)),
    ),
    "rounded operands": (
        {},
        {"inputs": "tf32"},
        (2 * TF32 + TF32**2) + grown(7) * (1 + 2 * TF32 + TF32**2),
    ),
    "one rounded operand": (
        {"a": "bfloat16"},
        {"inputs": "bfloat16"},
        2.0**-8 + grown(7) * (1 + 2.0**-8),
    ),
    "rounded weights": (
        {"a": "uint8", "b": "float16", "quant": SPEC},
        {"inputs": "float16"},
        grown(3, "float16") + grown(11) * (1 + grown(3, "float16")),
    ),
    "coded activations": (
        {"a": "uint8", "quant": replace(SPEC, activations="int8")},
        {"activations_bits": 8},
        CODE / 2 + 3 * U32 + grown(11) * (1 + CODE / 2 + 3 * U32),
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_is_what_its_arithmetic_implies_and_no_more(name: str) -> None:
    """Neither smaller, which would refuse what is right, nor larger, which would hide faults."""
    fields, options, share = BOUNDS[name]
    problem = Problem("matvec", 2, 8, **fields)
    promise = Arithmetic(**{"accumulator": "float32", "chain": lambda p, q: 7, **options})
    ones = Magnitudes(np.ones((2, 8)), np.ones((8, 1)), np.full((2, 1), 8.0), 0.0)
    bound = sum_error(problem, promise, {}, ones)
    np.testing.assert_allclose(bound, 8 * share, rtol=1e-3 if "16" in str(fields) else 1e-10)
    bound = sum_error(problem, promise, {}, replace(ones, reference_error=0.5))
    np.testing.assert_allclose(bound, 8 * (share + 0.5), rtol=1e-3)


def test_a_bound_counts_products_that_underflow() -> None:
    zeros = Magnitudes(np.zeros((2, 8)), np.zeros((8, 1)), np.zeros((2, 1)), 0.0)
    for name in FLOATS:
        promise = Arithmetic(name, chain=lambda p, q: 1, product="float16")
        problem = Problem("matvec", 2, 8, a=name, b=name, out=name)
        bound = sum_error(problem, promise, {}, zeros)
        np.testing.assert_allclose(bound, 8 * (SMALLEST[name] + 2.0**-24), rtol=0.02)
    for name in COMPLEX:
        promise = Arithmetic("float32", chain=lambda p, q: 1)
        problem = Problem("matvec", 2, 8, a=name, b=name, out=name)
        bound = sum_error(problem, promise, {}, zeros)
        np.testing.assert_allclose(bound, 16 * 2.0**-149, rtol=0.01)
    promise = Arithmetic("float32", chain=lambda p, q: 1, inputs="float16")
    ones = replace(zeros, b=np.ones((8, 1)))  # an operand's own underflow changes it by half of it
    bound = sum_error(Problem("matvec", 2, 8), promise, {}, ones)
    np.testing.assert_allclose(bound, 8 * SMALLEST["float16"] / 2, rtol=0.01)
    problem = Problem("matvec", 2, 8, a="uint8", b="float16", quant=SPEC)  # weights underflow
    bound = sum_error(problem, promise, {}, replace(zeros, b=np.ones((8, 1))))
    np.testing.assert_allclose(bound, 8 * SMALLEST["float16"], rtol=0.01)


def test_a_grouped_bound_rounds_the_codes_alone() -> None:
    tokens, ones = np.full((3, 1), 8.0), np.ones((1, 2))
    sizes = Magnitudes(tokens, ones, tokens @ ones, 0.0)
    plain = Problem("grouped", 3, 2, 8, batch=2)
    promise = Arithmetic("float32", chain=lambda p, q: 7)
    np.testing.assert_allclose(sum_error(plain, promise, {}, sizes), 8 * grown(7))
    coded = replace(plain, a="float16", b="uint8", quant=SPEC)
    promise = replace(promise, inputs="float16")
    share = grown(3, "float16") + grown(11) * (1 + grown(3, "float16"))
    np.testing.assert_allclose(sum_error(coded, promise, {}, sizes), 8 * share, rtol=1e-3)
    nothing = replace(sizes, product=np.zeros((3, 2)))  # of codes that underflow
    bound = sum_error(coded, promise, {}, nothing)
    np.testing.assert_allclose(bound, 8 * SMALLEST["float16"], rtol=0.01)


def test_32_activations_share_a_scale_whatever_groups_the_matrix_has() -> None:
    sizes = np.repeat([1.0, 4.0, 2.0, 0.5, 3.0], 16)[:, None]
    magnitudes = Magnitudes(np.eye(80), sizes, np.zeros((80, 1)), 0.0)
    promise = Arithmetic("float32", chain=lambda p, q: 1, activations_bits=8)
    of_group = {
        GROUPED: [4, 4, 2, 2, 3],
        SPEC: [4, 4, 2, 2, 3],
        replace(SPEC, group_size=None): [4, 4, 2, 2, 3],
        replace(GROUPED, transposed=True): [4] * 5,
        replace(GROUPED, has_perm=True): [4] * 5,
    }
    for spec, largest in of_group.items():
        problem = Problem("matvec", 80, 80, a="uint8", quant=replace(spec, activations="int8"))
        bound = sum_error(problem, promise, {}, magnitudes)[:, 0]
        np.testing.assert_allclose(bound, np.repeat(largest, 16) * (CODE / 2), rtol=1e-4)
        whole = sum_error(problem, promise, {}, magnitudes, whole_codes=True)[:, 0]
        np.testing.assert_allclose(whole, sizes[:, 0] * 4 * U32, rtol=1e-4)


def test_an_empty_sum_has_no_activations_to_round() -> None:
    empty = Magnitudes(np.zeros((5, 0)), np.zeros((0, 1)), np.zeros((5, 1)), 0.0)
    promise = Arithmetic("float32", chain=lambda p, q: 1, activations_bits=8)
    for spec in (SPEC, GROUPED):
        problem = Problem("matvec", 5, 0, a="uint8", quant=replace(spec, activations="int8"))
        assert (sum_error(problem, promise, {}, empty) == 0).all()


def test_a_narrower_result_is_rounded_once_more() -> None:
    magnitude, error = np.array([[3.0], [0.0]]), np.array([[0.25], [0.0]])
    for out in ("float16", "bfloat16", *FLOAT8):
        problem, u = Problem("matvec", 2, 8, out=out), UNIT_ROUNDOFF[out]
        for accumulator in ("float32", "int32"):
            promise = Arithmetic(accumulator, chain=lambda p, q: 1)
            bound = result_error(problem, promise, magnitude, error)
            wanted = [0.25 * (1 + u) + 3 * u + SMALLEST[out] / 2, SMALLEST[out] / 2]
            np.testing.assert_allclose(bound[:, 0], wanted, rtol=1e-12)
    same_dtype = Problem("matvec", 2, 8)
    assert result_error(same_dtype, Arithmetic("float32", chain=None), magnitude, error) is error


@pytest.mark.parametrize("name", FLOATS + FLOAT8)
def test_smallest_numbers_are_those_of_the_dtype(name: str) -> None:
    import ml_dtypes

    wide = name in ("float64", "float32")
    info = np.finfo(name) if wide else ml_dtypes.finfo(name)
    assert SMALLEST[name] == float(info.smallest_subnormal)
    assert SMALLEST["tf32"] == SMALLEST["float32"] * 2**13
    assert (SMALLEST["complex64"], SMALLEST["complex128"]) == (2.0**-149, 2.0**-1074)


def test_sums_are_exact_as_long_as_every_number_is() -> None:
    plain = Arithmetic("float32", chain=lambda p, q: 1)
    half = replace(plain, product="float16")
    coded = replace(plain, activations_bits=8)
    for promise, product, below, right in (
        (plain, 1e9, 2**24, True),
        (plain, 1.0, 2**24 + 1, False),
        (half, 2**11, 2**24, True),
        (half, 2**11 + 1, 1, False),
        (coded, 1.0, 1, False),
        (replace(plain, accumulator="int32"), 1.0, 2**40, True),
        (replace(plain, accumulator="float16"), 1.0, 2**11, True),
        (replace(plain, accumulator="float16"), 1.0, 2**11 + 1, False),
    ):
        inputs: Any = SimpleNamespace(largest_product=product, exact_below=below)
        assert sums_are_exact(promise, inputs) is right


# Overflow.


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float8_e5m2"])
def test_overflow_threshold_is_where_conversion_gives_infinity(name: str) -> None:
    edge = overflow_threshold(name)
    wide = np.float64 if name == "float32" else np.float32  # what conversions go through
    below = np.nextafter(wide(edge), wide(0))
    with np.errstate(over="ignore"):
        values = np.array([wide(edge), below]).astype(numpy_dtype(name))
    assert np.isinf(values.astype(np.float64)).tolist() == [True, False]


def test_overflow_of_half_results() -> None:
    problem = make_problem("matvec", 4, 3, 1, ("float32", "float32", "float16"))
    inputs = make_inputs(problem, "normal", 1)
    inputs.a[...] = [[3e4, 3e4, 5504], [3e4, 3e4, 5600], [-3e4, -3e4, -5520], [3e4, 3e4, 5490]]
    inputs.b[...] = 1
    fresh = replace(inputs, fingerprints=make_fingerprints(inputs))
    truth = reference(problem, fresh.a, fresh.b)

    def ok(*values: float) -> bool:
        fresh.out[...] = values
        return judge(problem, arithmetic(problem), {}, fresh, fresh.out, truth).ok

    assert ok(65504, np.inf, -np.inf, 65504)
    assert ok(65504, np.inf, -65504, 65504)  # 65520 lies on the edge, and sums may be off
    assert not ok(65504, 65504, -np.inf, 65504)
    assert not ok(65504, -np.inf, -np.inf, 65504)
    assert not ok(65504, np.nan, -np.inf, 65504)
    assert not ok(np.inf, np.inf, -np.inf, 65504)
    assert not ok(65504, np.inf, np.inf, 65504)


@pytest.mark.parametrize("name", FLOAT8)
def test_overflow_of_8_bit_results(name: str) -> None:
    """Conversions differ there: infinity, NaN, or the largest number; but only at the edge."""
    problem = make_problem("matvec", 3, 3, 1, ("float32", "float32", name))
    inputs = make_inputs(problem, "normal", 1)
    edge, largest = overflow_threshold(name), {"float8_e4m3fn": 448.0}.get(name, 57344.0)
    big = 2.0**18 * edge  # |A| |B|, so that sums may be off by a tenth of the edge
    inputs.a[...] = [[big, edge * 1.5, -big], [big, edge * 0.99, -big], [0, edge * 0.75, 0]]
    inputs.b[...] = 1
    fresh = replace(inputs, fingerprints=make_fingerprints(inputs))
    truth = reference(problem, fresh.a, fresh.b)

    def ok(*values: float) -> bool:
        fresh.out[...] = np.array(values, np.float32).astype(fresh.out.dtype)
        return judge(problem, arithmetic(problem), {}, fresh, fresh.out, truth).ok

    inside = edge * 0.75
    for over in (np.nan, largest, np.inf if name == "float8_e5m2" else np.nan):
        assert ok(over, largest, inside)
        assert ok(over, over, inside)
        assert not ok(over, over, over)
    assert not ok(-largest, largest, inside)
    assert not ok(largest / 2, largest, inside)
    assert not ok(largest, -largest, inside)


def make_fingerprints(inputs: Any) -> Any:
    return tuple(frame.buffer.tobytes() for frame in inputs.frames[1:])


def test_overflow_of_partial_sums_excuses_only_non_finite_results() -> None:
    problem = make_problem("matvec", 2, 4, 1, F32)
    inputs = make_inputs(problem, "normal", 1)
    inputs.a[...] = [[3e38, 3e38, -3e38, -3e38], [1, 2, 3, 4]]
    inputs.b[...] = 1
    fresh = replace(inputs, fingerprints=make_fingerprints(inputs))
    for values, ok in (((0, 10), True), ((np.nan, 10), True), ((0, np.inf), False)):
        fresh.out[...] = values
        assert check(fresh, arithmetic(problem), {}, fresh.out).ok is ok
