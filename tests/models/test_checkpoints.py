"""Models that other tools quantised become served ones in one call, code by code."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import architectures
import foreign
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gemmule.torch import QuantLinear, load_checkpoint, quantize_
from gemmule.torch.experts import QuantStack


def floats(folder: Path, name: str = "llama") -> Any:
    model = architectures.build(name)
    model.save_pretrained(folder)
    return model


def check_served(served: Any, model: Any, folder: Path) -> None:
    """Check that a model computes what another of its weights does, also when read again."""
    found = architectures.logits(served)
    torch.testing.assert_close(found, architectures.logits(model), rtol=1e-3, atol=1e-4)
    served.save_pretrained(folder)
    again = type(served).from_pretrained(folder)
    assert torch.equal(architectures.logits(again), architectures.logits(served))


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("tool", foreign.WRITERS)
def test_codes_of_other_tools(tool: str, name: str, tmp_path: Path) -> None:
    model = floats(tmp_path / "floats", name)
    weights = foreign.WRITERS[tool](tmp_path / "floats", tmp_path / "codes")
    served = load_checkpoint(tmp_path / "codes", dtype=torch.float32)
    layers = {n: one for n, one in served.named_modules() if isinstance(one, QuantLinear)}
    assert layers.keys() == weights.keys()
    for path, layer in layers.items():
        assert torch.equal(layer.dequantize(), weights[path])  # one product, rounded once
        model.get_submodule(path).weight.data = weights[path]
    check_served(served, model, tmp_path / "own")


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    model = floats(tmp_path / "floats", "gptoss")
    weights = foreign.gpt_oss(tmp_path / "floats", tmp_path / "codes")
    served = load_checkpoint(tmp_path / "codes", dtype=torch.float32)
    layers = {n: one for n, one in served.named_modules() if isinstance(one, QuantStack)}
    assert layers.keys() == weights.keys()
    for path, layer in layers.items():
        assert layer.format == "mxfp4"
        assert np.array_equal(layer.stack.dequantize(), weights[path])
        model.get_parameter(path).data = weights[path].contiguous()
    check_served(served, model, tmp_path / "own")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({"quant_method": "gptq", "bits": 3}, "GPTQ by 3 bits"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    "gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
    "axis": (
        {"quant_method": "hqq", "quant_config": {"q": {"weight_quant_params": {"axis": 0}}}},
        "along axis 0",
    ),
    "fp8": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "'float-quant"),
    "w8a8": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"g": {"weights": {"num_bits": 8}, "input_activations": {"bits": 8}}},
        },
        "g quantises activations",
    ),
    "fp8 of ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt by 'FP8'"),
    "other": ({"quant_method": "bitsandbytes"}, "'bitsandbytes'; read are gptq"),
    "none": ({}, "is None; read are"),
    "own": ({"quant_method": "gemmule"}, "from_pretrained"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named_before_anything_is_loaded(case: str, tmp_path: Path) -> None:
    quantization, words = REFUSED[case]
    config = architectures.MODELS["llama"][1].to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config.pop("quantization_config", None)
    if quantization:
        config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        load_checkpoint(tmp_path)


def test_a_name_is_not_asked_of_the_network() -> None:
    with pytest.raises(FileNotFoundError, match=r"nope is no folder here.*snapshot_download"):
        load_checkpoint("nope")


@pytest.mark.parametrize(
    ("tool", "lost"),
    [
        ("gptq", "scales"),
        ("hqq", "nbits"),
        ("compressed-tensors", "weight_shape"),
        ("gpt-oss", "_scales"),
        ("own", "scales"),
    ],
)
def test_a_tensor_that_is_missing_is_named(
    tool: str, lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = floats(tmp_path / "floats", "gptoss" if tool == "gpt-oss" else "llama")
    codes = tmp_path / "codes"
    if tool == "own":
        quantize_(model)
        model.save_pretrained(codes)
    else:
        write = foreign.gpt_oss if tool == "gpt-oss" else foreign.WRITERS[tool]
        write(tmp_path / "floats", codes)
    path = min(codes.glob("*.safetensors"))
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.endswith(lost))]
    save_file(tensors, path, {"format": "pt"})
    told = logging.getLogger("transformers")
    told.addHandler(caplog.handler)
    try:  # the error is transformers' own, its report has ours
        with caplog.at_level("WARNING", told.name), pytest.raises(RuntimeError, match="CONV"):
            type(model).from_pretrained(codes) if tool == "own" else load_checkpoint(codes)
    finally:
        told.removeHandler(caplog.handler)
    assert f"but no {lost}: the checkpoint is not whole" in caplog.text


def test_weights_that_stand_nowhere_are_named(tmp_path: Path) -> None:
    floats(tmp_path / "floats", "llama")
    foreign.WRITERS["awq"](tmp_path / "floats", tmp_path / "codes")
    config = json.loads((tmp_path / "codes" / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (tmp_path / "codes" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"7 quantised weights .*'model.layers.1.mlp.down_proj'"):
        load_checkpoint(tmp_path / "codes")


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3"])
def test_gguf(name: str, tmp_path: Path) -> None:
    model = floats(tmp_path / "floats", name)
    weights = foreign.gguf(tmp_path / "floats", tmp_path / "codes")
    served = load_checkpoint(tmp_path / "codes" / "model.gguf")
    layers = {n: one for n, one in served.named_modules() if isinstance(one, QuantLinear)}
    assert layers.keys() == {n for n in weights if n.endswith("_proj")}
    for path, layer in layers.items():
        torch.testing.assert_close(layer.dequantize(), weights[path], rtol=1e-6, atol=1e-6)
    for path, weight in weights.items():
        holder = path if path in dict(model.named_parameters()) else f"{path}.weight"
        model.get_parameter(holder).data = weight
    check_served(served, model, tmp_path / "own")
    narrow = load_checkpoint(tmp_path / "codes" / "model.gguf", dtype=torch.bfloat16)
    assert {one.dtype for one in narrow.parameters()} == {torch.bfloat16}


def test_gguf_that_is_not_served_is_named(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.GGUF", "mamba")
    kind = gguf.GGMLQuantizationType.Q5_0
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 22), np.uint8), raw_dtype=kind)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    with pytest.raises(ValueError, match=r"blk.0.ffn_up.weight is Q5_0; its architecture is 'mam"):
        load_checkpoint(tmp_path / "m.GGUF")
