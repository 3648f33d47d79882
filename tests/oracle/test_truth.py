"""The parts of the right result: sums in doubled precision, NaN and infinity, weights, integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from gemmule.core.problem import COMPLEX
from gemmule.oracle import exact as exact_sums
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.problems import QUANTIZED_SIGNATURES, make_problem, random_case
from gemmule.oracle.truth import (
    FINITE,
    MINUS_INF,
    NOT_A_NUMBER,
    PLUS_INF,
    dequantized,
    nonfinite_map,
    reference,
)


def test_doubled_precision_matches_fractions() -> None:
    rng = np.random.default_rng(5)
    for k in (0, 1, 2, 3, 7, 16, 33):
        a = rng.standard_normal((4, k)) * 2.0 ** rng.integers(-200, 200, (4, k))
        b = rng.standard_normal((k, 3)) * 2.0 ** rng.integers(-200, 200, (k, 3))
        high, low = exact_sums.product(a, b)
        for i, j in np.ndindex(4, 3):
            terms = [Fraction(x) * Fraction(y) for x, y in zip(a[i], b[:, j], strict=True)]
            error = abs(Fraction(high[i, j]) + Fraction(low[i, j]) - sum(terms))
            size = sum(abs(t) for t in terms)
            assert error <= size * Fraction(exact_sums.relative_error(k))
            assert error <= size * Fraction(2) ** -99


def test_products_of_doubles_are_judged_by_doubled_precision() -> None:
    a, b = np.array([[2.0**60, 1.0, -(2.0**60)]]), np.ones(3)
    truth = reference(make_problem("matvec", 1, 3, 1, ("float64",) * 3), a, b)
    assert truth.values + truth.low == 1.0


def test_doubled_precision_works_block_by_block_and_in_batches() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((3, 700, 40)), rng.standard_normal((40, 30))
    high, low = exact_sums.product(a, b)
    np.testing.assert_allclose(high, a @ b, rtol=0, atol=1e-13)
    one, one_low = exact_sums.product(a[2, 650:651], b)
    assert np.array_equal(high[2, 650:651], one)
    assert np.array_equal(low[2, 650:651], one_low)


def test_doubled_precision_holds_one_block_of_products_at_a_time(
    fault: Callable[..., Any], limit: Callable[..., None]
) -> None:
    limit(exact_sums, _BLOCK=200)
    sizes: list[int] = []

    def seen(sound: Any, high: Any, low: Any) -> Any:
        sizes.append(high.size)
        return sound(high, low)

    fault(exact_sums, "_tree", seen)
    exact_sums.product(np.ones((2, 20, 3)), np.ones((3, 5)))
    assert sizes == [180, 180, 180, 60]  # six rows of 30 products, and what is left
    sizes.clear()
    exact_sums.product(np.ones((2, 100)), np.ones((100, 5)))
    assert sizes == [500, 500]  # a row at least


def test_doubled_precision_refuses_what_overflows() -> None:
    for value in (2.0**480, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"A holds .*2\^480"):
            exact_sums.product(np.full((1, 1), value), np.ones((1, 1)))


def _one_by_one(a: Any, b: Any) -> list[list[int]]:
    """The IEEE rule by counting, element by element, in plain Python."""

    def category(row: Any, column: Any) -> int:
        products = [x * y for x, y in zip(row, column, strict=True)]
        if any(map(math.isnan, products)) or {math.inf, -math.inf} <= set(products):
            return NOT_A_NUMBER
        if math.inf in products:
            return PLUS_INF
        return MINUS_INF if -math.inf in products else FINITE

    return [[category(row.tolist(), column.tolist()) for column in b.T] for row in a]


def test_nonfinite_map_is_the_ieee_rule() -> None:
    rng = np.random.default_rng(7)
    values = np.array([0.0, -0.0, 1.0, -2.0, 3.0, -1.0, np.inf, -np.inf, np.nan])
    seen: set[int] = set()
    for share in (0.05, 0.3):
        chances = [(1 - share) / 6] * 6 + [share / 3] * 3
        for k in range(7):
            for _ in range(60):
                a, b = (rng.choice(values, shape, p=chances) for shape in ((5, k), (k, 4)))
                found = nonfinite_map(a, b)
                assert found.tolist() == _one_by_one(a, b)
                seen |= set(found.ravel().tolist())
    assert seen == {FINITE, PLUS_INF, MINUS_INF, NOT_A_NUMBER}


def test_dequantised_weights_are_those_of_the_matrix() -> None:
    for seed in range(60):
        case = random_case(np.random.default_rng(seed), signatures=QUANTIZED_SIGNATURES)
        q = make_inputs(case.problem, "normal", seed).a
        weights, sizes = dequantized(q)
        assert np.array_equal(weights, q.dequantize("float64"))
        assert (sizes >= np.abs(weights)).all()


def test_integer_truth_is_exact_modulo_two_to_the_64() -> None:
    for signature in (("int64",) * 3, ("uint64",) * 3, ("int8", "uint8", "int64")):
        problem = make_problem("matmul", 3, 4, 9, signature)
        inputs = make_inputs(problem, "integers", 3)
        found = reference(problem, inputs.a, inputs.b).values
        for i, j in np.ndindex(3, 4):
            total = sum(int(x) * int(y) for x, y in zip(inputs.a[i], inputs.b[:, j], strict=True))
            assert int(found[i, j]) % 2**64 == total % 2**64


def test_complex_truth() -> None:
    for name in COMPLEX:
        problem = make_problem("matmul", 3, 4, 5, (name,) * 3)
        inputs = make_inputs(problem, "normal", 3)
        found = reference(problem, inputs.a, inputs.b).values
        wanted = inputs.a.astype(complex) @ inputs.b.astype(complex)
        np.testing.assert_allclose(found[:3] + 1j * found[3:], wanted, rtol=1e-13)
