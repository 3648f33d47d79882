"""`gemmule quantize` writes what `from_pretrained` and `save_pretrained` would, and goes on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch

from gemmule.torch import GemmuleConfig, QuantLinear, QuantStack
from gemmule.torch.floats import is_linear
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
    modes = {file.suffix: file.stat().st_mode for file in out.iterdir()}
    assert modes[".safetensors"] == modes[".json"]  # whoever may read one may read the other
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


def test_files_of_another_model_are_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    floats, out = tmp_path / "floats", tmp_path / "out"
    model = architectures.build("llama")
    model.save_pretrained(floats)
    assert run(["quantize", str(floats), str(out)]) == 0
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.neg_()
    model.save_pretrained(floats)  # of the same shapes, options and names
    before = {file: file.read_bytes() for file in out.iterdir()}
    assert run(["quantize", str(floats), str(out)]) == 2
    assert "of another model" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in out.iterdir()} == before


def test_a_damaged_file_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architectures.build("llama").save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:20_000])
    assert run(["quantize", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "holds a damaged .safetensors file: " in capsys.readouterr().err


def test_layers_are_kept_by_patterns_and_strange_names_are_told(tmp_path: Path) -> None:
    architectures.build("llama").save_pretrained(tmp_path)
    kind, options = architectures.MODELS["llama"][0], {"*.up_proj": {"bits": 8}}
    config = GemmuleConfig(modules_to_not_convert=["*.down_proj", "lm_head"], layers=options)
    model = kind.from_pretrained(tmp_path, quantization_config=config)
    left = {name.rpartition(".")[2] for name, one in model.named_modules() if is_linear(one)}
    assert left == {"down_proj", "lm_head"}
    for strange in ({"modules_to_not_convert": ["downproj"]}, {"layers": {"*.upproj": None}}):
        with pytest.warns(UserWarning, match="no layer of this model is called '.*proj'"):
            kind.from_pretrained(tmp_path, quantization_config=GemmuleConfig(**strange))
    with pytest.raises(ValueError, match=r"option of layers\['a'\] is 'bit'; known are bits"):
        GemmuleConfig(layers={"a": {"bit": 8}})
    with pytest.raises(ValueError, match="calibrate"):
        kind.from_pretrained(tmp_path, quantization_config=GemmuleConfig(method="gptq"))
