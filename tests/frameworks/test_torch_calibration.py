"""What layers are given is gathered, and quantises them better."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gemmule.torch as gt  # noqa: E402
from gemmule.quant.quantize import quantize  # noqa: E402


class Small(torch.nn.Module):  # type: ignore[misc]
    """Two layers that share a weight, one that runs twice, one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.b.weight = self.a.weight
        self.again, self.never = torch.nn.Linear(32, 16), torch.nn.Linear(32, 16)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any, times: float = 1.0) -> Any:
        x = self.drop(x)
        y = self.b(self.a(x).relu())
        return self.again(input=y) + times * self.again(x)


def test_statistics_are_those_by_hand() -> None:
    model, batches = Small(), [torch.randn(3, 5, 32), torch.randn(7, 32)]
    seen = gt.calibrate(model, batches, hessian=True)
    x = torch.cat([batch.reshape(-1, 32) for batch in batches]).double()
    copy = Small().double().eval()
    h = copy.a(x).relu().detach()
    y = copy.b(h).detach()
    expected = {"a": torch.cat([x, h]), "b": torch.cat([x, h]), "again": torch.cat([y, x])}
    assert seen.keys() == expected.keys()
    assert seen["a"] is seen["b"]
    with pytest.raises(FrozenInstanceError):  # what two layers share
        seen["a"].rows = 1
    for name, rows in expected.items():
        assert seen[name].rows == len(rows) == 44
        H = rows.T @ rows / 44
        torch.testing.assert_close(seen[name].hessian.double(), H, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            seen[name].mean_square.double(), (rows**2).mean(0), rtol=1e-5, atol=1e-6
        )
    plain = gt.calibrate(model, batches)
    assert plain["a"].hessian is None
    torch.testing.assert_close(plain["a"].mean_square, seen["a"].mean_square)


def test_a_batch_is_a_dict_a_list_a_tuple_or_alone() -> None:
    x, times, model = torch.randn(6, 32), torch.full((6, 1), 2.0), Small()
    wanted = gt.calibrate(model, [(x, times)])
    for batch in ([x, times], {"x": x, "times": times}):
        seen = gt.calibrate(model, [batch])
        for name, one in wanted.items():
            torch.testing.assert_close(seen[name].mean_square, one.mean_square)
    one, other = gt.calibrate(model, [x]), gt.calibrate(model, [[x]])
    torch.testing.assert_close(one["a"].mean_square, other["a"].mean_square)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_statistics_of_any_dtype_are_summed_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(3000, 32) * 40).to(dtype)  # whose squares pass float16's range in a sum
    model = torch.nn.Sequential(torch.nn.Linear(32, 4, dtype=dtype))
    seen = gt.calibrate(model, [x[:1000], x[1000:]], hessian=True)
    ((_, found),) = seen.items()
    exact = x.double().T @ x.double() / 3000
    assert found.hessian.dtype == found.mean_square.dtype == torch.float32
    torch.testing.assert_close(found.hessian.double(), exact, rtol=1e-4, atol=0.05)
    torch.testing.assert_close(found.mean_square.double(), exact.diagonal(), rtol=1e-4, atol=1e-3)
    plain = gt.calibrate(model, [x])
    ((_, other),) = plain.items()
    torch.testing.assert_close(other.mean_square, found.mean_square, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("method", ["hqq", "gptq"])
def test_what_a_layer_asks_for_itself_comes_before_what_was_seen(method: str) -> None:
    """Options of a layer, of all layers and the statistics: in this order."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 32))
    seen = gt.calibrate(model, [torch.randn(64, 32)], hessian=True)
    own = {"importance": np.arange(1.0, 33.0)} if method == "hqq" else {"hessian": np.eye(32)}
    wish = {"0": {"bits": 8, "method": method, **own}, "1": True}
    weight = model[0].weight.detach().numpy().copy()
    told = lambda name, layer: wish[name]  # noqa: E731
    gt.quantize_(model, bits=4, group_size=8, filter=told, calibration=seen)
    wanted = quantize(weight, 8, 8, method=method, **own)
    assert np.array_equal(model[0].matrix.dequantize(), wanted.dequantize())
    assert (model[1].matrix.bits, model[1].matrix.group_size) == (4, 8)


def test_the_model_is_as_it_was() -> None:
    model = Small()
    model.drop.eval()
    with pytest.raises(RuntimeError):
        gt.calibrate(model, [torch.ones(2, 3)])
    gt.calibrate(model, [{"x": torch.ones(2, 32), "times": 2.0}, (torch.ones(1, 32), 0.5)])
    assert model.training
    assert model.a.training
    assert not model.drop.training
    assert not any(layer._forward_pre_hooks for layer in model.modules())
    model(torch.ones(2, 32)).sum().backward()  # nothing of inference mode is left
    assert model.a.weight.grad is not None


@pytest.mark.parametrize("method", ["hqq", "gptq"])
def test_a_model_is_quantised_with_what_was_seen(method: str) -> None:
    model, x = Small(), torch.randn(64, 32) * torch.linspace(0.1, 3, 32)
    seen = gt.calibrate(model, [x], hessian=True)
    a, again = model.a.weight, model.again.weight

    def eight(name: str, layer: Any) -> Any:
        return {"bits": 8, "method": "mse"} if name == "again" else name != "never"

    gt.quantize_(model, 4, 32, filter=eight, method=method, calibration=seen)
    key = {"hqq": "importance", "gptq": "hessian"}[method]
    value = seen["a"].mean_square if method == "hqq" else seen["a"].hessian
    right = quantize(a, 4, 32, method=method, **{key: value})  # type: ignore[arg-type]
    assert np.array_equal(model.a.codes, right.codes)
    assert model.b.codes is model.a.codes
    right = quantize(again, 8, 32, method="mse", importance=seen["again"].mean_square)
    assert np.array_equal(model.again.codes, right.codes)


def test_layers_of_transformers_and_encoders_are_seen() -> None:
    transformers = pytest.importorskip("transformers")
    conv = torch.nn.Sequential(transformers.pytorch_utils.Conv1D(16, 8))  # (out, in)
    x = torch.randn(10, 8)
    seen = gt.calibrate(conv, [x], hessian=True)
    torch.testing.assert_close(seen["0"].hessian, x.T @ x / 10)
    gt.quantize_(conv, method="gptq", calibration=seen)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    seen = gt.calibrate(layer, [torch.randn(2, 5, 16)])
    assert seen.keys() == {"linear1", "linear2"}


def test_what_cannot_be_is_said() -> None:
    model, x = Small(), torch.ones(2, 32)
    for wrong in (x, {"x": x}, 3):
        with pytest.raises(TypeError, match="batches"):
            gt.calibrate(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no batches"):
        gt.calibrate(model, [])
    with pytest.raises(ValueError, match="no linear layer"):
        gt.calibrate(torch.nn.ReLU(), [x])
    with pytest.raises(ValueError, match="layer 'a' was given inputs that are not finite"):
        gt.calibrate(model, [x * torch.nan])
    seen = gt.calibrate(model, [x])
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match="layer 'never': the calibration has no inputs of it"):
        gt.quantize_(model, calibration=seen)
    with pytest.raises(ValueError, match="layer 'a': method 'gptq' needs second moments"):
        gt.quantize_(model, method="gptq", calibration=seen)
    assert dict(model.named_modules()) == before  # nothing was replaced
