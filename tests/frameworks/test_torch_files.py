"""Models of plain PyTorch in files: they come back bit for bit, and files are not believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

import gemmule.torch as gt  # noqa: E402

X = torch.randn(3, 48)


class Model(torch.nn.Module):  # type: ignore[misc]
    """Layers of several forms, a tie of two, a layer in two places, a buffer, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twin = torch.nn.Linear(48, 48), torch.nn.Linear(48, 48, bias=False)
        self.twin.weight = self.first.weight
        self.again, self.norm = self.first, torch.nn.LayerNorm(48)
        self.table, self.head = torch.nn.Embedding(20, 48), torch.nn.Linear(48, 20, bias=False)
        self.head.weight = self.table.weight
        self.inner = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.BatchNorm1d(48))

    def forward(self, x: Any) -> Any:
        x = self.inner(self.norm(self.again(x) + self.twin(x)))
        return self.head(x + self.table.weight.sum(0))


def quantised() -> Any:
    model = Model().eval()
    model.inner[1].running_mean += 0.5
    wish = {"first": True, "again": True, "twin": True, "inner.0": {"bits": 8, "group_size": None}}
    gt.quantize_(model, group_size=16, filter=lambda name, _: wish.get(name, False))
    return model


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path]:
    model = quantised()
    gt.save_model(model, tmp_path / "m.safetensors")
    return model, tmp_path / "m.safetensors"


def test_a_file_is_as_public_as_others(saved: tuple[Any, Path]) -> None:
    path = saved[1].with_name("other")
    path.touch()
    assert saved[1].stat().st_mode == path.stat().st_mode


@pytest.mark.parametrize("device", ["cpu", "meta", "quantised"])
def test_a_model_comes_back(saved: tuple[Any, Path], device: str) -> None:
    model, path = saved
    if device == "quantised":
        empty = quantised()
    else:
        with torch.device(device):
            empty = Model().eval()
    empty.twin.train()
    modes = [one.training for one in empty.modules()]
    loaded = gt.load_model(empty, path)
    assert loaded is empty
    assert [one.training for one in loaded.modules()] == modes
    assert torch.equal(loaded(X), model(X))
    assert loaded.again is loaded.first
    assert loaded.twin.codes.data_ptr() == loaded.first.codes.data_ptr()
    assert loaded.head.weight is loaded.table.weight
    assert (loaded.inner[0].bits, loaded.inner[0].group_size) == (8, None)
    assert loaded.first.weight.dtype == torch.float32
    with pytest.raises(FileExistsError):
        gt.save_model(loaded, path)
    gt.save_model(loaded, path, overwrite=True)
    assert not list(path.parent.glob(".*"))


def without(held: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: one for name, one in held.items() if name != key}


def test_other_files_and_models_are_refused(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, path = saved
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        told = file.metadata()
    tensors, layers = load_file(path), json.loads(told["layers"])
    other = {**layers, "first": {**layers["first"], "bits": 8}}
    wrong: tuple[tuple[dict[str, Any], dict[str, str], str], ...] = (
        (tensors, {}, "no model of format 1"),
        (tensors, {**told, "gemmule_model": "2"}, "Update gemmule"),
        (tensors, {**told, "layers": json.dumps(other)}, "layer 'first' of the file: codes"),
        (without(tensors, "norm.bias"), told, r"lacks \['norm.bias'\]"),
        (tensors | {"more": torch.ones(1)}, told, r"has \['more'\]"),
        (tensors | {"first.scales": tensors["first.scales"] * torch.nan}, told, "finite"),
        (without(tensors, "first.codes"), told, "lacks the tensor 'first.codes', which others"),
        (without(tensors, "inner.0.codes"), told, "layer 'inner.0' of the file: 'inner.0.codes'"),
        *((tensors, without(told, key), "does not tell its layers") for key in ("layers", "ties")),
        *((tensors, {**told, "layers": text}, "does not tell") for text in ("{", "[1]", "3")),
        *(
            (tensors, {**told, "ties": text}, "lacks the tensor")
            for text in ('{"a": "b"}', '{"a": []}')
        ),
        *(
            (tensors, {**told, "layers": json.dumps({**layers, "first": less})}, "layer 'first' of")
            for less in (without(layers["first"], key) for key in layers["first"])
        ),
    )
    for state, metadata, words in wrong:
        save_file(state, tmp_path / "wrong.safetensors", metadata)
        model = Model()
        with pytest.raises(ValueError, match=words):
            gt.load_model(model, tmp_path / "wrong.safetensors")
        assert type(model.first) is torch.nn.Linear
    (tmp_path / "text.safetensors").write_text("no file of tensors")
    with pytest.raises(ValueError, match="not a readable"):
        gt.load_model(Model(), tmp_path / "text.safetensors")
    for suffix in ("pt", "bin"):
        with pytest.raises(ValueError, match="suffix"):
            gt.save_model(Model(), tmp_path / f"m.{suffix}")
    with pytest.raises(ValueError, match="'first'"):
        gt.load_model(torch.nn.Sequential(torch.nn.Linear(48, 48)), path)
