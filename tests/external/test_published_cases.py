"""Cases that other projects publish as data: shapes, NaN tables, and wrong answers once given.

The comments name where each case was reported; the tests are our own.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.core.problem import numpy_dtype
from products import ARRANGEMENTS, assert_same, exact, small

S, M, L = 5, 10, 20

# The shape pairs of PyTorch's OpInfo samples of torch.matmul.
OPINFO = [
    ((L,), (L,)), ((S, M), (M,)), ((M,), (M, S)), ((S, M), (M, S)), ((S, 0), (0, M)),
    ((S, S, M), (M,)), ((S, S, M), (M, S)), ((S, S, 0), (0, S)), ((M,), (S, M, S)),
    ((S, M), (S, M, S)), ((0, 0), (S, 0, 0)), ((S, S, M, M), (S, S, M, S)), ((S, S, M, M), (M,)),
    ((M,), (S, S, M, S)), ((S, S, S), (1, S, S)),
]  # fmt: skip


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int8", "complex64"]
)
@pytest.mark.parametrize(("a", "b"), OPINFO)
def test_pytorch_s_shape_pairs(a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(1)
    left, right = small(rng, a, dtype), small(rng, b, dtype)
    assert_same(
        gm.matmul(left, right), exact("matmul", left, right), {"int8": "int32"}.get(dtype, dtype)
    )


INF, NAN = np.inf, np.nan

# OpenBLAS utest and R's reg-BLAS: rows of A, x, and A x by the IEEE rules.
NAN_TABLE = [
    ([[0.0, 0.0]], [INF, NAN], [NAN]),
    ([[0.0, 1.0]], [INF, 1.0], [NAN]),
    ([[NAN, 1.0]], [0.0, 0.0], [NAN]),
    ([[0.0, 2.0], [1.0, 1.0]], [NAN, 0.0], [NAN, NAN]),
    ([[INF, 1.0]], [1.0, 1.0], [INF]),
    ([[INF, INF]], [1.0, -1.0], [NAN]),
    ([[-INF, 5.0]], [2.0, 1.0], [-INF]),
    ([[INF, 0.0], [0.0, 1.0]], [0.0, 3.0], [NAN, 3.0]),
    ([[1.0, 1.0], [INF, 1.0]], [1.0, 1.0], [2.0, INF]),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("how", ["row", "col", "step_two", "reversed"])
@pytest.mark.parametrize(("A", "x", "y"), NAN_TABLE)
def test_nan_and_inf_tables(A: Any, x: Any, y: Any, how: str, dtype: str) -> None:
    kind = numpy_dtype(dtype)
    left, vector = (
        ARRANGEMENTS[how](np.array(A).astype(kind)),
        ARRANGEMENTS[how](np.array(x).astype(kind)),
    )
    with np.errstate(invalid="ignore"):
        for result in (
            gm.matvec(left, vector),
            gm.vecmat(vector, left.T),
            gm.matmul(left, np.stack([vector, vector], axis=1))[:, 1],
        ):
            np.testing.assert_array_equal(result.astype("f8"), y)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_lies_beside_the_operands_does_not_leak_in(dtype: str) -> None:
    """OpenBLAS 171 and 746: NaN next to a vector, or in a buffer left from before."""
    for n in (1, 3, 7, 15, 16, 17, 33, 100):
        around = np.full((n + 40, n + 40), np.nan, dtype)
        A, x = around[20 : 20 + n, 20 : 20 + n], np.full(n + 40, np.nan, dtype)[20 : 20 + n]
        A[...], x[...] = 1, 2
        gm.matmul(np.full((50, 50), np.nan, dtype), np.full((50, 50), np.nan, dtype))
        for operand in (A, A.T):
            np.testing.assert_array_equal(gm.matvec(operand, x), 2 * n)
            np.testing.assert_array_equal(gm.vecmat(x, operand), 2 * n)
            np.testing.assert_array_equal(gm.matmul(operand, operand), n)


def test_fresh_and_given_results_of_every_order() -> None:
    """numpy 29164: some orders of `out` came back as uninitialised memory."""
    rng = np.random.default_rng(2)
    A, B = small(rng, (5, 3), "float32"), small(rng, (3, 7), "float32")
    hows = ["row", "col", "step_two", "reversed", "sliced"]
    for how_a, how_b, how_out in itertools.product(hows, repeat=3):
        out = ARRANGEMENTS[how_out](np.full((5, 7), np.nan, "f4"))
        gm.matmul(ARRANGEMENTS[how_a](A), ARRANGEMENTS[how_b](B), out=out)
        assert_same(out, exact("matmul", A, B), "float32")


def test_the_transposed_product_is_the_transpose() -> None:
    """numpy 24903: A B differed from (B^T A^T)^T at 625 x 5."""
    rng = np.random.default_rng(3)
    A, B = rng.standard_normal((625, 5)), rng.standard_normal((5, 625))
    first, second = gm.matmul(A, B), gm.matmul(B.T, A.T).T
    bound = 10 * 2.0**-53 * (np.abs(A) @ np.abs(B))
    assert (np.abs(first - second) <= bound).all()


def test_strides_of_zero() -> None:
    """numpy 12494: broadcast operands."""
    rng = np.random.default_rng(4)
    row = small(rng, (1, 30))
    for A in (np.broadcast_to(row, (20, 30)), np.broadcast_to(row.T, (30, 20)).T):
        x = small(rng, (30,))
        assert_same(gm.matvec(A, x), exact("matvec", A, x), "float64")
        assert_same(gm.matmul(A, A.T), exact("matmul", A, A.T), "float64")
    one = np.broadcast_to(np.float64(3), (20, 30))
    assert_same(gm.matvec(one, one[0]), np.full(20, 270.0), "float64")


def test_column_major_times_column_major() -> None:
    """numpy-quaddtype 89: the product of two Fortran-ordered matrices was wrong."""
    rng = np.random.default_rng(5)
    for dtype in ("float32", "float16", "int16"):
        A = np.asfortranarray(small(rng, (17, 23), dtype))
        B = np.asfortranarray(small(rng, (23, 11), dtype))
        assert_same(gm.matmul(A, B), exact("matmul", A, B), {"int16": "int64"}.get(dtype, dtype))


@pytest.mark.parametrize("shape", [(3, 3), (16, 16), (17, 33), (64, 64), (65, 127), (130, 1)])
def test_beta_zero_at_full_and_edge_tiles(shape: tuple[int, int]) -> None:
    """OpenBLAS 929, rocBLAS 538, rten 81: NaN in C came through where beta is 0."""
    rng = np.random.default_rng(6)
    A, B = small(rng, (shape[0], 20), "float32"), small(rng, (20, shape[1]), "float32")
    C = np.full(shape, np.nan, np.float32)
    assert gm.gemm(A, B, C, alpha=2, beta=0) is C
    assert_same(C, 2 * exact("matmul", A, B), "float32")


def test_an_infinity_in_one_row_leaves_the_others_alone() -> None:
    """A tile that reads past its row and multiplies by a zero pad spoils the row above."""
    for dtype, n in itertools.product(("float32", "float64", "float16"), (15, 16, 17, 31, 33, 65)):
        A, B = np.ones((9, n), dtype), np.ones((n, 9), dtype)
        for row in range(9):
            A[row, 0] = np.inf
            C = gm.matmul(A, B)
            assert np.isposinf(C[row]).all()
            np.testing.assert_array_equal(np.delete(C, row, 0), n)
            y = gm.matvec(A, B[:, 0].copy())
            assert np.flatnonzero(np.isinf(y)).tolist() == [row]
            A[row, 0] = 1
