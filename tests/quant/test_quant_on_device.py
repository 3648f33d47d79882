"""Matrices on a device are quantised there to the host's codes, one by one; kernels emulated."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import numpy_dtype
from gemmule.quant.cuda import on_device
from gemmule.quant.matrix import QuantizedMatrix

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))

# dtype of W, of scales; each pair is one kernel more to compile.
DTYPES = (
    ("float32", "float32"),
    ("float16", "bfloat16"),
    ("bfloat16", "float16"),
    ("float64", "float16"),
)
# rows, columns, bits, group size, symmetric: groups that end inside and straddle tiles, tails, one
# row, one column, groups of one column, of 300 (a larger team), of a row, of all.
CASES = (
    (37, 150, 4, 32, False),
    (16, 128, 4, 128, True),
    (5, 130, 4, 48, False),
    (33, 70, 4, 7, True),
    (1, 90, 4, -1, False),
    (40, 1, 4, 64, False),
    (19, 65, 4, None, False),
    (18, 1100, 8, 1050, False),
    (35, 33, 8, 32, True),
    (20, 300, 8, -1, True),
    (3, 9, 8, 1, False),
    (17, 40, 8, None, True),
)


@pytest.fixture(autouse=True)
def device() -> Iterator[Any]:
    with emulated(seed=3) as driver:
        yield driver
        gc.collect()  # tracebacks hold arrays, which are freed by the driver that made them


def there(W: np.ndarray[Any, Any], how: str) -> DeviceArray:
    """Return a matrix on the device: its rows, its columns, or every second element of both."""
    m, n = W.shape
    if how == "row":
        return DeviceArray.from_host(np.ascontiguousarray(W), 1)
    if how == "col":
        return DeviceArray.from_host(np.asfortranarray(W), 1)
    wide = np.full((2 * m, 2 * n), np.nan, W.dtype)
    wide[::2, ::2] = W
    whole = DeviceArray.from_host(wide, 1)
    return DeviceArray(whole.pointer, (m, n), (4 * n, 2), whole.dtype, 1, whole)


def weights(m: int, n: int, dtype: str, seed: int) -> np.ndarray[Any, Any]:
    """Return random weights with groups of zeros, of one sign, and of tiny numbers among them."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((m, n)) * np.exp(rng.standard_normal((m, 1)))
    W[m // 3, : n // 2] = 0
    W[m // 2] = np.abs(W[m // 2]) * 2.0**-20
    return W.astype(numpy_dtype(dtype))


def assert_same(found: QuantizedMatrix, expected: QuantizedMatrix) -> None:
    assert (found.device, found.layout) == ("cuda:1", "mma16")
    assert found.scales.strides == (1, found.scales.shape[0])
    host = found.to("cpu", layout="row")
    np.testing.assert_array_equal(host.scales, expected.scales)
    if expected.zeros is None:
        assert host.zeros is None
    else:
        np.testing.assert_array_equal(host.zeros, expected.zeros)
    np.testing.assert_array_equal(host.codes, expected.codes)
    np.testing.assert_array_equal(found.to("cpu").codes, expected.to(layout="mma16").codes)
    assert host.error == pytest.approx(expected.error, rel=1e-6)
    assert (host.perm is None) == (expected.perm is None)


@pytest.mark.parametrize("method", on_device.METHODS)
@pytest.mark.parametrize(("dtype", "scale_dtype"), DTYPES)
def test_codes_are_those_of_the_host(dtype: str, scale_dtype: Any, method: Any) -> None:
    for seed, (m, n, bits, group_size, symmetric) in enumerate(CASES):
        W = weights(m, n, dtype, seed)
        options: dict[str, Any] = {"method": method, "scale_dtype": scale_dtype}
        expected = gm.quantize(W, bits, group_size, symmetric, **options)
        for how in ("row", "col", "apart")[seed % 2 :: 2]:
            found = gm.quantize(there(W, how), bits, group_size, symmetric, **options)
            assert_same(found, expected)


@pytest.mark.parametrize("method", on_device.METHODS)
def test_importance_and_perm_count_as_on_the_host(method: Any) -> None:
    rng = np.random.default_rng(5)
    W = weights(18, 100, "float32", 5)
    for group_size in (32, None):
        options: dict[str, Any] = {
            "group_size": group_size,
            "method": method,
            "importance": rng.random(100) ** 4,
            "perm": rng.permutation(100),
        }
        expected = gm.quantize(W, **options)
        for how in ("row", "col"):
            found = gm.quantize(there(W, how), **options)
            assert_same(found, expected)
            assert found.perm is not None
            np.testing.assert_array_equal(found.to("cpu").perm, expected.perm)


@pytest.mark.parametrize("method", on_device.METHODS)
def test_groups_of_zeros_have_the_scale_of_the_host(method: Any) -> None:
    ones = np.sign(weights(18, 40, "float32", 7)) * 7.0  # their scale is 1, with which zeros begin
    for W in (0 * ones, ones, np.where(np.arange(40) // 16 == 1, 0, ones)):
        for group_size in (16, -1, None):
            options: dict[str, Any] = {"method": method, "perm": np.arange(40)[::-1]}
            expected = gm.quantize(W, 4, group_size, True, **options)
            assert (expected.scales == 0).any() or W.any() or not W.size
            assert_same(gm.quantize(there(W, "col"), 4, group_size, True, **options), expected)


@pytest.mark.parametrize("group_size", [16, None])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_has_no_code_is_named_as_on_the_host(bad: float, group_size: int | None) -> None:
    for row, column in ((0, 0), (17, 39), (9, 20)):
        W = weights(18, 40, "float32", 1)
        W[row, column] = bad
        for perm in (None, np.arange(40)[::-1]):
            with pytest.raises(ValueError, match="only finite weights") as expected:
                gm.quantize(W, group_size=group_size, perm=perm)
            with pytest.raises(ValueError, match=f"{row}, {column}") as found:
                gm.quantize(there(W, "col"), group_size=group_size, perm=perm)
            assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("group_size", [16, None])
def test_a_scale_that_overflows_is_refused(group_size: int | None) -> None:
    W = weights(18, 40, "float64", 1)
    W[7, 33] = 1e7
    for matrix in (W, there(W, "row")):
        with pytest.raises(ValueError, match="overflows float16: use scale_dtype='float32'"):
            gm.quantize(matrix, group_size=group_size, scale_dtype="float16")


def test_squares_that_overflow_leave_the_error_unknown() -> None:
    W = weights(4, 40, "float32", 1)
    W[1, 3] = 1e30
    found, expected = gm.quantize(there(W, "row")), gm.quantize(W)
    assert found.error is None
    np.testing.assert_array_equal(found.to("cpu", layout="row").codes, expected.codes)


def test_what_is_no_float_matrix_is_refused() -> None:
    with pytest.raises(TypeError, match="W has dtype int32"):
        gm.quantize(DeviceArray.from_host(np.ones((2, 3), np.int32)))
    with pytest.raises(ValueError, match="must be 2-D"):
        gm.quantize(DeviceArray.from_host(np.ones(3, np.float32)))


def test_an_array_with_the_cuda_array_interface_is_read_where_it_lies() -> None:
    class Foreign:
        def __init__(self, array: DeviceArray) -> None:
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    W = weights(18, 40, "float32", 2)
    assert_same(gm.quantize(Foreign(there(W, "col"))), gm.quantize(W))


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_a_matrix_goes_from_any_device_to_any_other(scale_dtype: Any) -> None:
    W = weights(17, 65, "float32", 5)
    Q = gm.quantize(W, 8, 16, scale_dtype=scale_dtype, perm=np.arange(65)[::-1])
    for way in itertools.permutations(("cpu", "cuda:0", "cuda:1")):
        moved = Q
        for device in (*way, way[0]):
            moved = moved.to(device, layout="row")
            assert moved.device == device
        assert_same(moved.to("cuda:1", layout="mma16"), Q)


@pytest.mark.parametrize("bits", [4, 8])
def test_layouts_change_on_the_device_both_ways(bits: Any) -> None:
    for m, n in ((1, 1), (16, 64), (17, 65), (33, 130), (5, 31)):
        W = np.random.default_rng(bits).standard_normal((m, n))
        for group_size, scale_dtype in ((32, "float16"), (-1, "float32"), (None, "bfloat16")):
            Q = gm.quantize(W, bits, group_size, scale_dtype=scale_dtype)
            packed = Q.to("cuda:1")
            assert packed.layout == "mma16"
            rows = packed.to(layout="row")
            assert (rows.device, rows.layout) == ("cuda:1", "row")
            assert rows.scales.strides[1] == 1 or rows.scales.shape[1] == 1
            for part in ("codes", "scales", "zeros"):
                found = getattr(packed, part).to_host()
                np.testing.assert_array_equal(found, getattr(Q.to(layout="mma16"), part))
                found = getattr(rows, part).to_host()
                np.testing.assert_array_equal(found, getattr(Q, part))
            np.testing.assert_array_equal(Q.to("cuda", layout="row").codes.to_host(), Q.codes)
