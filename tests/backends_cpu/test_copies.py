"""Copies of matrices that lie the other way, against NumPy's own, in every order and size."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gemmule.backends.cpu import copies

SHAPES = [(64, 64), (65, 97), (300, 41), (41, 300), (31, 4000), (4000, 31), (1, 5000), (7, 9)]
ORDERS = {
    "rows": lambda a: a.copy(),
    "columns": lambda a: a.T.copy().T,
    "backwards": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "columns, backwards": lambda a: a[::-1].T.copy().T[::-1],
    "a part": lambda a: np.pad(a, 3)[3:-3, 3:-3],
    "a part, by columns": lambda a: np.pad(a.T, 3)[3:-3, 3:-3].T,
}


@pytest.mark.parametrize("source", ORDERS)
@pytest.mark.parametrize("target", ORDERS)
def test_every_order_to_every_other(source: str, target: str) -> None:
    for number, shape in enumerate(SHAPES):
        numbers = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
        given, place = ORDERS[source](numbers), ORDERS[target](np.zeros_like(numbers))
        around = place if place.base is None else place.base
        before = float(around.sum())
        copies.laid(given, place)
        assert np.array_equal(place, numbers)
        np.testing.assert_allclose(around.sum(), before + numbers.sum(), atol=1e-2)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_numbers_are_converted_as_numpy_does(dtype: type) -> None:
    numbers = np.random.default_rng(5).standard_normal((130, 90)).astype(np.float32)
    place = np.zeros((90, 130), dtype).T
    copies.laid(numbers, place)
    assert np.array_equal(place, numbers.astype(dtype))


def test_rows_are_left_where_they_are() -> None:
    for numbers in (np.ones((80, 90)), np.ones(7), np.ones((2, 3, 4))):
        assert copies.in_rows(numbers) is numbers
    columns = np.arange(8000.0).reshape(100, 80).T
    rows = copies.in_rows(columns)
    assert rows.flags.c_contiguous
    assert np.array_equal(rows, columns)
    assert np.array_equal(copies.in_rows(np.arange(6)[::-1]), np.arange(6)[::-1])
