"""Models of plain PyTorch with quantised layers in a safetensors file: `save_model`, `load_model`.

The file's metadata tell the format's version, and bits, groups and shape of each quantised layer;
all of it is checked before anything of the model is touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gemmule.quant import checks
from gemmule.quant.files import FilePath, check_target
from gemmule.torch.coded import Coded
from gemmule.torch.experts import DOWN, QuantExperts, QuantStack, how_kept, is_experts
from gemmule.torch.floats import weight_of
from gemmule.torch.layer import QuantLinear
from gemmule.torch.parts import PARTS
from gemmule.torch.replacing import memory, places, take_over

FORMAT = "1"
_KEY = "gemmule_model"


def save_model(model: torch.nn.Module, path: FilePath, *, overwrite: bool = False) -> None:
    """Write a model's parameters and buffers, codes among them, to a ``.safetensors`` file.

    Tensors that share memory are written once, and shared again by `load_model`. The file appears
    when it is complete. ValueError for another suffix, FileExistsError where the name is taken.

    >>> import tempfile, torch, gemmule.torch as gt
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    >>> report, x = gt.quantize_(model), torch.ones(64)
    >>> with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
    ...     gt.save_model(model, f"{folder}/model.safetensors")
    ...     empty = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    ...     loaded = gt.load_model(empty, f"{folder}/model.safetensors")
    >>> bool((loaded(x) == model(x)).all())
    True
    """
    check_target(path, overwrite=overwrite)
    first: dict[Any, str] = {}
    tensors, ties = {}, {}
    for name, tensor in model.state_dict().items():
        kept = first.setdefault(memory(tensor), name)
        if kept == name:
            tensors[name] = tensor.contiguous()
        else:
            ties[name] = kept
    layers = {
        name: {
            "shape": one.shape if isinstance(one, QuantStack) else one._shape[:2],
            "dtype": str(one.weight_dtype).removeprefix("torch."),
            **one._form,
        }
        for name, one in model.named_modules(remove_duplicate=False)
        if isinstance(one, Coded)
    }
    metadata = {_KEY: FORMAT, "layers": json.dumps(layers), "ties": json.dumps(ties)}
    write_tensors(tensors, Path(path), metadata)


def write_tensors(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file, which appears when it is complete; its mode follows the umask.

    From 0.8 on safetensors makes files that nobody but their owner may read.
    """
    begun = path.with_name(f".{path.name}.new")
    try:
        begun.touch()
        mode = begun.stat().st_mode & 0o777
        save_file(tensors, begun, metadata)
        begun.chmod(mode)
        begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)


def load_model(model: torch.nn.Module, path: FilePath, *, device: Any = "cpu") -> torch.nn.Module:
    """Give a model what `save_model` wrote: quantised layers, parameters and buffers; return it.

    model: of the same structure with float layers, which may lie on the device meta, where they
    take no memory (``with torch.device("meta"): model = ...``), or with quantised ones.
    ValueError, with the model as it was, for a file of something else or of a newer version, and
    for tensors that the model lacks or misses; OSError as `open`.

    >>> import tempfile, torch, gemmule.torch as gt
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    >>> report = gt.quantize_(model, bits=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gt.save_model(model, f"{folder}/model.safetensors")
    ...     plain = torch.nn.Sequential(torch.nn.Linear(64, 32))
    ...     loaded = gt.load_model(plain, f"{folder}/model.safetensors")
    >>> type(loaded[0]).__name__
    'QuantLinear'
    """
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            layers, ties = _described(path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in [*file.keys()]}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable .safetensors file: {error}") from None
    try:
        tensors |= {name: tensors[kept] for name, kept in ties.items()}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} lacks the tensor {error}, which others share") from None
    made = {name: _layer(model, name, form, tensors) for name, form in layers.items()}
    of_codes = {f"{name}.{part}" for name in layers for part in PARTS}
    state = {name: tensor for name, tensor in tensors.items() if name not in of_codes}
    wanted = set(model.state_dict())
    wanted -= of_codes | {f"{name}.weight" for name in layers} | layers.keys()
    if wanted != set(state):
        raise ValueError(
            f"{path} is of another model: it lacks {sorted(wanted - set(state))[:5]}, and has "
            f"{sorted(set(state) - wanted)[:5]} beside what the model takes"
        )
    stand: dict[Any, torch.nn.Module] = {}  # in more than one place, perhaps
    for place in list(places(model, lambda name, _: name in made)):
        layer = stand.setdefault(place.linear, made[place.full])
        take_over(layer, place.linear)
        layer.bias, layer.training = place.linear.bias, place.linear.training
        place.put(layer)
    for place in list(places(model, lambda name, _: f"{name}.{DOWN}" in made, is_experts)):
        if place.linear not in stand:
            names = QuantExperts.refuse(place.linear).names
            stacks = {name: made[f"{place.full}.{name}"] for name in names}
            stand[place.linear] = QuantExperts.in_place_of(place.linear, stacks)
        place.put(stand[place.linear])
    for name, layer in made.items():  # where a quantised one stood before
        held = model.get_submodule(name)
        for part in PARTS:
            held._buffers[part] = getattr(layer, part)
        held.bits, held.group_size = layer.bits, layer.group_size
        held.weight_dtype = layer.weight_dtype
    model.load_state_dict(state, strict=False, assign=True)
    for name, kept in ties.items():
        if name in dict(model.named_parameters(remove_duplicate=False)):
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, model.get_parameter(kept))
    if empty := [name for name, one in model.named_buffers() if one.is_meta]:
        raise ValueError(f"{empty[:5]} are not saved with a model: build it without device meta")
    return model


def _described(path: FilePath, metadata: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    """Return the forms of the layers in a file, and the names that share another's tensor."""
    if metadata.get(_KEY) != FORMAT:
        raise ValueError(
            f"{path} holds no model of format {FORMAT}: its {_KEY!r} is {metadata.get(_KEY)!r}. "
            "Update gemmule, or save the model again by gemmule.torch.save_model"
        )
    try:
        return dict(json.loads(metadata["layers"])), dict(json.loads(metadata["ties"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not tell its layers and ties: {error!r}") from None


def _layer(
    model: torch.nn.Module, name: str, form: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Any:
    """Return a layer, or a projection of experts, of a file, checked against that in the model."""
    try:
        kind, shape, there = _kind(model, name, tuple(form["shape"]))
        if there != shape:
            raise ValueError(f"it is {shape}, but the model's is {there}")
        codes, scales = tensors[f"{name}.codes"], tensors[f"{name}.scales"]
        zeros, perm = (tensors.get(f"{name}.{part}") for part in PARTS[2:])
        bits, group = checks.bits(form["bits"]), checks.group_size(form["group_size"])
        made = kind.from_tensors(
            codes, scales, zeros, perm, shape=shape, bits=bits, group_size=group
        )
        made.weight_dtype = getattr(
            torch, checks.one_of("dtype", form["dtype"], checks.FLOAT_DTYPES)
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"layer {name!r} of the file: {error}") from error
    return made


def _kind(model: torch.nn.Module, name: str, given: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Return what a layer of a shape in a file becomes, its shape, and that of the model's."""
    if len(given) == 2:
        held: Any = model.get_submodule(name)
        return QuantLinear, checks.shape(given), tuple(weight_of(held).shape)
    parent, _, own = name.rpartition(".")
    experts: Any = model.get_submodule(parent)
    held = getattr(experts, own)
    if isinstance(held, QuantStack):
        return QuantStack, given, held.shape
    how = how_kept(experts)
    if how is None:
        raise ValueError(f"the model's {type(experts).__name__} holds no experts that are known")
    return QuantStack, given, tuple(how.stack_of(held).shape)
