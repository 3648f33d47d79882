"""`gm.prepare` on the host: a copy that stands where the array did."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.arrays.prepared import PreparedMatrix
from gemmule.core.problem import numpy_dtype

DTYPES = ("float64", "float32", "float16")


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_are_those_of_the_array(dtype: str, batch: tuple[int, ...]) -> None:
    A, B = numbers(*batch, 20, 30, dtype=dtype), numbers(30, 10, dtype=dtype)
    for laid in (B, np.asfortranarray(B)):
        right, left = gm.prepare(laid), gm.prepare(A, side="left")
        wanted = gm.matmul(A, laid)
        plan = gm.plan("matmul", A, right)
        out = np.empty_like(wanted)
        found = [
            gm.matmul(A, right),
            A @ right,
            left @ laid,
            gm.matmul(left, right),
            plan(A, right),
        ]
        found += [gm.matmul(A, right, out=out), gm.matmul(A, right), plan(A, right, out=out)]
        for one in found:
            assert np.array_equal(one, wanted)
        assert found[-1] is out


def test_vectors_scalars_and_transposes() -> None:
    A, B, x = numbers(20, 30), numbers(30, 10), numbers(30)
    right, left = gm.prepare(B), gm.prepare(A, side="left")
    assert np.array_equal(gm.vecmat(x, right), gm.vecmat(x, B))
    assert np.array_equal(x @ right, gm.matmul(x, B))
    assert np.array_equal(gm.matvec(left, x), gm.matvec(A, x))
    assert np.array_equal(B.T @ left.T, B.T @ A.T)
    C = numbers(20, 10)
    expected = gm.gemm(A, B, C.copy(), alpha=2, beta=-1)
    assert np.array_equal(gm.gemm(A, right, C, alpha=2, beta=-1), expected)


def test_it_is_a_copy_that_nobody_writes() -> None:
    A, B = numbers(20, 30), numbers(30, 10)
    prepared, wanted = gm.prepare(B), gm.matmul(A, B)
    B[:] = np.nan
    assert np.array_equal(A @ prepared, wanted)
    assert not prepared.array.flags.writeable
    assert not prepared.T.array.flags.writeable
    assert not np.shares_memory(prepared.array, B)


def test_what_lies_with_gaps_is_packed_and_told() -> None:
    A, wide = numbers(20, 30), numbers(30, 20)
    prepared = gm.prepare(wide[:, ::-2])
    plan = gm.plan("matmul", A, prepared)
    assert plan.problem.layout_b == "row"
    assert gm.plan("matmul", A, wide[:, ::-2]).problem.layout_b == "strided"
    assert np.allclose(plan(A, prepared), A @ wide[:, ::-2], atol=1e-5)
    assert "prepared   B on the right: read by" in plan.explain()
    assert "no rung packs it" in plan.explain()
    assert "1,200 bytes" in plan.explain()
    assert "packed for no rung, 1,200 bytes" in repr(prepared)
    assert (prepared.ndim, prepared.dtype, prepared.nbytes) == (2, "float32", 1200)


def test_what_is_refused() -> None:
    A, B = numbers(20, 30), numbers(30, 10)
    prepared = gm.prepare(B)
    with pytest.raises(ValueError, match="prepared to stand on the right"):
        prepared @ A
    with pytest.raises(ValueError, match="stays where it is"):
        gm.matmul(A, prepared, device="cuda")
    with pytest.raises(ValueError, match="no rung packs operands"):
        gm.prepare(B, rung="blas")
    with pytest.raises(TypeError, match="never written"):
        gm.matmul(A, B, out=prepared)
    with pytest.raises(ValueError, match="30 columns"):
        gm.matmul(A, gm.prepare(A))


def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    A, B = torch.randn(20, 30), torch.randn(30, 10).to(torch.bfloat16)
    prepared = gm.prepare(B.float())
    assert isinstance(prepared, PreparedMatrix)
    assert torch.equal(A @ prepared, gm.matmul(A, B.float()))
    assert gm.prepare(B).dtype == "bfloat16"
    assert gm.matmul(A.to(torch.bfloat16), gm.prepare(B)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no gradient"):
        gm.matmul(A.requires_grad_(), prepared)
    with torch.no_grad():
        assert gm.matmul(A, prepared).shape == (20, 10)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_pickled_matrix_is_made_anew_and_stays_read_only(dtype: str, order: Any) -> None:
    rng = np.random.default_rng(6)
    S = np.array(rng.integers(-3, 4, (6, 6)), numpy_dtype(dtype), order=order)
    X = rng.integers(-3, 4, (6, 6)).astype(numpy_dtype(dtype))
    P = gm.prepare(S)
    for made in (pickle.loads(pickle.dumps(P)), copy.copy(P), copy.deepcopy(P)):
        assert (made.form, made.side, made.device) == (P.form, P.side, P.device)
        assert not made.array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            gm.matmul(X, made, out=made.array)
        spread = np.zeros((6, 12), numpy_dtype(dtype))[:, ::2]  # by the way that reads addresses
        np.testing.assert_array_equal(gm.matmul(X, made, out=spread), X @ S)
    again = pickle.loads(pickle.dumps(P))
    assert again.operand.pointer == again.array.__array_interface__["data"][0]


def test_it_becomes_an_array_again() -> None:
    S = np.arange(6.0).reshape(2, 3)
    P = gm.prepare(S)
    assert np.shares_memory(np.asarray(P), P.array)
    assert not np.asarray(P).flags.writeable
    for made in (np.array(P), np.asarray(P.T).T, np.asarray(P, "float32")):
        np.testing.assert_array_equal(made, S)
    assert np.array(P).flags.writeable


def test_on_the_left_of_a_quantised_matrix() -> None:
    rng = np.random.default_rng(7)
    a, Q = rng.standard_normal((3, 128), np.float32), gm.quantize(rng.standard_normal((128, 6)))
    P = gm.prepare(a, side="left")
    for product in (P @ Q, gm.matmul(P, Q), gm.plan("matmul", P, Q)(P, Q)):
        np.testing.assert_array_equal(product, a @ Q)
    with pytest.raises(ValueError, match="left"):
        gm.matmul(gm.prepare(a), Q)
