"""`gemmule quantize` writes what `from_pretrained` and `save_pretrained` would, and goes on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch

from gemmule.torch import GemmuleConfig, QuantLinear, QuantStack
from gemmule.torch.folders import quantise_folder
from gemmule_lab.cli import run

FOLDERS = ["llama", "llama_tied", "gpt2", "t5", "bert", "vit", "mixtral", "qwen3moe", "gptoss"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_that_of_the_quantised_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    floats, out = tmp_path / "floats", tmp_path / "out"
    architectures.build(name).save_pretrained(floats, max_shard_size="50kB")
    (floats / "tokenizer.json").write_text("{}")
    options = ["--bits", "8", "--group-size", "32", "--method", "rtn"]
    assert run(["quantize", str(floats), str(out), *options]) == 0
    assert "tensors quantised" in capsys.readouterr().out
    kind = architectures.MODELS[name][0]
    here = kind.from_pretrained(out)
    there = kind.from_pretrained(floats, quantization_config=GemmuleConfig(8, 32))
    assert torch.equal(architectures.logits(here), architectures.logits(there))
    for layers in (here, there):
        assert any(isinstance(one, QuantLinear) for one in layers.modules())
        stacks = sum(isinstance(one, QuantStack) for one in layers.modules())
        assert stacks == (4 if name in architectures.EXPERTS else 0)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert run(["quantize", str(out), str(tmp_path / "again")]) == 2
    assert "quantised already" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gptoss"])
def test_folders_of_4_bit_floats(name: str, form: str, tmp_path: Path) -> None:
    floats, out = tmp_path / "floats", tmp_path / "out"
    architectures.build(name).save_pretrained(floats)
    assert run(["quantize", str(floats), str(out), "--format", form, "--method", "rtn"]) == 0
    with pytest.raises(ValueError, match="known are mxfp4, nvfp4"):
        GemmuleConfig(number_format="int4")
    for asked in ({"bits": 8}, {"group_size": 128}, {"group_size": None}):
        with pytest.raises(ValueError, match="leave both away, or the format"):
            GemmuleConfig(**asked, number_format=form)
    kind, config = architectures.MODELS[name][0], GemmuleConfig(number_format=form)
    here, there = (
        kind.from_pretrained(out),
        kind.from_pretrained(floats, quantization_config=config),
    )
    assert torch.equal(architectures.logits(here), architectures.logits(there))
    layers = [one for one in here.modules() if isinstance(one, QuantLinear | QuantStack)]
    assert layers
    assert {one.format for one in layers} == {form}
    for one in layers:  # as they do on their way to a GPU
        one._widen()
    expected = architectures.logits(here)
    here.save_pretrained(tmp_path / "wide")
    wide = kind.from_pretrained(tmp_path / "wide")
    assert torch.equal(architectures.logits(wide), expected)


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats, out, kind = tmp_path / "floats", tmp_path / "out", architectures.MODELS["llama"][0]
    architectures.build("llama").save_pretrained(floats)
    config = GemmuleConfig(4, method="hqq")
    count, weights = quantise_folder(floats, out, config, most_bytes=40_000)
    assert len(list(itertools.islice(weights, count // 2))) == count // 2
    weights.close()  # type: ignore[attr-defined]
    before = {file: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    assert len(before) > 1
    with pytest.raises(OSError, match="no file named"):
        kind.from_pretrained(out)  # it is no model yet
    with pytest.raises(ValueError, match="other options"):
        list(quantise_folder(floats, out, GemmuleConfig(8), most_bytes=40_000)[1])
    read: list[Any] = []
    from gemmule.torch import folders

    tensors = folders.Weight.tensors
    monkeypatch.setattr(folders.Weight, "tensors", lambda one: read.append(one) or tensors(one))
    assert len(list(quantise_folder(floats, out, config, most_bytes=40_000)[1])) == count
    assert 0 < len(read) < count
    assert {file: file.stat().st_mtime_ns for file in before} == before
    model = kind.from_pretrained(out)
    assert model.config.quantization_config.method == "hqq"
    wanted = kind.from_pretrained(floats, quantization_config=config)
    assert torch.equal(architectures.logits(model), architectures.logits(wanted))
