"""Models that are quantised, saved, and loaded in a fresh process answer bit for bit the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch

import gemmule.torch
from gemmule.torch import GemmuleConfig, QuantLinear, quantize_

WAYS: dict[str, dict[str, Any]] = {
    "in place": {"bits": 4},
    "while loading": {"bits": 8, "group_size": 32, "scale_dtype": "float16"},
    "half": {"bits": 4, "symmetric": True, "method": "mse"},
}
CASES = [
    *((name, "in place") for name in architectures.MODELS),
    *((name, "while loading") for name in architectures.MODELS),
    *((name, "half") for name in ("llama", "gpt2", "t5", "whisper")),
]


def made(name: str, way: str, floats: Path) -> Any:
    if way == "while loading":
        kind, _ = architectures.MODELS[name]
        architectures.build(name).save_pretrained(floats, max_shard_size="100kB")
        return kind.from_pretrained(floats, quantization_config=GemmuleConfig(**WAYS[way]))
    model = architectures.build(name, torch.bfloat16 if way == "half" else torch.float32)
    quantize_(model, **WAYS[way])
    return model


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """What each model answers before it is saved, and what it answers in a fresh process."""
    saved, wanted = tmp_path_factory.mktemp("saved"), {}
    for name, way in CASES:
        model = made(name, way, tmp_path_factory.mktemp("floats"))
        folder = saved / f"{name}-{way.replace(' ', '_')}"
        model.save_pretrained(folder, max_shard_size="60kB")
        assert (folder / "model.safetensors.index.json").exists()  # in several files
        wanted[name, way] = architectures.logits(model), folder / "logits.pt"
    script = Path(architectures.__file__).with_name("fresh.py")
    subprocess.run([sys.executable, script, saved], check=True)
    return {case: (there, torch.load(file)) for case, (there, file) in wanted.items()}


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_fresh_process_answers_the_same(
    name: str, way: str, answers: dict[tuple[str, str], Any]
) -> None:
    before, after = answers[name, way]
    assert before.dtype == after.dtype
    assert torch.equal(before, after)


def test_ways_to_save_and_load(tmp_path: Path) -> None:
    """Devices by accelerate, a base model alone, loaded and saved again, single layers' options."""
    kind, _ = architectures.MODELS["llama"]
    model = architectures.build("llama")
    model.save_pretrained(tmp_path / "floats")
    config = GemmuleConfig(
        layers={"*.down_proj": {"bits": 8, "group_size": -1}, "*.1.self_attn.q_proj": {"bits": 8}},
        modules_to_not_convert=["model.layers.0.mlp.up_proj"],
    )
    model = kind.from_pretrained(
        tmp_path / "floats", quantization_config=config, device_map="auto", dtype=torch.bfloat16
    )
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert type(model.lm_head) is QuantLinear
    assert [layer.mlp.down_proj.group_size for layer in model.model.layers] == [-1, -1]
    assert model.model.layers[1].self_attn.q_proj.bits == 8
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "codes")
    again = kind.from_pretrained(tmp_path / "codes", device_map={"": "cpu"}, dtype="auto")
    assert torch.equal(architectures.logits(model), architectures.logits(again))
    again.save_pretrained(tmp_path / "more")
    for folder in ("codes", "more"):
        base = type(model.model).from_pretrained(tmp_path / folder, dtype="auto")
        ids = architectures.inputs(model)
        assert torch.equal(base(**ids)[0], model.model(**ids)[0])
        assert base.layers[0].mlp.down_proj.group_size == -1


def test_layers_that_share_codes_are_saved_once_each(tmp_path: Path) -> None:
    model = architectures.build("llama")
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight = first.up_proj.weight
    quantize_(model, bits=4)
    assert second.up_proj.codes.data_ptr() == first.up_proj.codes.data_ptr()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(architectures.logits(model), architectures.logits(again))


def test_an_adapter_less_model_put_together_by_hand(tmp_path: Path) -> None:
    """Layers that were not put in by `quantize_` are refused, until the model is told of them."""
    model = architectures.build("llama")
    model.model.layers[0].mlp.up_proj = QuantLinear.from_linear(model.model.layers[0].mlp.up_proj)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.up_proj' is .*attach"):
        model.save_pretrained(tmp_path)
    gemmule.torch.pretrained.attach(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(architectures.logits(model), architectures.logits(again))
    assert type(again.model.layers[1].mlp.up_proj) is torch.nn.Linear


def test_what_is_not_whole_or_too_new_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = architectures.build("llama")
    quantize_(model)
    model.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    state, text = load_file(file), config.read_text()
    name = "model.layers.0.mlp.up_proj"
    broken = {
        "no scales": {k: v for k, v in state.items() if k != f"{name}.scales"},
        "other shape": state | {f"{name}.codes": state[f"{name}.codes"][:-1].clone()},
        "not finite": state | {f"{name}.scales": state[f"{name}.scales"] * torch.inf},
    }
    for tensors in broken.values():
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            type(model).from_pretrained(tmp_path)
    save_file(state, file, {"format": "pt"})
    for old, new, words in (
        ('"format": 1', '"format": 9', "reads format 1"),
        ('"bits": 4', '"bits": 5', "bits is 5"),
        ('"bits": 4', '"bits": 8', "conversion"),
    ):
        config.write_text(text.replace(old, new))
        with pytest.raises((RuntimeError, ValueError), match=words):
            type(model).from_pretrained(tmp_path)
    config.write_text(text)
    with pytest.raises(ValueError, match="disk"):
        type(model).from_pretrained(tmp_path, device_map={"model": "cpu", "lm_head": "disk"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "x"}, "method is 'x'; known are rtn, mse, hqq, gptq"),
        ({"method": "hqq", "symmetric": True}, "symmetric=True has none"),
        ({"scale_dtype": "int8"}, "scale_dtype is 'int8'"),
        ({"number_format": "mxfp4", "method": "hqq"}, "of format 'mxfp4' take one of rtn, mse"),
        ({"layers": {"*.up_proj": {"method": "y"}}}, "method is 'y'"),
        ({"layers": {"*.up_proj": {"format": "nvfp4", "method": "hqq"}}}, "of format 'nvfp4'"),
    ],
)
def test_options_are_refused_before_a_model_is_loaded(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        GemmuleConfig(**options)
