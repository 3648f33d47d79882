"""Mixtures of experts whose experts are quantised: answers, gradients, files, what is left."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch

import gemmule.torch as gt
from gemmule.torch import GemmuleConfig, QuantExperts, QuantLinear, QuantStack, quantize_
from gemmule.torch.experts import how_kept


def built(name: str) -> Any:
    """Return a model whose routers and biases are random too, as trained ones are."""
    model = architectures.build(name)
    draw = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


def dequantised(quantised: Any, floats: Any) -> Any:
    """Give a float model the weights that a quantised one's codes stand for."""
    for path, layer in quantised.named_modules():
        if isinstance(layer, QuantLinear):
            floats.get_submodule(path).weight.data = layer.dequantize()
        elif isinstance(layer, QuantStack):
            parent, _, key = path.rpartition(".")
            how = how_kept(floats.get_submodule(parent))
            assert how is not None
            weight = how.stack_of(torch.from_numpy(layer.stack.dequantize().copy()))
            floats.get_submodule(parent)._parameters[key] = torch.nn.Parameter(weight)
    return floats


@pytest.mark.parametrize("name", architectures.EXPERTS)
@pytest.mark.parametrize(
    "options",
    [{"bits": 4, "group_size": 32}, {"bits": 8, "symmetric": True}, {"format": "mxfp4"}],
)
def test_answers_are_those_of_the_dequantised_weights(name: str, options: Any) -> None:
    model = built(name)
    twin = copy.deepcopy(model)
    report = quantize_(model, **options)
    experts = [path for path, one in model.named_modules() if isinstance(one, QuantExperts)]
    assert len(experts) == 2
    assert {f"{path}.{key}" for path in experts for key in ("gate_up_proj", "down_proj")} < set(
        report.replaced
    )
    assert report.share > 0.9
    assert not any("experts" in left for left in report.skipped)
    wanted = architectures.logits(dequantised(model, twin))
    torch.testing.assert_close(architectures.logits(model), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "gptoss"])
def test_gradients_reach_tokens_routers_and_biases(name: str) -> None:
    model = built(name)
    twin = copy.deepcopy(model)
    quantize_(model, bits=4, group_size=32)
    dequantised(model, twin)
    found = []
    for one in (model, twin):
        given = architectures.inputs(one)["input_ids"]
        one(input_ids=given, labels=given).loss.backward()
        found.append({path: p.grad for path, p in one.named_parameters() if p.grad is not None})
    assert {"mixtral": "mlp.gate", "gptoss": "down_proj_bias"}[name] in str(found[0].keys())
    assert found[0].keys() == {path for path in found[1] if path in found[0]}
    for path, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][path], rtol=1e-3, atol=1e-5)


def test_compiled_exported_and_batched() -> None:
    torch.manual_seed(0)
    experts = quantised_experts("gptoss")
    x, index = torch.randn(5, 64), torch.tensor([[0, 3], [3, 1], [0, 1], [2, 3], [3, 0]])
    shares = torch.rand(5, 2)
    with torch.no_grad():
        wanted = experts(x, index, shares)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, index, shares), wanted)
        exported = torch.export.export(experts, (x, index, shares)).module()
        assert torch.equal(exported(x, index, shares), wanted)
        batch = torch.vmap(lambda one: experts(one, index, shares))(torch.stack([x, -x]))
    torch.testing.assert_close(batch[0], wanted)


def quantised_experts(name: str, **options: Any) -> Any:
    experts = built(name).model.layers[0].mlp.experts
    del experts._is_expert_parallel  # as in transformers before it had that
    return QuantExperts.from_experts(experts, **{"bits": 8, "group_size": 32, **options})


def test_experts_of_float8_are_what_a_model_keeps() -> None:
    """Tensors of codes and scales are taken as they are, and saved so."""
    draw, kept = torch.Generator().manual_seed(3), []
    for height, width in ((256, 64), (64, 128)):
        codes = torch.randn(4 * height, width, generator=draw).to(torch.float8_e4m3fn)
        scales = torch.rand(4 * height, width // 32, generator=draw)
        form: Any = {"shape": (4, width, height), "bits": 8, "group_size": 32}
        kept.append((codes, scales, QuantStack.from_tensors(codes, scales, **form)))
    (*first, gate_up), (*second, down) = kept
    experts = QuantExperts(gate_up.stack, down.stack)
    assert "format='float8', group_size=32" in repr(experts)
    assert experts.down_proj.state_dict()["codes"].dtype is torch.float8_e4m3fn
    x, index = (
        torch.randn(5, 64, generator=draw),
        torch.tensor([[0, 3], [3, 1], [0, 1], [2, 3], [3, 0]]),
    )
    shares = torch.rand(5, 2, generator=draw)
    wanted = torch.zeros(5, 64)
    weights = [codes.float() * scales.repeat_interleave(32, 1) for codes, scales in (first, second)]
    for token, slot in ((t, j) for t in range(5) for j in range(2)):
        e = int(index[token, slot])
        gate, up = (weights[0][256 * e : 256 * (e + 1)] @ x[token]).chunk(2)
        inner = torch.nn.functional.silu(gate) * up
        wanted[token] += shares[token, slot] * (weights[1][64 * e : 64 * (e + 1)] @ inner)
    torch.testing.assert_close(experts(x, index, shares), wanted, rtol=1e-4, atol=1e-3)
    with pytest.raises(TypeError, match="float8 g32 transposed"):
        experts(x.requires_grad_(), index, shares).sum().backward()


def test_tokens_of_other_processes_experts_add_nothing() -> None:
    experts = quantised_experts("mixtral")
    x, shares = torch.randn(3, 64), torch.rand(3, 2)
    with torch.no_grad():
        wanted = experts(x, torch.tensor([[0, 1], [2, 3], [1, 0]]), shares * shares.new([1, 0]))
        experts._is_expert_parallel = True
        found = experts(x, torch.tensor([[0, 4], [2, 4], [1, 4]]), shares)
        assert torch.equal(experts(x, torch.full((3, 2), 4), shares), torch.zeros(3, 64))
    torch.testing.assert_close(found, wanted)


def test_only_what_is_wanted_is_taken(tmp_path: Path) -> None:
    """Experts left by a filter stay floats beside others, in what is saved too."""
    model = built("mixtral")
    first = "model.layers.0.mlp.experts"
    wish = {"model.layers.1.mlp.experts": {"bits": 8}}
    report = quantize_(model, filter=lambda name, _: wish.get(name, name != first))
    assert report.skipped[f"{first}.down_proj"] == "the filter left it"
    assert model.get_submodule("model.layers.1.mlp.experts.down_proj").bits == 8
    assert type(model.get_submodule(first)).__name__ == "MixtralExperts"
    assert model.config.quantization_config.format == 2
    model.save_pretrained(tmp_path / "some")
    again = type(model).from_pretrained(tmp_path / "some")
    assert torch.equal(architectures.logits(again), architectures.logits(model))
    floats = built("mixtral")
    floats.save_pretrained(tmp_path / "floats")
    config = GemmuleConfig(
        layers={"*.experts.down_proj": {"bits": 8}}, modules_to_not_convert=[f"{first}.down_proj"]
    )
    loaded = type(model).from_pretrained(tmp_path / "floats", quantization_config=config)
    assert type(loaded.get_submodule(first)).__name__ == "MixtralExperts"
    other = loaded.get_submodule("model.layers.1.mlp.experts")
    assert (other.gate_up_proj.bits, other.down_proj.bits) == (4, 8)


def test_models_in_one_file(tmp_path: Path) -> None:
    model = built("gptoss")
    quantize_(model, bits=4, group_size=32)
    gt.save_model(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = type(model)(model.config)
    other = built("gptoss")
    quantize_(other, bits=8)
    for start in (built("gptoss"), other):
        loaded = gt.load_model(start, tmp_path / "model.safetensors")
        assert torch.equal(architectures.logits(loaded), architectures.logits(model))
    with pytest.raises(ValueError, match="not saved with a model"):  # its rotary frequencies
        gt.load_model(empty, tmp_path / "model.safetensors")
    other.model.layers[0].mlp.experts.down_proj.out_features = 1
    with pytest.raises(ValueError, match=r"down_proj' of the file: it is \(4, 128, 64\), but"):
        gt.load_model(other, tmp_path / "model.safetensors")


def test_states_are_loaded_into_experts_of_the_same_form() -> None:
    one, other = quantised_experts("mixtral"), quantised_experts("qwen3moe")
    state = one.state_dict()
    fresh = quantised_experts("mixtral", method="mse")
    fresh.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(fresh.buffers(), one.buffers(), strict=True))
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="was saved with"):
        quantised_experts("mixtral", bits=4).load_state_dict(state)
    halves = fresh.to(torch.bfloat16)
    assert halves.down_proj.scales.dtype == torch.float32
    assert halves.down_proj.weight_dtype == torch.bfloat16


def test_what_would_be_lost_is_refused() -> None:
    model = built("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.forward = lambda *given: given[0]
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts': it has forward of its own"):
        quantize_(model)
    assert not any(isinstance(one, QuantLinear) for one in model.modules())
    seen = gt.calibrate(built("mixtral"), [{"input_ids": torch.ones(1, 4).long()}], hessian=True)
    fresh = built("mixtral")
    with pytest.raises(ValueError, match="'gptq' needs second moments, of which experts"):
        quantize_(fresh, method="gptq", calibration=seen)
    assert not any(isinstance(one, QuantLinear) for one in fresh.modules())
    others = {"method": "rtn"}
    quantize_(
        fresh,
        method="gptq",
        calibration=seen,
        filter=lambda name, _: others if name.endswith("experts") else True,
    )
    with pytest.raises(TypeError, match="not known to hold experts"):
        QuantExperts.from_experts(torch.nn.Linear(2, 2))
    stack = quantised_experts("mixtral").down_proj.stack
    with pytest.raises(ValueError, match="gates, then ups"):
        QuantExperts(stack, stack)


def test_hooks_and_modules_in_two_places_go_with_experts() -> None:
    model = built("mixtral")
    first, second = (layer.mlp for layer in model.model.layers)
    second.experts = first.experts
    seen = []
    handle = first.experts.register_forward_hook(lambda *given: seen.append(given[2].shape))
    quantize_(model)
    assert second.experts is first.experts
    architectures.logits(model)
    assert len(seen) == 2
    handle.remove()
    architectures.logits(model)
    assert len(seen) == 2


def test_floats_are_freed_experts_by_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, there, make = built("mixtral"), [], QuantExperts.from_experts
    floats = [weakref.ref(layer.mlp.experts) for layer in model.model.layers]

    def counted(experts: Any, **options: Any) -> Any:
        there.append(sum(one() is not None for one in floats))
        return make(experts, **options)

    monkeypatch.setattr(QuantExperts, "from_experts", counted)
    quantize_(model)
    assert there == [2, 1]
    assert [one() for one in floats] == [None, None]
