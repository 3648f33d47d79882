"""Where NumPy's functions and SciPy's solvers meet this package's matrices, plans and vectors."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm

RNG = np.random.default_rng(3)
W = RNG.standard_normal((40, 30)).astype(np.float32)
Q = gm.quantize(W, bits=8, group_size=10)
X = RNG.standard_normal((30, 4)).astype(np.float32)


@pytest.mark.parametrize("matrix", [Q, gm.prepare(W, side="left")])
def test_numpy_matmul_is_ours(matrix: Any) -> None:
    wanted, out = gm.matmul(matrix, X), np.empty((40, 4), np.float32)
    np.testing.assert_array_equal(np.matmul(matrix, X), wanted)
    assert np.matmul(matrix, X, out=out) is out
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(np.matmul(X.T, matrix.T), X.T @ matrix.T)


def test_other_ufuncs_say_what_to_do() -> None:
    for call in (
        lambda: np.add(Q, 1),
        lambda: X[:, 0] + Q,
        lambda: np.matmul(Q, X, dtype=np.float64),
        lambda: np.multiply.outer(Q, 2),
    ):
        with pytest.raises(TypeError, match=r"multiply by @, np.matmul or gemmule's functions"):
            call()


def test_other_libraries_are_told_to_leave_the_operator_to_ours() -> None:
    """CuPy asks the object, where NumPy asks the class."""
    assert Q.__array_ufunc__ is None
    assert callable(type(Q).__array_ufunc__)


def test_numpy_writes_no_floats_for_codes() -> None:
    with pytest.raises(TypeError, match=r"Q\.save\('Q.safetensors'\), or give np.asarray\(Q\)"):
        np.save(io.BytesIO(), Q)
    for save in (np.savez, np.savez_compressed, np.save, np.savetxt):
        with pytest.raises(TypeError, match=rf"np\.{save.__name__} of a QuantizedMatrix"):
            save(io.BytesIO(), Q)
    dense = Q.dequantize()
    np.testing.assert_array_equal(np.einsum("ij,jk", Q, X), np.einsum("ij,jk", dense, X))
    assert np.shape(Q) == (40, 30)
    assert np.linalg.norm(Q) == np.linalg.norm(dense)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gm.matvec(W, X), r"for columns call gm.matmul\(A, X\)"),
        (lambda: gm.matvec(W, X[:, :1]), r"One vector has one axis: give x\[:, 0\]"),
        (lambda: gm.vecmat(np.ones((40, 2), "f4"), W), r"for columns call gm.matmul\(X.T, A\)"),
        (lambda: gm.matmul(W, X.T), r"For vectors that are rows call gm.matvec\(A, X\)"),
        (lambda: gm.matmul(W, np.stack([X.T] * 2)), r"rows call gm.matvec\(A, X\)"),
        (lambda: gm.gemv(W, X), "Use matvec for batches"),
    ],
)
def test_a_batch_where_a_vector_is_meant_says_what_to_call(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
def test_a_plan_is_an_operator_for_scipy(dtype: str) -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    A = W.astype(dtype)
    if dtype == "complex128":
        A = A + 1j * RNG.standard_normal(A.shape)
    operator = gm.plan("matvec", A, A[0]).operator(A)
    assert operator.dtype == np.dtype(dtype)
    x, y = A[1], A[:, 2]
    for ours, theirs in (
        (operator @ x, A @ x),
        (operator.matvec(x.reshape(-1, 1)), A @ x.reshape(-1, 1)),
        (operator @ A.T, A @ A.T),
        (operator.H @ y, A.conj().T @ y),
        (operator.H @ A, A.conj().T @ A),
        (operator.T @ y, A.T @ y),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    found = linalg.svds(operator, k=3, v0=np.ones(30, dtype), return_singular_vectors=False)
    wanted = np.linalg.svd(A, compute_uv=False)[:3]
    np.testing.assert_allclose(np.sort(found)[::-1], wanted, rtol=1e-3)


def test_a_plan_of_codes_solves() -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    S = gm.quantize(W.T @ W + 9 * np.eye(30, dtype=np.float32), bits=8, group_size=10)
    operator = gm.plan("matvec", S, X[:, 0]).operator(S)
    b = np.ones(30)
    x, failed = linalg.gmres(operator, b, rtol=1e-5)  # in double, which the plan is not
    assert not failed
    np.testing.assert_allclose(S.dequantize("float64") @ x, b, atol=1e-3)


def test_only_products_of_a_matrix_and_a_vector_are_operators() -> None:
    elsewhere = replace(gm.plan("matvec", W, W[0]), device="cuda:0")
    for plan in (gm.plan("vecmat", W[:, 0], W), gm.plan("matvec", W, X.T), elsewhere):
        with pytest.raises(ValueError, match="no product of one matrix and one vector"):
            plan.operator(W)


def test_expected_times_have_the_unit_that_shows_them() -> None:
    large = np.ones((4096, 4096), np.float16)
    told = gm.plan("matmul", large, large).explain()
    line = next(one for one in told.splitlines() if one.startswith("expected"))
    assert line.split()[2] in ("s,", "ms,")
    assert "GFLOP/s" in line
    assert "read ceiling" not in line  # arithmetic limits it
    assert " us, " in gm.plan("matvec", W, W[0]).explain()
