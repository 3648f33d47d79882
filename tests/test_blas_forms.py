"""gemv and gemm: alpha, beta, and what must not be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.core.problem import numpy_dtype
from products import ARRANGEMENTS, assert_same, exact, small

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "uint16", "complex128"]
RESULT = {"uint16": "uint64"}


def operands(dtype: str) -> tuple[Any, Any, Any, Any, str]:
    rng = np.random.default_rng(1)
    A, x, B = small(rng, (6, 11), dtype), small(rng, (11,), dtype), small(rng, (11, 4), dtype)
    return A, x, B, rng, RESULT.get(dtype, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [0, 1, 2, 3])
@pytest.mark.parametrize("beta", [0, 1, 2])
def test_alpha_and_beta(dtype: str, alpha: int, beta: int) -> None:
    A, x, B, rng, result = operands(dtype)
    for function, op, right, shape in (
        (gm.gemv, "matvec", x, (6,)),
        (gm.gemm, "matmul", B, (6, 4)),
    ):
        y = small(rng, shape, result)
        truth = alpha * exact(op, A, right) + beta * exact(
            "matmul", y, np.eye(shape[-1], dtype=int)
        )
        assert function(A, right, y, alpha=alpha, beta=beta) is y
        assert_same(y, truth, result)
        if beta == 0:
            assert_same(function(A, right, alpha=alpha), truth, result)


def test_fractions_and_negatives() -> None:
    A, x, _, _, _ = operands("float32")
    y = np.ones(6, np.float32)
    gm.gemv(A, x, y, alpha=-0.5, beta=0.25)
    assert_same(y, -0.5 * exact("matvec", A, x) + 0.25, "float32")
    y = np.ones(6, np.float32)
    gm.gemv(A, x, y, alpha=np.float32(-0.5), beta=np.int64(2))
    assert_same(y, -0.5 * exact("matvec", A, x) + 2, "float32")
    z = np.ones(6, np.complex128)
    gm.gemv(A.astype("c16"), x.astype("c16"), z, alpha=1j, beta=-1j)
    assert_same(z, 1j * exact("matvec", A, x) - 1j, "complex128")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("how", ["row", "reversed", "step_two"])
def test_beta_zero_never_reads_y(dtype: str, how: str) -> None:
    A, x, B, _, _ = operands(dtype)
    for poison in (np.nan, np.inf, -np.inf):
        y = ARRANGEMENTS[how](np.full(6, poison, numpy_dtype(dtype)))
        C = ARRANGEMENTS[how](np.full((6, 4), poison, numpy_dtype(dtype)))
        assert_same(gm.gemv(A, x, y, alpha=2), 2 * exact("matvec", A, x), dtype)
        assert_same(gm.gemm(A, B, C, alpha=2), 2 * exact("matmul", A, B), dtype)
        y[...] = poison
        assert_same(gm.gemv(A, x, y, alpha=0), np.zeros(6), dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_alpha_zero_reads_neither_operand(dtype: str) -> None:
    A, x, B = np.full((6, 11), np.nan, dtype), np.full(11, np.inf, dtype), np.ones((11, 4), dtype)
    y, C = np.arange(6).astype(dtype), np.ones((6, 4), dtype)
    assert_same(gm.gemv(A, x, y, alpha=0, beta=2), 2.0 * np.arange(6), dtype)
    assert_same(gm.gemm(A, B, C, alpha=0, beta=3), np.full((6, 4), 3.0), dtype)


def test_nan_in_y_stays_with_beta_one() -> None:
    A, x, _, _, _ = operands("float64")
    y = np.zeros(6)
    y[2] = np.nan
    gm.gemv(A, x, y, beta=1)
    assert np.flatnonzero(np.isnan(y)).tolist() == [2]


def test_empty_reductions_scale_y() -> None:
    y = np.full(3, 2.0)
    assert_same(gm.gemv(np.zeros((3, 0)), np.zeros(0), y, beta=3), np.full(3, 6.0), "float64")
    assert gm.gemm(np.zeros((0, 2)), np.zeros((2, 3))).shape == (0, 3)


@pytest.mark.parametrize("how", ["col", "sliced", "reversed", "step_two"])
def test_results_of_any_strides(how: str) -> None:
    A, _, B, rng, _ = operands("float32")
    C = ARRANGEMENTS[how](small(rng, (6, 4), "float32"))
    truth = exact("matmul", A, B) - 2 * C.astype("f8")
    assert gm.gemm(A, B, C, beta=-2) is C
    assert_same(C, truth, "float32")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda A, x: gm.gemv(A, x, beta=1), ValueError, "no array to add to"),
        (lambda A, x: gm.gemv(A[None], x), ValueError, "gemv takes operands of 2 and 1 dimensions"),
        (lambda A, x: gm.gemv(A, A), ValueError, "gemv takes operands of 2 and 1"),
        (lambda A, x: gm.gemm(A, x), ValueError, "gemm takes operands of 2 and 2"),
        (lambda A, x: gm.gemv(A, x[:2]), ValueError, "along the summed axis"),
        (lambda A, x: gm.gemv(A, x, np.zeros(4)), ValueError, r"out has shape \(4,\)"),
        (lambda A, x: gm.gemv(A, x, np.zeros(3, int)), TypeError, "kind float"),
        (lambda A, x: gm.gemv(A, x, x), ValueError, "overlaps an input"),
        (lambda A, x: gm.gemv(A, x, alpha="2"), TypeError, r"alpha is '2' of type str"),
        (lambda A, x: gm.gemv(A, x, alpha=1j), TypeError, "must be int or float"),
        (lambda A, x: gm.gemv(A.astype(int), x.astype(int), alpha=0.5), TypeError, "must be int"),
        (
            lambda A, x: gm.gemv(A.astype("u8"), x.astype("u8"), alpha=-1),
            ValueError,
            "alpha is -1, which uint64",
        ),
    ],
)
def test_mistakes_are_told(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(np.eye(3), np.ones(3))
