"""Layers and experts of PyTorch whose weights are floats of 4 bits."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gemmule as gm
import gemmule.torch as gt

FORMATS = ("mxfp4", "nvfp4")


def layer_of(form: str, bias: bool = True) -> Any:
    torch.manual_seed(0)
    return gt.QuantLinear.from_linear(torch.nn.Linear(96, 40, bias), format=form)


@pytest.mark.parametrize("form", FORMATS)
def test_a_layer_multiplies_and_is_differentiable(form: str) -> None:
    layer, x = layer_of(form), torch.randn(5, 96, requires_grad=True)
    weight = layer.dequantize()
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, layer.bias))
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, -1))
    half = layer.to(torch.bfloat16)
    assert half(x.bfloat16()).dtype is torch.bfloat16
    assert half.scales.dtype is getattr(torch, gm.quantize(np.eye(2), format=form).scale_dtype)
    assert f"format='{form}'" in repr(half)


@pytest.mark.parametrize("form", FORMATS)
def test_a_state_dict_goes_round(form: str) -> None:
    layer, file, x = layer_of(form), io.BytesIO(), torch.randn(3, 96)
    torch.save(layer.state_dict(), file)
    file.seek(0)
    empty = gt.QuantLinear(96, 40, format=form)
    empty.load_state_dict(torch.load(file))
    assert torch.equal(empty(x), layer(x))
    other = gt.QuantLinear(96, 40, format=FORMATS[form == FORMATS[0]])
    with pytest.raises(RuntimeError, match="was saved with"):
        other.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("form", FORMATS)
def test_models_are_saved_loaded_and_compiled(form: str, tmp_path: Path) -> None:
    def made() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))

    model, x = made(), torch.randn(2, 64)
    assert len(gt.quantize_(model, format=form).replaced) == 2
    gt.save_model(model, tmp_path / "model.safetensors")
    loaded = gt.load_model(made(), tmp_path / "model.safetensors")
    assert torch.equal(loaded(x), model(x))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("form", FORMATS)
def test_experts(form: str) -> None:
    torch.manual_seed(0)
    weights = torch.randn(4, 64, 128), torch.randn(4, 64, 64)
    stacks = [gm.quantize_experts(one, format=form) for one in weights]  # type: ignore[arg-type]
    floats = [torch.from_numpy(np.ascontiguousarray(one.dequantize())) for one in stacks]
    experts, x = gt.QuantExperts(*stacks), torch.randn(3, 64)
    index, shares = torch.tensor([[0, 3], [3, 1], [0, 1]]), torch.rand(3, 2)
    expected = torch.zeros(3, 64)
    for token in range(3):
        for slot in range(2):
            gate, up = (x[token] @ floats[0][index[token, slot]]).chunk(2)
            out = (torch.nn.functional.silu(gate) * up) @ floats[1][index[token, slot]]
            expected[token] += shares[token, slot] * out
    torch.testing.assert_close(experts(x, index, shares), expected, rtol=1e-4, atol=1e-3)
    fewer, wider = weights[1][:3], torch.randn(4, 32, 64)
    for other in (fewer, wider):
        down = gm.quantize_experts(other, format=form)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="both must have as many experts"):
            gt.QuantExperts(stacks[0], down)


@pytest.mark.parametrize("form", FORMATS)
def test_what_goes_to_a_gpu_is_eight_bits_of_the_same_weights(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer, x = layer_of(form), torch.randn(3, 96)
    before, product = layer.dequantize(), layer(x)
    layer._widen()  # as `.to("cuda")` does first
    assert (layer.bits, layer.group_size, layer.format, layer.zeros) == (
        8,
        32 if form == "mxfp4" else 16,
        None,
        None,
    )
    assert "twice the bytes" in caplog.text
    torch.testing.assert_close(layer.dequantize(), before, rtol=2e-7, atol=0)
    torch.testing.assert_close(layer(x), product)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="known are mxfp4, nvfp4"):
        gt.QuantLinear(96, 40, format="fp4")
    with pytest.raises(ValueError, match="layer '0': method 'hqq' finds scales"):
        gt.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 8)), format="mxfp4", method="hqq")
