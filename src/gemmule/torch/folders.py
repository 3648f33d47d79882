"""A model's folder quantised into another one, file by file, without the model in memory.

What is written is what ``save_pretrained`` of the quantised model would write. At most one new file
and one float weight are in memory; a run that was cut off goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from gemmule.quant import rounding
from gemmule.quant.files import FilePath, model_files
from gemmule.quant.quantize import quantize
from gemmule.torch.floats import is_turned
from gemmule.torch.layer import QuantLinear
from gemmule.torch.parts import PARTS
from gemmule.torch.pretrained import GemmuleConfig, GemmuleQuantizer

_MOST_BYTES = 1 << 30
_INDEX = "model.safetensors.index.json"
_OPTIONS = "gemmule_options"


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the folder: its file, its bytes when written, and how it is quantised, if so."""

    name: str
    file: Path
    nbytes: int
    options: dict[str, Any] | None
    turned: bool = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read the tensor, and return it or what it becomes, by name."""
        with safe_open(self.file, "pt") as file:
            tensor = file.get_tensor(self.name)
        if self.options is None:
            return {self.name: tensor.contiguous()}
        matrix = quantize(tensor.T if self.turned else tensor, **self.options)
        layer, stem = QuantLinear.from_matrix(matrix), self.name.removesuffix("weight")
        parts = {part: getattr(layer, part) for part in PARTS}
        return {stem + part: one for part, one in parts.items() if one is not None}


def quantise_folder(
    source: FilePath, target: FilePath, config: GemmuleConfig, most_bytes: int = _MOST_BYTES
) -> tuple[int, Iterator[Weight]]:
    """Return how many tensors a model has, and an iterator that writes them quantised one by one.

    source: a folder of transformers with safetensors files; target: a folder that is new, empty or
    holds the beginning of the same, whose complete files are kept. The iterator yields each tensor
    that is done. ValueError where source is quantised already, holds no safetensors, or target
    was begun with other options.
    """
    source, target = Path(source), Path(target)
    settings = transformers.AutoConfig.from_pretrained(source)
    if getattr(settings, "quantization_config", None):
        raise ValueError(f"{source} is quantised already: use gemmule.torch.load_checkpoint")
    kind = getattr(transformers, settings.architectures[0])
    with torch.device("meta"):
        model = kind(settings)
    weights = list(_weights(source, model, config))
    target.mkdir(parents=True, exist_ok=True)
    for file in target.glob("*.safetensors"):
        with safe_open(file, "pt") as begun:
            if (begun.metadata() or {}).get(_OPTIONS) != config.to_json_string():
                raise ValueError(f"{file} was written with other options: give another folder")
    return len(weights), _written(source, target, weights, model, config, most_bytes)


def _weights(source: Path, model: Any, config: GemmuleConfig) -> Iterator[Weight]:
    quantizer = GemmuleQuantizer(config, pre_quantized=False)
    quantizer._process_model_before_weight_loading(model)
    where = model_files(source)
    for path in sorted(set(where.values()) if isinstance(where, dict) else {where}):
        with safe_open(path, "pt") as file:
            keys = sorted(file.keys())
            layers = quantizer.layers_in(model, keys, ("weight",))
            for key in keys:
                shape = file.get_slice(key).get_shape()
                name = layers.get(key.removesuffix(".weight"), "")
                options = quantizer.chosen.get(name) if key.endswith(".weight") else None
                turned = options is not None and is_turned(model.get_submodule(name))
                size = torch.empty(shape, device="meta").numel()
                nbytes = 4 * size if options is None else _bytes_of(size, shape, options)
                yield Weight(key, path, nbytes, options, turned)


def _bytes_of(size: int, shape: list[int], options: dict[str, Any]) -> int:
    """Return about how many bytes a quantised weight takes."""
    groups = shape[0] * rounding.group_count(shape[1], options["group_size"])
    return size * int(options["bits"]) // 8 + 8 * groups


def _written(
    source: Path,
    target: Path,
    weights: list[Weight],
    model: Any,
    config: GemmuleConfig,
    most_bytes: int,
) -> Iterator[Weight]:
    shards: list[list[Weight]] = [[]]
    for weight in weights:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + weight.nbytes > most_bytes:
            shards.append([])
        shards[-1].append(weight)
    options = config.to_json_string()
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = target / f"model-{number:05}-of-{len(shards):05}.safetensors"
        if not file.exists():
            tensors: dict[str, torch.Tensor] = {}
            for weight in shard:
                tensors |= weight.tensors()
                yield weight
            begun = file.with_suffix(".begun")
            save_file(tensors, begun, {"format": "pt", _OPTIONS: options})
            begun.replace(file)
            del tensors
        else:
            yield from shard
        with safe_open(file, "pt") as written:
            where |= dict.fromkeys(written.keys(), file.name)
    index = {"metadata": {"total_size": sum(one.nbytes for one in weights)}, "weight_map": where}
    (target / _INDEX).write_text(json.dumps(index, indent=2), "utf-8")
    for other in source.iterdir():  # tokenisers, templates, defaults of generation
        weightless = not other.name.endswith((".safetensors", ".bin", _INDEX, ".gguf", ".pth"))
        if other.is_file() and weightless:
            shutil.copy(other, target)
    model.config.quantization_config = config
    model.config.save_pretrained(target)  # the last: without it, there is no model here
