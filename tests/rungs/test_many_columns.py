"""Codes by many columns: every order of B and of the result, and more columns than go at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gemmule as gm
from gemmule.core.problem import UNIT_ROUNDOFF, numpy_dtype
from gemmule.rungs.quantized.cpu.blocks import products
from quantized_products import NAMES, activations, bound_of, make_matrix, rung_called

ORDERS = ("rows", "columns", "stepped")


def in_order(array: np.ndarray, order: str) -> np.ndarray:
    if order == "rows":
        return np.ascontiguousarray(array)
    if order == "columns":
        return np.asfortranarray(array)
    wide = np.zeros((2 * array.shape[0], 3 * array.shape[1]), array.dtype)
    wide[::2, ::3] = array
    return wide[::2, ::3]


@pytest.mark.parametrize("name", [n for n in ("packed_codes", "dequantise_blas") if n in NAMES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_order_of_operands_and_results(bits: int, dtype: str, name: str) -> None:
    """33 columns: a tile and a narrow one; 300: more than at once; 77 rows: no whole lines."""
    rung = rung_called(name)
    for (columns, zeros), order, into in itertools.product(
        [(17, "none"), (33, "fraction"), (products.MOST_COLUMNS + 44, "integer")], ORDERS, ORDERS
    ):
        Q = make_matrix(101, 333, bits, 64, "float32", zeros)
        B = in_order(activations((333, columns), dtype), order)
        C = in_order(np.full((101, columns), np.nan, numpy_dtype(dtype)), into)
        around = None if into != "stepped" else C.base
        before = None if around is None else around.copy()
        if around is not None:  # what lies between results stays as it is
            around[1::2] = before[1::2] = 7
        assert gm.matmul(Q, B, out=C, rung=name) is C
        truth = Q.dequantize("float64") @ B.astype(np.float64)
        limit = bound_of(rung, Q, B, dtype) + UNIT_ROUNDOFF[dtype] * np.abs(truth) * 1.01
        assert (np.abs(C.astype(np.float64) - truth) <= limit).all(), (columns, order, into)
        if around is not None:
            assert (around[1::2] == before[1::2]).all()


@pytest.mark.skipif("packed_codes" not in NAMES, reason="this CPU cannot run it")
def test_more_prompts_than_are_kept_and_a_change_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Q, rng = (
        make_matrix(600, 130, 4, 32, "float16", "integer", exact=True),
        np.random.default_rng(4),
    )
    for columns in (*range(17, 37), 17):
        monkeypatch.setattr(products, "thread_count", lambda columns=columns: 1 + columns % 3)
        B = rng.integers(-8, 9, (130, columns)).astype(np.float32)
        C = gm.matmul(Q, B, rung="packed_codes")
        assert np.array_equal(C, Q.dequantize("float64") @ B.astype(np.float64)), columns
