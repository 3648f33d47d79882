"""GPTQ: products nearer than by rounding alone, by the definition of its authors."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from gemmule.quant import second_order
from gemmule.quant.quantize import quantize
from quantized_products import SCALE_DTYPES, normal


def moments(n: int, rows: int = 400, seed: int = 3) -> np.ndarray:
    """X^T X of inputs that go together, as activations do."""
    rng = np.random.default_rng(seed)
    few = rng.standard_normal((rows, max(n // 4, 1))) @ rng.standard_normal((max(n // 4, 1), n))
    X = few + 0.3 * rng.standard_normal((rows, n)) * rng.exponential(1, n)
    return X.T @ X


def product_error(W: np.ndarray, Q: Any, H: np.ndarray) -> float:
    E = Q.dequantize("float64") - W
    return float(np.sqrt(np.trace(E @ H @ E.T) / np.trace(W.astype("float64") @ H @ W.T)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "group_size"), [(150, 32), (300, 48), (300, -1), (260, 200), (9, 4)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_products_are_nearer_than_by_any_other_method(
    bits: Any, n: int, group_size: int, symmetric: bool
) -> None:
    W, H = normal(24, n), moments(n)
    ours = quantize(W, bits, group_size, symmetric, method="gptq", hessian=H)
    error = product_error(W, ours, H)
    for method in ("rtn", "mse"):
        theirs = quantize(W, bits, group_size, symmetric, method=method, importance=np.diag(H))
        assert error < 0.9 * product_error(W, theirs, H)
    assert ours.error == pytest.approx(error, rel=1e-3)
    assert (ours.zeros is None) == symmetric


@pytest.mark.parametrize(("symmetric", "method"), [(False, "hqq"), (True, "mse")])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_where_no_error_can_be_made_up_for_codes_are_those_of_rounding(
    symmetric: bool, method: Any, scale_dtype: Any
) -> None:
    W = normal(20, 200)
    options = {"symmetric": symmetric, "scale_dtype": scale_dtype}
    square = (
        np.random.default_rng(5).exponential(1, 200) ** 3
    )  # of inputs that have no more in common
    ours = quantize(W, 4, 32, method="gptq", hessian=np.diag(square), **options)
    weigh = square / square.mean() + second_order.DAMPING
    # Of whole groups: the range of a short one is searched beside zeros that fill it up.
    theirs = quantize(W[:, :192], 4, 32, method=method, importance=weigh[:192], **options)
    assert np.array_equal(ours.codes[:, :96], theirs.codes)
    np.testing.assert_allclose(ours.scales[:, :6], theirs.scales, rtol=1e-6)


def by_definition(W: np.ndarray, Q: Any, H: np.ndarray) -> np.ndarray:
    """Codes as OBQ defines them: after each column the best change of all that are left."""
    damped = H + second_order.DAMPING * np.mean(np.diag(H)) * np.eye(len(H))
    current, codes = W.astype("float64"), np.empty(W.shape)
    for j in range(W.shape[1]):
        scale, zero = (part[:, j // Q.group_size] for part in (Q.scales, Q.zeros))
        codes[:, j] = np.clip(np.rint(current[:, j] / scale + zero), 0, 15)
        error = current[:, j] - (codes[:, j] - zero) * scale
        left = np.linalg.inv(damped[j:, j:])
        current[:, j:] -= np.outer(error, left[0] / left[0, 0])
    return codes


def test_each_column_is_rounded_after_the_best_change_for_those_before() -> None:
    W, H = normal(8, 200, dtype=np.float64), moments(200)
    Q = quantize(W, 4, 40, method="gptq", hessian=H)
    codes = np.stack([Q.codes & 15, Q.codes >> 4], 2).reshape(8, 200)
    assert np.array_equal(codes, by_definition(W, Q, H))


def test_an_order_of_columns_is_that_of_the_moments_too() -> None:
    W, H = normal(16, 96), moments(96)
    order = np.argsort(-np.diag(H)).astype(np.int32)
    Q = quantize(W, 4, 32, method="gptq", hessian=H, perm=order)
    turned = quantize(W[:, order], 4, 32, method="gptq", hessian=H[np.ix_(order, order)])
    assert np.array_equal(Q.codes, turned.codes)
    assert np.array_equal(Q.dequantize()[:, order], turned.dequantize())


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    W, H = normal(21, 80, dtype=np.float64), moments(80)
    whole = quantize(W, 4, 16, method="gptq", hessian=H)
    monkeypatch.setattr(second_order, "_ROW_ELEMENTS", 5 * 80)
    parts = quantize(W, 4, 16, method="gptq", hessian=H)
    assert np.array_equal(whole.codes, parts.codes)
    assert parts.error == pytest.approx(whole.error)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_has_no_code_is_named_by_its_place(limit: Any, ordered: bool) -> None:
    limit(second_order, _ROW_ELEMENTS=3 * 64)
    H, rng = moments(64), np.random.default_rng(8)
    order = rng.permutation(64).astype(np.int32) if ordered else np.arange(64, dtype=np.int32)
    for row in (0, 4, 6):
        column = int(rng.integers(64))
        W = normal(7, 64)
        W[row, column] = np.nan
        with pytest.raises(ValueError, match=rf"W\[{row}, {column}\] is nan"):
            quantize(W, 4, 16, method="gptq", hessian=H, perm=order)
        W[row, column] = 1e9
        group = int(np.flatnonzero(order == column)[0]) // 16
        with pytest.raises(ValueError, match=f"row {row}, group {group} overflows float16"):
            quantize(W, 4, 16, scale_dtype="float16", method="gptq", hessian=H, perm=order)


def only_fetched(torch: Any) -> Any:
    """Let NumPy read of PyTorch's tensors those that ``.cpu()`` gave, as if they lay on a GPU."""
    fetched: list[Any] = []

    class OnlyFetched(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, given: Any = (), named: Any = None
        ) -> Any:
            read = func in (torch.Tensor.numpy, torch.Tensor.__array__)
            if read and not any(given[0] is one for one in fetched):
                raise TypeError("can't convert a GPU's tensor to numpy, use Tensor.cpu() first")
            found = func(*given, **(named or {}))
            if func is torch.Tensor.cpu:
                fetched.append(found := found.clone())
            return found

    return OnlyFetched()


def test_libraries_dtypes_and_sizes_of_nothing() -> None:
    torch = pytest.importorskip("torch")
    W, H = normal(6, 64).astype(np.float16), moments(64)
    ours = quantize(W, method="gptq", hessian=H)
    with only_fetched(torch):
        theirs = quantize(torch.from_numpy(W), method="gptq", hessian=torch.from_numpy(H))
    assert np.array_equal(ours.codes, theirs.codes)
    for shape in ((0, 4), (3, 0), (0, 0)):
        H = np.eye(shape[1])
        with warnings.catch_warnings(action="error"):
            assert quantize(np.zeros(shape), method="gptq", hessian=H).shape == shape


SPOILT = np.eye(8)
SPOILT[2, 3] = np.nan


@pytest.mark.parametrize(
    ("hessian", "error", "words"),
    [
        (np.eye(7), ValueError, r"hessian has shape \(7, 7\), but must be \(8, 8\)"),
        (np.ones(8), ValueError, "must be .8, 8.: X.T X"),
        (SPOILT, ValueError, r"hessian\[2, 3\] is nan"),
        (np.zeros((8, 8)), ValueError, "not all 0"),
        (-np.eye(8), ValueError, "not negative"),
        (np.triu(np.ones((8, 8))), ValueError, "symmetric"),
        (np.eye(8) + 2 * (1 - np.eye(8)), ValueError, "not positive semi-definite"),
        (np.eye(8, dtype=complex), TypeError, "real numbers"),
        (None, ValueError, "needs hessian"),
    ],
)
def test_what_are_no_second_moments_is_refused(
    hessian: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        quantize(normal(4, 8), method="gptq", hessian=hessian)


def test_what_does_not_go_together_is_refused() -> None:
    W, H = normal(4, 8), np.eye(8)
    with pytest.raises(ValueError, match="hessian is for method 'gptq', but method is 'mse'"):
        quantize(W, method="mse", hessian=H)
    with pytest.raises(ValueError, match="takes no importance"):
        quantize(W, method="gptq", hessian=H, importance=np.ones(8))
    with pytest.raises(ValueError, match="group_size=-1"):
        quantize(W, group_size=None, method="gptq", hessian=H)
    W[1, 5] = np.inf
    with pytest.raises(ValueError, match=r"W\[1, 5\] is inf"):
        quantize(W, method="gptq", hessian=H)
    with pytest.raises(ValueError, match="known are rtn, mse, hqq, gptq"):
        quantize(W, method="awq")  # type: ignore[arg-type]
