"""A quantised matrix as a sequence of rows, and as an operator of SciPy's solvers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import gemmule as gm


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [None, -1, 5, 32])
@pytest.mark.parametrize("layout", ["row", "mma16"])
def test_a_slice_of_rows_holds_their_codes(bits: int, group_size: int | None, layout: str) -> None:
    weights = np.random.default_rng(3).standard_normal((37, 67)).astype(np.float32)
    Q = gm.quantize(weights, bits=bits, group_size=group_size).to(layout=layout)
    whole = Q.dequantize()
    for first, last in ((0, 37), (5, 21), (-4, None), (9, 9), (9, 5), (30, 99)):
        rows = slice(first, last)
        part = Q[rows]
        assert part.layout == layout
        assert part.shape == whole[rows].shape
        assert len(part) == len(whole[rows])
        np.testing.assert_array_equal(part.dequantize(), whole[rows])
    assert np.array_equal(Q[3:8].T.dequantize(), whole[3:8].T)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [None, -1, 1, 7, 8])
def test_parts_of_columns_are_cut_where_no_group_and_no_byte_is(
    bits: int, group_size: int | None
) -> None:
    weights = np.random.default_rng(3).standard_normal((5, 101)).astype(np.float32)
    Q = gm.quantize(weights, bits=bits, group_size=group_size)
    for world in (1, 2, 3, 8):
        meshes = [
            SimpleNamespace(ndim=1, size=lambda n=world: n, get_local_rank=lambda i=rank: i)
            for rank in range(world)
        ]
        for dim, matrix in ((1, Q), (0, Q.T), (0, Q), (1, Q.T)):
            parts = [matrix.shard(dim, mesh).local.dequantize() for mesh in meshes]
            np.testing.assert_array_equal(np.concatenate(parts, dim), matrix.dequantize())


def test_a_slice_keeps_the_order_of_columns() -> None:
    weights = np.random.default_rng(4).standard_normal((6, 8)).astype(np.float32)
    Q = gm.quantize(weights, bits=8, group_size=4)
    turned = type(Q).from_parts(
        Q.codes, Q.scales, Q.zeros, shape=(6, 8), bits=8, group_size=4, perm=np.arange(8)[::-1]
    )
    np.testing.assert_array_equal(turned[2:4].dequantize(), turned.dequantize()[2:4])


def test_what_is_no_slice_of_rows_is_refused_with_what_to_do() -> None:
    Q = gm.quantize(np.eye(8), bits=8)
    for other in (3, slice(0, 8, 2), slice(None, None, -1), (slice(0, 2), slice(0, 2)), [1, 2]):
        with pytest.raises(TypeError, match=r"cut by rows, Q\[first:last\]"):
            Q[other]  # type: ignore[index]
    with pytest.raises(ValueError, match="slice first, then transpose"):
        Q.T[:2]
    with pytest.raises(TypeError):
        list(Q)  # type: ignore[call-overload]


def test_scipy_takes_a_matrix_as_an_operator() -> None:
    linalg = pytest.importorskip("scipy.sparse.linalg")
    weights = np.random.default_rng(5).standard_normal((40, 30))
    Q = gm.quantize(weights, bits=8, group_size=10)
    operator, dense = linalg.aslinearoperator(Q), Q.dequantize("float64")
    x, y = np.ones(30), np.ones((40, 2))
    np.testing.assert_allclose(operator.matvec(x), dense @ x, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(operator.rmatmat(y), dense.T @ y, rtol=1e-5, atol=1e-4)
    found = linalg.svds(operator, k=3, v0=np.ones(30), return_singular_vectors=False)
    expected = np.linalg.svd(dense, compute_uv=False)[:3]
    np.testing.assert_allclose(np.sort(found)[::-1], expected, rtol=1e-4)
