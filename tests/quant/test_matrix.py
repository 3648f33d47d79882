"""The quantised matrix: its parts, orders, views, operators and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import gemmule as gm
from children import printed
from gemmule.errors import DeviceError
from gemmule.quant import checks, library
from gemmule.quant import rounding as rounding
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.quant.quantize import quantize
from quantized_products import SCALE_DTYPES, normal

pytestmark = pytest.mark.usefixtures("unwritten")


def test_sizes_reach_their_limits() -> None:
    most = 1 << 40
    for right in ((0, 0), (most, 0), (0, most), (most, most)):
        assert checks.shape(right) == right
    for wrong in ((most + 1, 0), (0, most + 1), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="sizes must lie in"):
            checks.shape(wrong)
    for group in (-1, 1, most):
        assert quantize(np.eye(3), group_size=group).group_size == group
    for group in (-2, 0, most + 1):
        with pytest.raises(ValueError, match=f"group_size is {group}"):
            quantize(np.eye(3), group_size=group)


@pytest.mark.parametrize("bits", [4, 8])
def test_parts_on_the_host_begin_with_a_cache_line(bits: int) -> None:
    for rows in (1, 300):  # small arrays and large ones lie in different places
        Q = quantize(normal(rows, 500), bits=bits, group_size=20)
        for part in (Q.codes, Q.scales, Q.zeros):
            assert part.ctypes.data % 64 == 0
            assert part.flags.c_contiguous


def test_perm_is_the_order_of_the_stored_columns() -> None:
    W, x = normal(6, 21), normal(1, 21, 1)[0]
    perm = np.random.default_rng(5).permutation(21)
    Q = quantize(W, 4, 8, perm=perm)
    plain = quantize(np.ascontiguousarray(W[:, perm]), 4, 8)
    for name in ("codes", "scales", "zeros"):
        np.testing.assert_array_equal(getattr(Q, name), getattr(plain, name))
    assert Q.perm.dtype == np.int32
    stored = plain.dequantize()
    np.testing.assert_array_equal(Q.dequantize()[:, perm], stored)
    np.testing.assert_array_equal(Q.T.dequantize()[perm], stored.T)
    np.testing.assert_allclose(Q.dequantize() @ x, stored @ x[perm], rtol=1e-5, atol=1e-5)
    assert np.abs(Q.dequantize() - W).max() <= Q.scales.max() * 0.51


def test_perm_sorts_act_order_groups() -> None:
    g_idx = np.array([1, 0, 1, 0, 0, 1])
    scales = np.array([[2.0, 3.0]], np.float32)
    perm = np.argsort(g_idx, kind="stable")
    codes = np.full((1, 6), 129, np.uint8)
    Q = QuantizedMatrix.from_parts(codes, scales, shape=(1, 6), bits=8, group_size=3, perm=perm)
    assert Q.dequantize().tolist() == [scales[0, g_idx].tolist()]


def test_perm_is_copied_and_arrays_are_read_only() -> None:
    perm = np.arange(4)
    Q = quantize(normal(2, 4), 8, 2, perm=perm)
    perm[:] = 10**6
    assert Q.perm.tolist() == [0, 1, 2, 3]
    for array in (Q.codes, Q.scales, Q.zeros, Q.perm, Q.to(layout="mma16").codes):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_an_order_that_its_owner_changes_stays_as_it_was_given(dtype: Any) -> None:
    perm = np.arange(4, dtype=dtype)[::-1].copy()
    Q = quantize(np.arange(12.0).reshape(3, 4), 8, -1, perm=perm)
    before = Q.dequantize()
    perm[:] = 0
    np.testing.assert_array_equal(Q.dequantize(), before)


def test_transpose_is_a_view() -> None:
    Q = quantize(normal(3, 5), 4, 2)
    assert Q.T.codes is Q.codes
    assert Q.T.transposed
    assert not Q.T.T.transposed
    assert (Q.T.shape, Q.T.stored_shape) == ((5, 3), (3, 5))


def test_the_transpose_is_the_same_object_and_keeps_none_alive() -> None:
    Q = quantize(normal(3, 5), 4, 2)
    turned, first = Q.T, weakref.ref(Q)
    assert Q.T is turned
    assert turned.T is Q
    gc.disable()
    try:
        del Q
        assert first() is None
    finally:
        gc.enable()
    assert turned.T is turned.T
    assert turned.T.T is turned
    assert pickle.loads(pickle.dumps(turned)).T.shape == (3, 5)


def parts(**changes: Any) -> dict[str, Any]:
    honest: dict[str, Any] = {
        "codes": np.array([[0x21, 0x03], [0x54, 0x06]], np.uint8),
        "scales": np.ones((2, 2), np.float32),
        "zeros": np.zeros((2, 2), np.float32),
        "shape": (2, 3),
        "bits": 4,
        "group_size": 2,
    }
    return {**honest, **changes}


def test_from_parts_takes_what_is_right() -> None:
    Q = QuantizedMatrix.from_parts(**parts(transposed=True))
    assert Q.dequantize().tolist() == [[1, 4], [2, 5], [3, 6]]
    strided = np.zeros((2, 4), np.uint8)
    strided[:, ::2] = parts()["codes"]
    Q = QuantizedMatrix.from_parts(**parts(codes=strided[:, ::2], scales=-np.ones((2, 2), "f2")))
    assert Q.dequantize().tolist() == [[-1, -2, -3], [-4, -5, -6]]
    assert (Q.nbytes, Q.dtype_name, Q.scale_dtype) == (4 + 8 + 16, "int4", "float16")


def test_wrong_parts() -> None:
    nan = np.array([[0, 0], [0, np.nan]], np.float32)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "int8.*unsigned", {"codes": parts()["codes"].view(np.int8)}),
        (TypeError, "codes must be a NumPy array", {"codes": b"1234"}),
        (ValueError, r"codes have shape \(1, 2\)", {"codes": parts()["codes"][:1]}),
        (ValueError, "bits set where", {"codes": np.full((2, 2), 16, np.uint8)}),
        (ValueError, r"shape \(2, 2\).*layout 'mma16' takes \(1, 512\)", {"layout": "mma16"}),
        (ValueError, "layout is 'x'", {"layout": "x"}),
        (TypeError, "scales have dtype float64", {"scales": np.ones((2, 2))}),
        (TypeError, "scales have dtype >f4", {"scales": np.ones((2, 2), ">f4")}),
        (ValueError, r"scales have shape \(2, 1\)", {"scales": np.ones((2, 1), np.float32)}),
        (ValueError, r"scales\[1, 1\] is nan", {"scales": nan}),
        (TypeError, "zeros have dtype uint8.*astype", {"zeros": np.zeros((2, 2), np.uint8)}),
        (ValueError, r"zeros\[1, 1\] is nan", {"zeros": nan}),
        (ValueError, r"zeros have shape \(1, 1\)", {"zeros": np.zeros((1, 1), np.float32)}),
        (ValueError, "takes", {"group_size": None}),
        (ValueError, "two sizes", {"shape": (6,)}),
        (ValueError, "sizes must lie", {"shape": (-1, 3)}),
        (TypeError, "must be an int", {"shape": (2.0, 3)}),
        (ValueError, "bits is 5", {"bits": 5}),
    ]
    for error, words, changes in wrong:
        with pytest.raises(error, match=words):
            QuantizedMatrix.from_parts(**parts(**changes))


def test_padding_of_mma16_is_checked() -> None:
    Q = quantize(normal(3, 5), 4, 5).to(layout="mma16")
    codes = Q.codes.copy()
    codes[0, -1] = 1
    with pytest.raises(ValueError, match="bits set where"):
        QuantizedMatrix.from_parts(
            codes, Q.scales, Q.zeros, shape=(3, 5), bits=4, group_size=5, layout="mma16"
        )


def test_devices_go_through_the_transfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Q = quantize(normal(3, 5), 4, 2, perm=np.arange(5)[::-1])
    calls: list[str] = []

    def transfer(device: str) -> Any:
        return device, lambda array: calls.append(device) or array.copy()

    monkeypatch.setattr(library, "mover", transfer)
    moved = Q.to("cuda:1", "row")
    assert (moved.device, calls) == ("cuda:1", ["cuda:1"] * 4)
    back = moved.to("cpu", "mma16")
    assert (back.device, calls[4:]) == ("cpu", ["cpu"] * 4)
    np.testing.assert_array_equal(back.to(layout="row").dequantize(), Q.dequantize())
    np.testing.assert_array_equal(np.asarray(moved), Q.dequantize())
    assert Q.to("cpu") is Q
    with pytest.raises(DeviceError):
        moved.dequantize()
    moved.save(tmp_path / "w.safetensors")  # it is fetched
    saved = QuantizedMatrix.load(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(saved.dequantize(), Q.dequantize())


def test_a_matrix_of_codes_moves_to_what_is_no_device() -> None:
    with pytest.raises(ValueError, match="device is 'gpu'"):
        quantize(normal(3, 5)).to("gpu")


def test_operators_and_the_array_protocol() -> None:
    W, x, X = normal(6, 33), normal(1, 33, 1)[0], normal(33, 4, 2)
    Q = quantize(W, 8, 16)
    assert (Q.ndim, Q.dtype, Q.T.ndim) == (2, np.float32, 2)
    np.testing.assert_array_equal(Q @ x, gm.matvec(Q, x))
    np.testing.assert_array_equal(Q @ X, gm.matmul(Q, X))
    np.testing.assert_array_equal(x @ Q.T, gm.vecmat(x, Q.T))
    np.testing.assert_array_equal(X.T @ Q.T, gm.matmul(X.T, Q.T))
    assert isinstance(torch.from_numpy(x) @ Q.T, torch.Tensor)
    assert torch.equal(torch.matmul(Q, torch.from_numpy(x)), torch.from_numpy(Q @ x))
    assert torch.equal(torch.from_numpy(x).__rmatmul__(Q), torch.from_numpy(Q @ x))
    with pytest.raises(TypeError, match=r"torch\.add"):
        torch.add(torch.from_numpy(x), Q)
    assert isinstance(Q @ torch.from_numpy(X), torch.Tensor)
    np.testing.assert_array_equal((torch.from_numpy(x) @ Q.T).numpy(), x @ Q.T)
    np.testing.assert_array_equal(np.asarray(Q), Q.dequantize())
    assert np.asarray(Q.T, "float16").dtype == np.float16
    with pytest.raises(ValueError, match="only by a copy"):
        np.array(Q, copy=False)
    with pytest.raises(TypeError, match="list"):
        Q @ [1.0]


def test_float32_weights_are_correctly_rounded_for_integer_zero_points() -> None:
    for bits in (4, 8):
        for scale_dtype in SCALE_DTYPES:
            Q = quantize(normal(40, 99), bits, 10, scale_dtype=scale_dtype)
            exact = Q.dequantize("float64")  # 24-bit scale times 9-bit difference fits 53 bits
            np.testing.assert_array_equal(Q.dequantize("float32"), exact.astype(np.float32))


def test_dequantize_refuses_other_dtypes() -> None:
    Q = quantize(normal(2, 2), 8, -1)
    assert Q.dequantize("bfloat16").dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        Q.dequantize("int8")


def test_repr_is_short() -> None:
    text = repr(quantize(normal(100, 64)).T)
    assert text.startswith("QuantizedMatrix(shape=(64, 100), bits=4, group_size=128")
    assert text.endswith(f"device='cpu', nbytes={100 * 32 + 100 * 8})")
    assert "\n" not in text


def test_import_needs_numpy_only() -> None:
    code = (
        "import sys, gemmule.quant.matrix as _;"
        "print({'safetensors', 'ml_dtypes', 'torch'} & {*sys.modules})"
    )
    assert printed(code).strip() == "set()"


def test_what_a_matrix_keeps_stays_with_it() -> None:
    """Kept values may hold addresses: no copy, view or pickle takes them along."""
    Q = quantize(np.eye(4), bits=4, group_size=-1)
    calls: list[QuantizedMatrix] = []

    def count(matrix: QuantizedMatrix) -> int:
        calls.append(matrix)
        return len(calls)

    assert [Q.kept(count), Q.kept(count)] == [1, 1]
    others = [Q.T, copy.copy(Q), copy.deepcopy(Q), pickle.loads(pickle.dumps(Q))]
    assert [other.kept(count) for other in others] == [2, 3, 4, 5]
    assert Q.kept(count) == 1
    assert np.array_equal(others[-1].dequantize(), Q.dequantize())
