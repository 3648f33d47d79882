"""Scales and zero points that are searched for: never worse, and always finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmule.quant import rounding as rounding
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize
from quantized_products import SCALE_DTYPES, normal

pytestmark = pytest.mark.usefixtures("unwritten")


def errors_of(W: np.ndarray, Q: QuantizedMatrix, importance: Any = 1) -> np.ndarray:
    """Each row's weighted squared error, from the dequantised matrix."""
    return (importance * (Q.dequantize("float64") - W.astype(np.float64)) ** 2).sum(1)


@pytest.mark.parametrize("method", ["mse", "hqq"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_searched_scales_are_never_worse(
    method: str, bits: int, shift: float, scale_dtype: str
) -> None:
    W, importance = normal(40, 48) + np.float32(shift), np.random.default_rng(9).random(48) ** 4
    for group_size in (-1, None):
        for weights in (None, importance):
            options = {"importance": weights, "scale_dtype": scale_dtype}
            plain = quantize(W, bits, group_size, **options)
            found = quantize(W, bits, group_size, method=method, **options)
            count = np.ones(48) if weights is None else weights
            ours, theirs = errors_of(W, found, count), errors_of(W, plain, count)
            if group_size is None:
                ours, theirs = ours.sum(keepdims=True), theirs.sum(keepdims=True)
            assert (ours <= theirs * (1 + 1e-4)).all()
            relative = math.sqrt(ours.sum() / (count * W.astype(np.float64) ** 2).sum())
            assert found.error == pytest.approx(relative, rel=1e-3)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("group_size", [16, -1, None])
def test_equal_weights_have_small_zero_points_and_finite_products(
    scale_dtype: str, group_size: int | None
) -> None:
    x = np.ones((48, 5), np.float32)
    for value in (0.5, -3e-20, 1e3, 2.0**-140):
        for spread in (0.0, 1e-3, 1e-9):
            W = value * (1 + spread * normal(3, 48, dtype=np.float64))
            Q = quantize(W, 4, group_size, method="hqq", scale_dtype=scale_dtype)
            assert np.abs(Q.zeros).max() <= 2.0**17
            with np.errstate(over="raise"):
                expected = Q.dequantize("float64") @ x
                sizes = np.abs(Q.dequantize("float64")) @ x
            for product in (Q @ x, (x.T @ Q.T).T, (Q @ x[:, 0])[:, None]):
                assert (np.abs(product - expected) <= 1e-5 * sizes + 1e-43).all()
            if spread == 1e-3 and value > 0.1:  # the codes of nearly equal weights still count
                assert Q.error < 0.15 * spread + 0.01 * (scale_dtype != "float32") * spread


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_groups_of_zeros_have_products_of_exactly_zero(bits: int, method: str) -> None:
    W = normal(6, 96)
    W[2] = W[4, 32:] = 0
    x = normal(96, 3, 1) * 1e3
    for symmetric in (False, True):
        for group_size in (32, -1):
            Q = quantize(W, bits, group_size, symmetric, method=method)
            assert not (Q @ x)[2].any()
            assert not (Q @ x[:, 0])[2].any()
            assert not (x.T @ Q.T)[:, 2].any()
            assert Q.scales[2, 0] == 0
        blank = quantize(0 * W, bits, None, symmetric, method=method)
        assert not (blank @ x).any()
        assert blank.error == 0


def test_zero_points_beside_which_no_code_counts_are_refused(tmp_path: Path) -> None:
    parts = np.zeros((1, 4), np.uint8), np.full((1, 1), 2.0**-126, np.float32)
    for zero, message in ((-4.25e37, "quantise the weights again"), (2.0**33, r"within 2\^32")):
        with pytest.raises(ValueError, match=message):
            QuantizedMatrix.from_parts(
                *parts, np.full((1, 1), zero, np.float32), shape=(1, 4), bits=8, group_size=-1
            )
    most = np.full((1, 1), 2.0**32, np.float32)
    Q = QuantizedMatrix.from_parts(*parts, most, shape=(1, 4), bits=8, group_size=-1)
    assert np.isfinite(Q @ np.full((4, 2), 1e28, np.float32)).all()
    path = tmp_path / "q.safetensors"
    Q.save(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(most.tobytes(), np.float32(4e37).tobytes()))
    with pytest.raises(ValueError, match=r"q\.safetensors: zeros"):
        QuantizedMatrix.load(path)


def test_methods_reach_what_is_known_of_normal_weights() -> None:
    """A fine grid over scale and zero point of each group: no method of two numbers does better."""
    W = normal(30, 64, dtype=np.float64)
    best = np.full(30, np.inf)
    low, high = W.min(1, keepdims=True), W.max(1, keepdims=True)
    for shrink in np.linspace(1, 0.6, 41):
        for shift in np.linspace(-1, 1, 21):
            scale = (high - low) * shrink / 15
            zero = 7.5 - (low + high) / 2 / scale + shift
            codes = np.clip(np.rint(W / scale + zero), 0, 15)
            best = np.minimum(best, ((scale * (codes - zero) - W) ** 2).sum(1))
    found = {m: errors_of(W, quantize(W, 4, -1, method=m)).sum() for m in ("rtn", "mse", "hqq")}
    assert found["hqq"] < 1.05 * best.sum() < found["mse"] < found["rtn"]


def test_importance_moves_the_error_to_where_it_counts_less() -> None:
    W, importance = normal(50, 64), np.where(np.arange(64) % 8, 0.01, 1)
    plain, weighted = (
        quantize(W, 4, 64, method="hqq", importance=count) for count in (None, importance)
    )
    assert errors_of(W, weighted, importance).sum() < 0.6 * errors_of(W, plain, importance).sum()
    ragged = quantize(W[:, :50], 4, 16, method="hqq")  # the filled-up group is not fitted to zeros
    alone = quantize(W[:, 48:50], 4, 2, method="hqq")
    np.testing.assert_allclose(ragged.dequantize()[:, 48:], alone.dequantize(), rtol=1e-5)


@pytest.mark.parametrize("method", ["mse", "hqq"])
def test_importance_goes_with_its_column_where_columns_are_reordered(method: Any) -> None:
    W, importance = normal(5, 48), np.random.default_rng(9).random(48) ** 4
    perm = np.random.default_rng(3).permutation(48)
    made = quantize(W, 4, 16, method=method, perm=perm, importance=importance)
    plain = quantize(W[:, perm], 4, 16, method=method, importance=importance[perm])
    np.testing.assert_array_equal(made.codes, plain.codes)
    np.testing.assert_array_equal(made.scales, plain.scales)
    assert made.error == plain.error


def test_wrong_methods_and_importance() -> None:
    W = normal(2, 4)
    for words, options in (
        ("method is 'awq'", {"method": "awq"}),
        ("symmetric=True has none", {"method": "hqq", "symmetric": True}),
        (r"importance has shape \(3,\)", {"importance": np.ones(3)}),
        ("finite and not negative", {"importance": np.array([1, 1, -1, 1])}),
        ("finite and not negative", {"importance": np.array([1, 1, np.nan, 1])}),
    ):
        with pytest.raises(ValueError, match=words):
            quantize(W, **options)
    arrays = {"importance": np.ones(4), "hessian": np.eye(4), "perm": np.arange(4)}
    for name, given in arrays.items():
        options = {
            name: np.ma.masked_array(given),
            "method": "gptq" if name == "hessian" else "rtn",
        }
        with pytest.raises(TypeError, match=f"{name} .*mask"):  # what it hides would count
            quantize(W, **options)
