"""Codes that are floats of 4 bits, MXFP4 and NVFP4: rounding, scales, parts, files, other tools."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gemmule as gm
from gemmule.core.problem import numpy_dtype
from gemmule.oracle.truth import dequantized
from gemmule.quant import checks, float4, shards
from gemmule.quant.formats import from_float4, from_gpt_oss, read_layer

pytestmark = pytest.mark.usefixtures("unwritten")

FORMATS = ("mxfp4", "nvfp4")
VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def weights(m: int, n: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, m, n))
    return (rng.standard_normal((m, n)) * 2.0 ** rng.integers(-9, 10, (m, 1))).astype(dtype)


def scales_of(Q: gm.QuantizedMatrix) -> np.ndarray:
    """Each weight's scale times its factor, in float64."""
    size = float4.GROUP_SIZES[str(Q.format)]
    scales = Q.scales.astype(np.float64) * (1.0 if Q.factors is None else Q.factors)
    return np.repeat(scales, size, 1)[:, : Q.stored_shape[1]]


def check_nearest(form: str) -> None:
    W = weights(37, 203)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, -6.0])
    W[3, : len(ties)], W[3, len(ties) : 48] = ties, 0
    Q = gm.quantize(W, format=form)
    found, scales = Q.dequantize("float64"), scales_of(Q)
    least = np.abs(W.astype(np.float64)[..., None] - scales[..., None] * VALUES).min(-1)
    assert (np.abs(W - found) <= least + 2.0**-24 * np.abs(W)).all()
    if form == "mxfp4":  # its scale is 1 there: the even code of both that are as near
        assert found[3, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
        assert found[3, 8:12].tolist() == [0, -2, -4, -6]


@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_the_nearest_and_ties_go_to_even(form: str) -> None:
    check_nearest(form)


@pytest.mark.parametrize("form", FORMATS)
def test_the_nearest_kills_truncation(form: str, fault: Callable[..., Any]) -> None:
    fault(float4, "_nearest", lambda sound, groups, scales: sound(groups * 0.97, scales))
    with pytest.raises(AssertionError):
        check_nearest(form)


@pytest.mark.parametrize("exponent", [-100, -3, 0, 1, 60])
def test_the_scale_of_mxfp4_is_the_exponent_less_two(exponent: int) -> None:
    top = np.ldexp(np.array([1.0, 1.5, 1.99, 2.0 - 2.0**-23]), exponent)
    W = np.zeros((4, 32), np.float32)
    W[:, 5] = -top
    Q = gm.quantize(W, format="mxfp4")
    assert Q.scales.astype(np.float64)[:, 0].tolist() == [2.0 ** (exponent - 2)] * 4
    codes = np.array([-4.0, -6, -6, -6])
    assert np.array_equal(Q.dequantize()[:, 5], np.ldexp(codes, exponent - 2))


def test_the_scales_of_nvfp4_are_e4m3_over_one_factor() -> None:
    above = weights(9, 64)
    for W in (above, -above):  # the largest of either sign
        Q = gm.quantize(W, format="nvfp4")
        factor = np.float32(np.abs(W).max().astype(np.float64) / 2688)
        assert Q.factors is not None
        assert np.array_equal(Q.factors, np.full((9, 1), factor))
        sizes = np.abs(W.reshape(9, 4, 16)).max(-1) / np.float64(factor) / 6
        assert np.array_equal(Q.scales, sizes.astype(np.float32).astype(ml_dtypes.float8_e4m3fn))
        assert Q.scales.astype(np.float32).max() == 448


@pytest.mark.parametrize("form", FORMATS)
def test_the_error_is_what_it_says_and_less_by_mse(form: str) -> None:
    W = weights(40, 160, np.float64)
    importance = np.random.default_rng(1).random(160)
    errors = []
    for method in ("rtn", "mse"):
        Q = gm.quantize(W, format=form, method=method, importance=importance)
        wrong = (importance * (W - Q.dequantize("float64")) ** 2).sum()
        assert Q.error == pytest.approx(np.sqrt(wrong / (importance * W**2).sum()), rel=1e-6)
        errors.append(Q.error)
    assert errors[1] < errors[0]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (3, 31), (7, 100)])
def test_everything_that_a_matrix_does(form: str, shape: tuple[int, int], tmp_path: Path) -> None:
    W = weights(*shape)
    order = np.random.default_rng(2).permutation(shape[1])
    for perm in (None, order):
        Q = gm.quantize(W, format=form, perm=perm)
        exact, sizes = dequantized(Q)
        assert np.array_equal(Q.dequantize("float64"), exact)
        assert np.array_equal(sizes, np.abs(exact))
        assert np.array_equal(Q.dequantize(), exact.astype(np.float32))  # rounded once
        assert np.array_equal(Q.T.dequantize("float64"), exact.T)
        Q.save(tmp_path / "Q.safetensors", overwrite=True)
        for same in (
            pickle.loads(pickle.dumps(Q)),
            gm.QuantizedMatrix.load(tmp_path / "Q.safetensors"),
            gm.QuantizedMatrix.load(tmp_path / "Q.safetensors", mmap=False),
        ):
            assert (same.format, same.error) == (form, Q.error)
            assert np.array_equal(same.dequantize("float64"), exact)
        assert np.array_equal(Q[1:3].dequantize("float64"), exact[1:3])
    assert (Q.bits, Q.symmetric, Q.dtype_name) == (4, True, form)
    assert f"format='{form}'" in repr(Q)


@pytest.mark.parametrize("form", FORMATS)
def test_columns_are_cut_between_groups(form: str) -> None:
    Q = gm.quantize(weights(6, 96), format=form)
    left, _ = shards.cut(Q, 1, 0, 32)
    right, _ = shards.cut(Q, 1, 32, 96)
    both = np.concatenate([left.dequantize("float64"), right.dequantize("float64")], 1)
    assert np.array_equal(both, Q.dequantize("float64"))


@pytest.mark.parametrize("form", FORMATS)
def test_stacks_keep_what_each_expert_has(form: str) -> None:
    W = weights(4 * 64, 6).reshape(4, 64, 6)
    stack = gm.quantize_experts(W, format=form)
    for expert in range(4):
        exact = stack[expert].dequantize("float64")
        assert np.array_equal(exact, stack.dequantize("float64")[expert])
        alone = gm.quantize(W[expert].T, format=form).T
        assert np.array_equal(stack[expert].dequantize("float64"), alone.dequantize("float64"))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS)
def test_any_float_dtype_and_library(form: str, dtype: str) -> None:
    W = weights(8, 64).astype(numpy_dtype(dtype))
    plain = gm.quantize(W.astype(np.float64), format=form)
    tensor = torch.from_numpy(W.astype(np.float64)).to(getattr(torch, dtype))
    for given in (W, tensor, np.asfortranarray(W)):
        assert np.array_equal(gm.quantize(given, format=form).dequantize(), plain.dequantize())


@pytest.mark.parametrize("form", FORMATS)
def test_eight_bits_hold_the_same_weights(form: str, caplog: pytest.LogCaptureFixture) -> None:
    Q = gm.quantize(weights(33, 70), format=form, perm=np.arange(70)[::-1])
    wide = float4.widened(Q)
    assert "twice the bytes" in caplog.text
    assert (wide.bits, wide.group_size, wide.zeros) == (8, Q.group_size, None)
    exact = Q.dequantize("float64")
    if form == "mxfp4":
        assert np.array_equal(wide.dequantize("float64"), exact)
    else:  # a scale times its factor is rounded once
        assert (np.abs(wide.dequantize("float64") - exact) <= 2.0**-24 * np.abs(exact)).all()
    x, size = np.ones(70, np.float32), np.abs(exact).sum(1)
    assert (np.abs(wide @ x - Q @ x) <= 1e-5 * size).all()


def test_what_has_no_codes_is_refused() -> None:
    W = weights(4, 40)
    for options, words in (
        ({"format": "fp4"}, "known are mxfp4, nvfp4"),
        ({"format": "mxfp4", "method": "hqq"}, "take one of rtn, mse"),
        ({"format": "nvfp4", "method": "gptq"}, "take one of rtn, mse"),
    ):
        with pytest.raises(ValueError, match=words):
            gm.quantize(W, **options)  # type: ignore[arg-type]
    W[2, 7] = np.nan
    for form in FORMATS:
        with pytest.raises(ValueError, match=r"W\[2, 7\] is nan"):
            gm.quantize(W, format=form)


def parts(form: str) -> dict[str, Any]:
    Q = gm.quantize(weights(4, 64), format=form)
    return {
        "codes": Q.codes,
        "scales": Q.scales,
        "zeros": Q.zeros,
        "shape": (4, 64),
        "bits": 4,
        "group_size": Q.group_size,
    }


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "group": ("mxfp4", {"group_size": 16}, "4 bits and group_size 32"),
    "bits": ("nvfp4", {"bits": 8, "codes": np.zeros((4, 64), np.uint8)}, "got 8 bits"),
    "zeros": ("mxfp4", {"zeros": np.zeros((4, 2), np.float32)}, "MXFP4 has no zero points"),
    "no factors": ("nvfp4", {"zeros": None}, "zeros must be a NumPy array"),
    "factors": ("nvfp4", {"zeros": np.ones((4, 4), np.float32)}, r"of shape \(4, 1\)"),
    "infinite factor": ("nvfp4", {"zeros": np.full((4, 1), np.inf, np.float32)}, "finite float32"),
    "NaN": ("mxfp4", {"scales": np.full((4, 2), 255, np.uint8).view("V1")}, "must be finite"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_parts(case: str) -> None:
    form, change, words = WRONG[case]
    if case == "NaN":
        change = {"scales": change["scales"].view(ml_dtypes.float8_e8m0fnu)}
    with pytest.raises((ValueError, TypeError), match=words):
        gm.QuantizedMatrix.from_parts(**parts(form) | change)
    gm.QuantizedMatrix.from_parts(**parts(form))


def test_files_of_floats_say_a_schema_that_earlier_versions_refuse() -> None:
    plain = checks.to_metadata((1, 1), 4, 32, False, floats=False)
    floats = checks.to_metadata((1, 1), 4, 32, False, floats=True)
    assert [one["gemmule_quantized_matrix"] for one in (plain, floats)] == ["1", "2"]


def test_layers_of_modelopt_and_compressed_tensors(tmp_path: Path) -> None:
    Q, P = (gm.quantize(weights(8, 96), format=form) for form in ("nvfp4", "mxfp4"))
    assert Q.factors is not None
    codes, own = (torch.from_numpy(one.codes.copy()) for one in (Q, P))
    scales = torch.from_numpy(Q.scales.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    exponents = torch.from_numpy(P.scales.view(np.uint8).copy())
    factor = torch.tensor(float(Q.factors[0, 0]))
    layers = {
        "modelopt": {
            "weight": codes,
            "weight_scale": scales,
            "weight_scale_2": factor,
            "input_scale": torch.tensor(3.0),
        },
        "compressed": {
            "weight_packed": codes,
            "weight_scale": scales,
            "weight_global_scale": torch.tensor([4.0]),
        },
        "exponents": {"weight_packed": own, "weight_scale": exponents},
        "typed": {"weight": own, "weight_scale": exponents.view(torch.float8_e8m0fnu)},
    }
    tensors: dict[str, Any] = {}
    for name, held in layers.items():
        tensors |= {f"{name}.{part}": one.clone() for part, one in held.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    read = {name: read_layer(tmp_path, name) for name in layers}
    assert np.array_equal(read["modelopt"].dequantize("float64"), Q.dequantize("float64"))
    quarter = replace(Q, zeros=np.full((8, 1), 0.25, np.float32))
    assert np.array_equal(read["compressed"].dequantize("float64"), quarter.dequantize("float64"))
    for name in ("exponents", "typed"):
        assert np.array_equal(read[name].dequantize("float64"), P.dequantize("float64"))


def test_experts_of_gpt_oss() -> None:
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (3, 10, 2, 16), np.uint8)
    scales = rng.integers(110, 130, (3, 10, 2), np.uint8)
    low, high = VALUES[blocks & 15], VALUES[blocks >> 4]
    values = np.stack([low, high], -1).reshape(3, 10, 2, 32)
    truth = (values * 2.0 ** (scales.astype(np.float64) - 127)[..., None]).reshape(3, 10, 64)
    stack = from_gpt_oss(blocks, scales)
    assert stack.shape == (3, 64, 10)
    assert np.array_equal(stack.dequantize("float64"), truth.swapaxes(1, 2))


def test_what_does_not_belong_together() -> None:
    codes, half = np.zeros((2, 16), np.uint8), np.ones((2, 2), ml_dtypes.float8_e4m3fn)
    for given, error, words in (
        ((codes, np.ones((2, 1), np.float16)), TypeError, "must be uint8 or float8_e8m0fnu"),
        ((codes, half), ValueError, "a factor belongs to NVFP4"),
        ((codes, np.ones((2, 1), np.uint8), 2.0), ValueError, "a factor belongs to NVFP4"),
        ((codes, half[:, :1], 2.0), ValueError, r"but \(2, 2\) belongs"),
        ((codes.astype(np.int8), half, 2.0), TypeError, "must be uint8"),
    ):
        with pytest.raises(error, match=words):
            from_float4(*given)
    with pytest.raises(ValueError, match=r"but \(3, 4, 2\) belongs"):
        from_gpt_oss(np.zeros((3, 4, 2, 16), np.uint8), np.zeros((3, 4, 1), np.uint8))


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize(
    "asked",
    [
        {"bits": 8},
        {"group_size": 64},
        {"group_size": None},
        {"symmetric": True},
        {"scale_dtype": "float16"},
        {"hessian": np.eye(64)},
    ],
)
def test_what_a_format_fixes_cannot_be_asked_for_otherwise(form: Any, asked: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(asked))} is .*format '{form}' has its own"):
        gm.quantize(np.ones((2, 64), np.float32), format=form, **asked)
    own = {"mxfp4": 32, "nvfp4": 16}[form]
    assert gm.quantize(np.ones((2, 64), np.float32), 4, own, format=form).group_size == own
