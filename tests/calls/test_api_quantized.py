"""Quantised matrices wherever a matrix may stand, on the host.

Codes, scales and activations are small integers, so every product is exact in float32.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.core.problem import UNIT_ROUNDOFF, numpy_dtype
from gemmule.quant.matrix import QuantizedMatrix
from products import ARRANGEMENTS, Array, misaligned, small
from quantized_products import dtype_for

M, N = 13, 45


def matrix(bits: int, group_size: int | None, zeros: bool, seed: int = 1) -> QuantizedMatrix:
    """Return an (M, N) matrix whose scales and zero points differ from group to group."""
    rng = np.random.default_rng(seed)
    width = N if bits == 8 else (N + 1) // 2
    codes = rng.integers(0, 256, (M, width)).astype(np.uint8)
    if bits == 4:
        codes[:, -1] &= 0x0F
    groups = (1, 1) if group_size is None else (M, 1 if group_size == -1 else -(-N // group_size))
    scales = rng.choice([0.25, 0.5, 1.0, 2.0], groups).astype(np.float32)
    points = rng.integers(0, 2**bits, groups).astype(np.float32) if zeros else None
    return QuantizedMatrix.from_parts(
        codes, scales, points, shape=(M, N), bits=bits, group_size=group_size
    )


QUANTS = [*itertools.product((4, 8), (7, 16, 128, -1, None), (True, False))]


def close(result: Any, weights: Array, x: Array, dtype: str) -> None:
    """Assert a product of exact sums: equal in float32 and wider, rounded once in a half."""
    truth = weights @ x.astype(np.float64)
    assert isinstance(result, np.ndarray)
    assert result.dtype == numpy_dtype(dtype)
    assert result.shape == truth.shape
    if dtype in ("float32", "float64"):
        np.testing.assert_array_equal(result, truth)
    else:
        error = np.abs(result.astype(np.float64) - truth)
        assert (error <= UNIT_ROUNDOFF[dtype] * np.abs(truth)).all()


def test_a_matrix_of_a_single_row_stands_before_and_behind_another() -> None:
    Q = matrix(4, 16, True)[:1]
    W = Q.dequantize("float64")
    rng = np.random.default_rng(2)
    for shape in ((N, 5), (N, 1), (2, N, 5), (N,)):
        X = small(rng, shape, "float32")
        np.testing.assert_array_equal(gm.matmul(Q, X), W @ X)
    for shape in ((5, N), (1, N), (2, 5, N), (N,)):
        X = small(rng, shape, "float32")
        np.testing.assert_array_equal(gm.matmul(X, Q.T), X @ W.T)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(("bits", "group_size", "zeros"), QUANTS)
def test_every_place_and_quantisation(
    bits: int, group_size: int | None, zeros: bool, dtype: str
) -> None:
    Q = matrix(bits, group_size, zeros)
    W = Q.dequantize("float64")
    rng = np.random.default_rng(2)
    x, z = small(rng, (N,), dtype), small(rng, (M,), dtype)
    B, Z = small(rng, (N, 3), dtype), small(rng, (4, M), dtype)
    close(gm.matvec(Q, x), W, x, dtype)
    close(gm.vecmat(z, Q), W.T, z, dtype)
    close(gm.matvec(Q.T, z), W.T, z, dtype)
    close(gm.vecmat(x, Q.T), W, x, dtype)
    close(gm.matmul(Q, B), W, B, dtype)
    close(gm.matmul(Z, Q).T, W.T, Z.T, dtype)
    close(gm.matmul(Q.T, Z.T), W.T, Z.T, dtype)
    close(gm.matmul(B.T, Q.T).T, W, B, dtype)
    close(gm.matmul(Q, x), W, x, dtype)
    close(gm.matmul(z, Q), W.T, z, dtype)


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (0,), (20,), (2, 1, 2)])
def test_batches_of_vectors(shape: tuple[int, ...]) -> None:
    Q = matrix(4, 16, zeros=True)
    W = Q.dequantize("float64")
    rng = np.random.default_rng(3)
    X, Z = small(rng, (*shape, N), "float32"), small(rng, (*shape, M), "float32")
    for options in ({}, {"batch_invariant": True}):
        np.testing.assert_array_equal(gm.matvec(Q, X, **options), X.astype("f8") @ W.T)
        np.testing.assert_array_equal(gm.vecmat(Z, Q, **options), Z.astype("f8") @ W)
    out = np.full((*shape, M), np.nan, "f4")
    assert gm.matvec(Q, X, out=out) is out
    np.testing.assert_array_equal(out, X.astype("f8") @ W.T)


@pytest.mark.parametrize("how", [h for h in ARRANGEMENTS if h != "zero_stride"])
def test_operands_and_results_of_any_strides(how: str) -> None:
    Q = matrix(4, 16, zeros=True)
    W = Q.dequantize("float64")
    rng = np.random.default_rng(4)
    x, X = small(rng, (N,), "float32"), small(rng, (5, N), "float32")
    arrange = ARRANGEMENTS[how]
    close(gm.matvec(Q, arrange(x)), W, x, "float32")
    np.testing.assert_array_equal(gm.matvec(Q, arrange(X)), X.astype("f8") @ W.T)
    np.testing.assert_array_equal(gm.matmul(Q, arrange(X).T), W @ X.T.astype("f8"))
    if how in ("col", "sliced", "reversed", "step_two"):
        out = arrange(np.full((M, 5), np.nan, "f4"))
        assert gm.matmul(Q, X.T, out=out) is out
        np.testing.assert_array_equal(out, W @ X.T.astype("f8"))


def test_permuted_columns() -> None:
    rng = np.random.default_rng(5)
    weights = rng.integers(0, 16, (M, N)).astype(np.float32)
    Q = gm.quantize(weights, bits=4, group_size=9, perm=rng.permutation(N))
    W = Q.dequantize("float64")
    x, z = small(rng, (N,), "float32"), small(rng, (M,), "float32")
    scale = np.abs(W) @ np.abs(x) * 2.0**-18
    assert (np.abs(gm.matvec(Q, x) - W @ x) <= scale).all()
    assert (np.abs(gm.vecmat(z, Q) - z @ W) <= np.abs(z) @ np.abs(W) * 2.0**-18).all()


def test_blas_forms_and_plans() -> None:
    Q = matrix(8, -1, zeros=True)
    W = Q.dequantize("float64")
    x, y = small(np.random.default_rng(6), (N,), "float32"), np.ones(M, np.float32)
    truth = 2 * (W @ x) - 1
    assert gm.gemv(Q, x, y, alpha=2, beta=-1) is y
    np.testing.assert_array_equal(y, truth)
    p = gm.plan("matvec", Q, x)
    np.testing.assert_array_equal(p(Q, x), W @ x)
    np.testing.assert_array_equal(p(Q, misaligned(x)), W @ x)
    other = matrix(8, -1, zeros=True, seed=9)
    np.testing.assert_array_equal(p(other, x), other.dequantize("float64") @ x)
    for different in (Q.T.T.T, matrix(8, 16, zeros=True), matrix(8, -1, zeros=False)):
        with pytest.raises(ValueError, match=r"this plan computes|along the summed axis"):
            p(different, x)


def test_int8_activations_only_by_name_and_within_their_bound() -> None:
    rng = np.random.default_rng(7)
    Q = gm.quantize(rng.standard_normal((64, 256)).astype("f4"), bits=4, group_size=64)
    W, x = Q.dequantize("float64"), rng.standard_normal(256, "float32")
    default = gm.plan("matvec", Q, x)
    assert default.rung.arithmetic(default.problem).activations_bits is None
    allowed = np.abs(W).sum(1) * np.abs(x).max() / 127
    here = [r.name for r in gm.ladder("quantized") if r.available() is None]
    named = [{"rung": name} for name in ("int8_activations",) if name in here]
    for options in ({}, *named):
        y = gm.matvec(Q, x, activations="int8", **options)
        assert (np.abs(y - W @ x) <= allowed).all()
        rounded = not np.array_equal(y, gm.matvec(Q, x))
        assert (
            rounded or not named
        )  # without the instructions the option permits and nobody uses it


NAMED = [
    rung.name for rung in gm.ladder("quantized", "cpu") if rung.available() is None
]  # machines without a rung's instructions leave it out


@pytest.mark.parametrize("name", NAMED)
def test_every_rung_by_name(name: str) -> None:
    rung = next(r for r in gm.ladder("quantized", "cpu") if r.name == name)
    dtype = numpy_dtype(dtype_for(rung))
    x = small(np.random.default_rng(8), (N,)).astype(dtype)
    taken = 0
    for (bits, group_size, zeros), turned in itertools.product(QUANTS, (False, True)):
        Q = matrix(bits, group_size, zeros)
        Q, v = (Q.T, small(np.random.default_rng(8), (M,)).astype(dtype)) if turned else (Q, x)
        columns = np.stack([v, v, v], axis=1)
        right = columns if rung.op == "matmul" else v
        options = {"activations": "int8" if "int8" in name else "float", "out_dtype": "float32"}
        function = gm.matmul if rung.op == "matmul" else gm.matvec
        problem = gm.plan(function.__name__, Q, right, **options).problem
        if rung.refusal(problem) is not None:
            with pytest.raises(ValueError, match=f"rung {name} cannot compute"):
                function(Q, right, rung=name, **options)
            continue
        result = function(Q, right, rung=name, **options)
        taken += 1
        W = Q.dequantize("float64")
        if "int8" in name:
            allowed = np.abs(W).sum(1) * 2 / 127
            error = np.abs(result - W @ right)
            assert (error <= (allowed[:, None] if right.ndim == 2 else allowed)).all()
        else:
            np.testing.assert_array_equal(result, W @ right)
    assert taken > 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda Q, x: gm.matvec(Q, x[:-1]), ValueError, "along the summed axis"),
        (lambda Q, x: gm.matvec(Q, x.astype("i4")), TypeError, "a quantised matrix multiplies"),
        (lambda Q, x: gm.matvec(Q, x.astype("c8")), TypeError, "a quantised matrix multiplies"),
        (lambda Q, x: gm.matmul(Q, Q.T), TypeError, "a quantised matrix multiplies"),
        (lambda Q, x: gm.matvec(x, Q), ValueError, "two or more dimensions"),
        (lambda Q, x: gm.matvec(Q, x, out=np.zeros(M)), TypeError, "out has dtype float64"),
        (lambda Q, x: gm.matvec(Q, x, rung="triple_loop"), ValueError, "cannot compute"),
    ],
)
def test_mistakes_are_told(call: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(matrix(4, 16, zeros=True), np.ones(N, np.float32))


def test_nan_and_inf_in_activations_spread() -> None:
    for bits, zeros in itertools.product((4, 8), (True, False)):
        Q = matrix(bits, 16, zeros)
        W = Q.dequantize("float64")
        for poison in (np.nan, np.inf):
            x = np.ones(N, np.float32)
            x[17] = poison
            with np.errstate(invalid="ignore"):
                truth = W @ x.astype("f8")
                np.testing.assert_array_equal(np.isnan(gm.matvec(Q, x)), np.isnan(truth))
                np.testing.assert_array_equal(np.isposinf(gm.matvec(Q, x)), np.isposinf(truth))
