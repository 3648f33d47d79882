"""A model's folder quantised into another one, file by file, without the model in memory.

What is written is what ``save_pretrained`` of the quantised model would write. At most one new file
and one float weight are in memory; a run that was cut off goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

from gemmule.quant import rounding
from gemmule.quant.files import FilePath, check_floats, model_files
from gemmule.quant.quantize import quantize
from gemmule.torch.experts import Kept, QuantStack
from gemmule.torch.files import write_tensors
from gemmule.torch.floats import is_turned
from gemmule.torch.layer import QuantLinear
from gemmule.torch.parts import PARTS
from gemmule.torch.pretrained import OF_EXPERTS, GemmuleConfig, GemmuleQuantizer, joins_experts

_MOST_BYTES = 1 << 30
_INDEX = "model.safetensors.index.json"
_OPTIONS, _SOURCE = "gemmule_options", "gemmule_source"  # what a written file is marked with


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
        tensor = _read(self.name, self.file)
        if self.options is None:
            return {self.name: tensor.contiguous()}
        matrix = quantize(tensor.T if self.turned else tensor, **self.options)
        layer, stem = QuantLinear.from_matrix(matrix), self.name.removesuffix("weight")
        parts = {part: getattr(layer, part) for part in PARTS}
        return {stem + part: one for part, one in parts.items() if one is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Weight):
    """A projection of experts: one tensor, or those of its experts, by kind and then by number."""

    how: Kept
    sources: tuple[tuple[tuple[str, Path], ...], ...] = ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read them one by one, and return what they become together, by name."""
        options = self.options or {}
        if not self.sources:
            weight = _read(self.name, self.file)
            stack = QuantStack.from_weight(self.how.stack_of(weight), **options)
        else:
            turns = zip(*self.sources, strict=True)  # an expert's gate, its up, the next one's gate
            pieces = (_read(*one) for expert in turns for one in expert)
            stack = QuantStack.from_rows(pieces, len(self.sources[0]), **options)
        parts = {f"{self.name}.{part}": getattr(stack, part) for part in PARTS}
        return {name: one for name, one in parts.items() if one is not None}


def _read(name: str, path: Path) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def quantise_folder(
    source: FilePath, target: FilePath, config: GemmuleConfig, most_bytes: int = _MOST_BYTES
) -> tuple[int, Iterator[Weight]]:
    """Return how many tensors a model has, and an iterator that writes them quantised one by one.

    source: a folder of transformers with safetensors files; target: a folder that is new, empty or
    holds the beginning of the same, whose complete files are kept. The iterator yields each tensor
    that is done. ValueError where source is quantised already, holds no safetensors or damaged
    ones, or target was begun with other options or of another model.
    """
    source, target = Path(source), Path(target)
    check_floats(source)
    settings = transformers.AutoConfig.from_pretrained(source)
    kind = getattr(transformers, settings.architectures[0])
    with torch.device("meta"):
        model = kind(settings)
    try:
        weights = list(_weights(source, model, config))
    except SafetensorError as error:
        raise ValueError(f"{source} holds a damaged .safetensors file: {error}") from None
    if any(isinstance(one, Experts) for one in weights):
        config = GemmuleConfig(**config.to_dict() | {"format": OF_EXPERTS})
    target.mkdir(parents=True, exist_ok=True)
    marks = {_OPTIONS: config.to_json_string(), _SOURCE: _state_of(source)}
    for file in target.glob("*.safetensors"):
        with safe_open(file, "pt") as begun:
            if not marks.items() <= (begun.metadata() or {}).items():
                raise ValueError(
                    f"{file} was written with other options or of another model (also of {source} "
                    "before its files changed): give another folder, or remove what is there"
                )
    model.config.quantization_config = config
    return len(weights), _written(source, target, weights, model, marks, most_bytes)


def _state_of(source: Path) -> str:
    """Return a digest of a folder's weights: of which files there are, how large, written when."""
    found = [(file.name, file.stat()) for file in sorted(source.glob("*.safetensors"))]
    told = [(name, state.st_size, state.st_mtime_ns) for name, state in found]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _weights(source: Path, model: Any, config: GemmuleConfig) -> Iterator[Weight]:
    quantizer = GemmuleQuantizer(config, pre_quantized=False)
    quantizer._process_model_before_weight_loading(model)
    where = model_files(source)
    parts = _Parts(model, quantizer)
    for path in sorted(set(where.values()) if isinstance(where, dict) else {where}):
        with safe_open(path, "pt") as file:
            keys = sorted(file.keys())
            layers = quantizer.layers_in(model, keys, ("weight",))
            for key in keys:
                shape = file.get_slice(key).get_shape()
                if parts.took(key, path, shape):
                    continue
                name = layers.get(key.removesuffix(".weight"), "")
                options = quantizer.chosen.get(name) if key.endswith(".weight") else None
                turned = options is not None and is_turned(model.get_submodule(name))
                size = torch.empty(shape, device="meta").numel()
                nbytes = 4 * size if options is None else _bytes_of(size, shape, options)
                yield Weight(key, path, nbytes, options, turned)
    yield from parts.together()


class _Parts:
    """The tensors of a folder that projections of experts are made of."""

    def __init__(self, model: Any, quantizer: GemmuleQuantizer) -> None:
        every = get_model_conversion_mapping(model)
        self.renamings = [one for one in every if isinstance(one, WeightRenaming)]
        self.joining = [one for one in every if joins_experts(one)]
        self.base, self.own = model.base_model_prefix, model.state_dict()
        self.quantizer = quantizer
        self.found: dict[str, dict[str | None, list[tuple[str, Path]]]] = {}
        self.rows: dict[str, list[int]] = {}  # (out, in) of all that were found of one

    def took(self, key: str, path: Path, shape: list[int]) -> bool:
        """Take a tensor that belongs to a projection that is to be quantised."""
        name, pattern = rename_source_key(key, self.renamings, self.joining, self.base, self.own)
        how = self.quantizer.stacked.get(name)
        if how is None or name not in self.quantizer.chosen or (how.turned and pattern):
            return False
        self.found.setdefault(name, {}).setdefault(pattern, []).append((key, path))
        rows, columns = shape[-2:][::-1] if how.turned else shape[-2:]
        held = self.rows.setdefault(name, [0, columns])
        held[0] += rows * (shape[0] if len(shape) == 3 else 1)
        return True

    def together(self) -> Iterator[Experts]:
        """Yield the projections."""
        order = [source for one in self.joining for source in one.source_patterns]
        for name, kinds in self.found.items():
            how, options = self.quantizer.stacked[name], self.quantizer.chosen[name]
            nbytes = _bytes_of(math.prod(self.rows[name]), self.rows[name], options)
            if None in kinds:
                ((key, path),) = kinds[None]
                yield Experts(key, path, nbytes, options, how=how)
                continue
            sources = tuple(
                tuple(sorted(kinds[kind], key=lambda one: dot_natural_key(one[0])))
                for kind in sorted(kinds, key=order.index)
            )
            yield Experts(name, sources[0][0][1], nbytes, options, how=how, sources=sources)


def _bytes_of(size: int, shape: list[int], options: dict[str, Any]) -> int:
    """Return about how many bytes a quantised weight takes."""
    groups = shape[0] * rounding.group_count(shape[1], options["group_size"])
    return size * int(options["bits"]) // 8 + 8 * groups


def _written(
    source: Path,
    target: Path,
    weights: list[Weight],
    model: Any,
    marks: dict[str, str],
    most_bytes: int,
) -> Iterator[Weight]:
    shards: list[list[Weight]] = [[]]
    for weight in weights:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + weight.nbytes > most_bytes:
            shards.append([])
        shards[-1].append(weight)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = target / f"model-{number:05}-of-{len(shards):05}.safetensors"
        if not file.exists():
            tensors: dict[str, torch.Tensor] = {}
            for weight in shard:
                tensors |= weight.tensors()
                yield weight
            write_tensors(tensors, file, {"format": "pt", **marks})
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
    model.config.save_pretrained(target)  # the last: without it, there is no model here
