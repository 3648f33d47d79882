"""Foreign arrays in and out: forms, kinds, checks on `out`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.arrays.interop import check_out, check_same_kind, empty_like_kind, to_kind, unwrap
from gemmule.core.operand import Form, Operand, alignment_of, extent
from gemmule.core.problem import DTYPES, ITEMSIZE, numpy_dtype
from gemmule.quant.quantize import quantize
from products import ARRANGEMENTS, misaligned


@pytest.mark.parametrize("dtype", DTYPES)
def test_forms_count_elements(dtype: str) -> None:
    a = np.zeros((3, 4), numpy_dtype(dtype))[:, ::2]
    operand = unwrap(a, "a")
    assert operand.form == Form((3, 2), (4, 2), dtype, ITEMSIZE[dtype])
    assert operand.array is a
    assert (operand.device, operand.library, operand.original) == ("cpu", "numpy", a)
    assert operand.pointer == a.ctypes.data


@pytest.mark.parametrize("how", ARRANGEMENTS)
def test_arrays_are_used_where_they_lie(how: str) -> None:
    a = ARRANGEMENTS[how](np.arange(12.0).reshape(3, 4))
    operand = unwrap(a, "a")
    np.testing.assert_array_equal(operand.array, a)
    copied = how in ("misaligned", "swapped_bytes")
    assert np.shares_memory(operand.array, a) != copied
    assert operand.array.dtype.isnative
    assert operand.array.flags.aligned
    assert [step * 8 for step in operand.form.strides] == list(operand.array.strides)


def test_strides_that_count_no_elements_are_copied() -> None:
    records = np.zeros(5, [("value", "<f4"), ("pad", "V1")])
    records["value"] = np.arange(5)
    operand = unwrap(records["value"], "a")
    assert operand.form.strides == (1,)
    np.testing.assert_array_equal(operand.array, np.arange(5))


@pytest.mark.parametrize(
    "dtype", ["?", "longdouble", "clongdouble", "O", "U3", "S3", "M8[s]", "m8[s]", "V4", "f4,f4"]
)
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(TypeError, match=r"thing has dtype .*; supported are float64.*Convert"):
        unwrap(np.zeros(3, dtype), "thing")


@pytest.mark.parametrize(
    "thing", [[1.0, 2.0], (1.0,), 3.0, 1, None, "abc", b"abc", {"a": 1}, range(3), np.float64(1)]
)
def test_what_is_no_array_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"thing is a .*; needed is .*numpy.asarray"):
        unwrap(thing, "thing")


def test_masked_arrays_are_refused_and_other_subclasses_taken() -> None:
    with pytest.raises(TypeError, match="mask would be lost"):
        unwrap(np.ma.masked_array([1.0, 2.0], [True, False]), "a")
    records = np.zeros(3).view(np.recarray)
    operand = unwrap(records, "a")
    assert type(operand.array) is np.ndarray
    assert operand.original is records


def test_a_quantised_matrix_carries_its_specification() -> None:
    Q = quantize(np.ones((3, 10), np.float32), bits=4, group_size=4)
    operand = unwrap(Q.T, "Q")
    assert operand.pointer == 0  # its codes and scales lie in several places
    form = operand.form
    assert (form.shape, form.dtype) == ((10, 3), "uint4")
    assert form.quant is not None
    assert (form.quant.transposed, form.quant.has_zeros, form.quant.group_size) == (True, True, 4)


@pytest.mark.parametrize(("pointer", "expected"), [(0, 16), (64, 16), (8, 8), (20, 4), (33, 1)])
def test_alignment(pointer: int, expected: int) -> None:
    assert alignment_of(pointer) == expected


def test_extent_covers_every_element() -> None:
    base = np.zeros((6, 8), np.float32)
    for view in (base, base[::-1], base[1:4, ::-2], base.T[2:], base[:0]):
        low, high = extent(unwrap(view, "a"))
        expected_low, expected_high = np.lib.array_utils.byte_bounds(view)
        if view.size:
            assert (low, high) == (expected_low, expected_high)
        else:
            assert low == high


def check(out: np.ndarray[Any, Any], *inputs: np.ndarray[Any, Any], dtype: str = "float64") -> None:
    operands = [unwrap(a, "a") for a in inputs]
    check_out(unwrap(out, "out"), (3, 4), dtype, operands)


def test_a_good_out_passes() -> None:
    base = np.zeros((10, 10))
    for view in (
        np.empty((3, 4)),
        base[:3, :4],
        base[::-1][:3, :4],
        base[:8:3, :8:2],
        base.T[:3, 2:6],
    ):
        check(view, np.zeros(3))
    check(base[:3, :4], base[3:, 4:], base[:3, 4:])  # beside the inputs, in one buffer
    check(base[:3, 0:8:2], base[:3, 1:8:2])  # interleaved with an input


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (np.zeros((4, 3)), ValueError, r"out has shape \(4, 3\); the result has shape \(3, 4\)"),
        (np.zeros((1, 3, 4)), ValueError, "out has shape"),
        (np.zeros((3, 4), "f4"), TypeError, "out has dtype float32; the result has dtype float64"),
        (ARRANGEMENTS["read_only"](np.zeros((3, 4))), ValueError, "read-only"),
        (np.zeros((3, 4), ">f8"), ValueError, "byte order"),
        (misaligned(np.zeros((3, 4))), ValueError, "misaligned"),
        (np.lib.stride_tricks.as_strided(np.zeros(4), (3, 4), (0, 8)), ValueError, "one place"),
        (np.lib.stride_tricks.as_strided(np.zeros(9), (3, 4), (8, 8)), ValueError, "one place"),
        (np.lib.stride_tricks.as_strided(np.zeros(9), (3, 4), (24, 8)), ValueError, "one place"),
    ],
)
def test_bad_outs(out: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check(out)


def test_overlap_is_found_exactly() -> None:
    base = np.zeros(100)
    out = base[:12].reshape(3, 4)
    for overlapping in (base, base[11:], base[::-1], base[3:4], out.T, out):
        with pytest.raises(ValueError, match="overlaps an input"):
            check(out, np.zeros(3), overlapping)
    check(out, base[12:])


def test_the_step_of_an_axis_of_one_element_overlaps_nothing() -> None:
    for step in (0, 8):
        out = np.lib.stride_tricks.as_strided(np.zeros(12), (3, 1, 4), (32, step, 8))
        check_out(unwrap(out, "out"), (3, 1, 4), "float64", [])
    out = np.lib.stride_tricks.as_strided(np.zeros(12), (3, 2, 4), (32, 0, 8))
    with pytest.raises(ValueError, match="would share one place"):
        check_out(unwrap(out, "out"), (3, 2, 4), "float64", [])


def test_an_empty_input_overlaps_nothing_on_a_device_either() -> None:
    base = np.zeros(100)
    out = unwrap(base[:12].reshape(3, 4), "out")._replace(device="cuda:0")
    for empty in (base[5:5], base[2:7].reshape(5, 1)[:, :0], base[:12].reshape(3, 4)[3:]):
        check_out(out, (3, 4), "float64", [unwrap(empty, "a")._replace(device="cuda:0")])
    with pytest.raises(ValueError, match="overlaps an input"):
        check_out(out, (3, 4), "float64", [unwrap(base[11:], "a")._replace(device="cuda:0")])


def test_quantised_matrices_that_differ_in_anything_have_forms_of_their_own() -> None:
    """What kernels must know of codes is in a form, which plans and all that is kept go by."""
    W, x = np.random.default_rng(2).standard_normal((64, 64)), np.ones(64, np.float32)
    order = np.arange(64)[::-1].astype(np.int32)
    plain = quantize(W, bits=8, group_size=32)
    others = [
        quantize(W, bits=4, group_size=32),
        quantize(W, bits=8, group_size=16),
        quantize(W, bits=8, group_size=None),
        quantize(W, bits=8, group_size=32, symmetric=True),
        quantize(W, bits=8, group_size=32, scale_dtype="float16"),
        quantize(W, bits=8, group_size=32, perm=order),
        quantize(W, bits=8, group_size=32, perm=order).T,
        plain.to(layout="mma16"),
        plain.T,
    ]
    forms = [unwrap(one, "A").form for one in (plain, *others)]
    assert len(set(forms)) == len(forms)
    plan = gm.plan("matvec", plain, x)
    np.testing.assert_allclose(plan(plain, x), plain.dequantize() @ x, rtol=1e-5, atol=1e-4)
    for other in others:
        with pytest.raises(ValueError, match="this plan"):
            plan(other, x)


def test_kinds_must_agree() -> None:
    def operand(**changed: str) -> Operand:
        return unwrap(np.zeros(3), "a")._replace(**changed)

    a, b, ours = (operand(library=name) for name in ("numpy", "torch", "gemmule"))
    far = operand(library="torch", device="cuda:0")
    check_same_kind(a, a, ("A", "x"))
    check_same_kind(ours, b, ("A", "x"))
    for other in (b, far):
        with pytest.raises(TypeError, match="A is a numpy array on cpu and x a torch array on c"):
            check_same_kind(a, other, ("A", "x"))
    with pytest.raises(TypeError, match="gemmule array on cpu and x a torch array on cuda:0"):
        check_same_kind(ours, far, ("A", "x"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_results_are_plain_c_ordered_arrays(dtype: str) -> None:
    like = unwrap(np.asfortranarray(np.zeros((2, 2))), "a")
    result = to_kind(empty_like_kind((2, 3, 4), dtype, like), like)
    assert type(result) is np.ndarray
    assert (result.shape, result.dtype) == ((2, 3, 4), numpy_dtype(dtype))
    assert result.flags.c_contiguous
