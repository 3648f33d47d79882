"""Models that other tools quantised, as models of transformers with quantised layers, in one call.

`load_checkpoint` takes the folder of a model by GPTQ, AWQ, HQQ, compressed-tensors or ModelOpt, of
gpt-oss, or a GGUF file. Codes are taken one by one, never quantised again; what cannot be is named
before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.quantizers.auto import register_quantizer

from gemmule.quant.files import NOT_NUMPYS, FilePath, named_dtype
from gemmule.quant.formats import KEYS, from_gpt_oss, of_tensors
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.torch import gguf_models
from gemmule.torch.experts import QuantStack
from gemmule.torch.layer import QuantLinear
from gemmule.torch.pretrained import GemmuleConfig, GemmuleQuantizer, Operation, keys_of, require

_METHOD = "gemmule_checkpoint"
_ANCHORS = ("qweight", "W_q", "weight_packed")
_OF_MODELOPT = ("weight_scale",)  # beside "weight", which is that of a float layer, too
_BLOCKS, _SCALES = "_blocks", "_scales"  # behind the names of gpt-oss's projections of experts
_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision")
_OF_HQQ = (
    "group_size", "packing", "stores_quant_config", "channel_wise", "optimize", "round_zero",
    "quant_scale", "quant_zero", "compute_dtype", "view_as_float", "unpack_view_dtype",
    "offload_meta", "encoded_state_dict",
)  # fmt: skip


def load_checkpoint(path: FilePath, *, model_class: Any = None, **options: Any) -> Any:
    """Return the model of transformers in a folder or a GGUF file that another tool quantised.

    path: a folder with a ``config.json`` whose quantisation is GPTQ (4 or 8 bits, act-order too),
    AWQ (``gemm``), HQQ (``axis=1``), compressed-tensors (weights of 4 or 8 bits in
    ``pack-quantized``, activations as floats; ``nvfp4-`` and ``mxfp4-pack-quantized``), ModelOpt
    (NVFP4, MXFP4) or gpt-oss's MXFP4, in one safetensors file or several; or a ``.gguf`` file of
    the types that `gemmule.quant.gguf` reads and an architecture in `gguf_models.ARCHITECTURES`.
    Beside 4-bit floats activations stay floats, whatever a file says of them. model_class: by
    default the architecture in the configuration. options: those of ``from_pretrained``, such as
    ``dtype`` and ``device_map``.

    ``save_pretrained`` of the result writes this package's own format. ValueError, with nothing
    loaded, names what is not served.

    >>> import json, pathlib, tempfile
    >>> from gemmule.torch import load_checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     described = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    ...     _ = (pathlib.Path(folder) / "config.json").write_text(json.dumps(described))
    ...     try:
    ...         load_checkpoint(folder)
    ...     except ValueError as error:
    ...         print(str(error).partition(" is not served")[1])
     is not served
    """
    given = Path(path)
    if given.suffix.lower() == ".gguf":
        return gguf_models.load(given, model_class, _Config, **options)
    if not given.is_dir():
        raise FileNotFoundError(
            f"{given} is no folder here; give a model's folder or a .gguf file. One of the Hugging "
            "Face hub is fetched first, by huggingface_hub.snapshot_download, which returns one."
        )
    config = transformers.AutoConfig.from_pretrained(given)
    method = dict(getattr(config, "quantization_config", None) or {})
    if faults := list(_faults(method)):
        raise ValueError(f"{given} is not served: {'; '.join(faults)}")
    del config.quantization_config
    kind = model_class or getattr(transformers, config.architectures[0])
    stored_zero = 0 if method.get("checkpoint_format") == "gptq_v2" else 1
    anchors = _OF_MODELOPT if method.get("quant_method") == "modelopt" else _ANCHORS
    own = _Config(anchors, lambda name, parts: of_tensors(parts, stored_zero))
    return kind.from_pretrained(given, config=config, quantization_config=own, **options)


def _faults(config: Mapping[str, Any]) -> Iterable[str]:
    """Yield what of a folder's quantisation no reader here takes."""
    method = config.get("quant_method")
    if method == "gptq":
        if config.get("bits") not in (4, 8):
            yield f"GPTQ by {config.get('bits')} bits; read are 4 and 8"
        if (form := config.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
            yield f"GPTQ in the format {form!r}; read are gptq and gptq_v2"
    elif method == "awq":
        if config.get("bits", 4) != 4 or str(config.get("version", "gemm")).lower() != "gemm":
            yield f"AWQ by {config.get('bits')} bits, {config.get('version')!r}; read is 4, gemm"
    elif method == "hqq":
        for params in _hqq_params(config.get("quant_config") or {}):
            if params.get("nbits", 4) not in (4, 8) or params.get("axis", 1) != 1:
                yield f"HQQ by {params.get('nbits')} bits along axis {params.get('axis')}; 4, 8, 1"
    elif method == "compressed-tensors":
        if config.get("format") not in _PACKED:
            yield f"compressed-tensors in {config.get('format')!r}; read are {', '.join(_PACKED)}"
        for name, group in (config.get("config_groups") or {}).items():
            weights = group.get("weights") or {}
            if weights.get("type") == "float" and weights.get("num_bits") == 4:
                continue
            if group.get("input_activations") or weights.get("num_bits") not in (4, 8):
                yield f"{name} quantises activations, or not by 4 or 8 bits"
    elif method == "modelopt":
        if (algorithm := config.get("quant_algo")) not in ("NVFP4", "MXFP4"):
            yield f"ModelOpt by {algorithm!r}; read are NVFP4 and MXFP4"
    elif method == "gemmule":
        yield "it is this package's own: load it by from_pretrained"
    elif method != "mxfp4":
        yield (
            f"its quantisation is {method!r}; read are gptq, awq, hqq, compressed-tensors, "
            "modelopt and mxfp4"
        )


def _hqq_params(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yield the options of HQQ, which may be one set or one for each kind of layer."""
    if "weight_quant_params" in config:
        yield config["weight_quant_params"] or {}
    else:
        for own in config.values():
            if isinstance(own, dict):
                yield from _hqq_params(own) if "weight_quant_params" in own else (own,)


def _keys(anchors: Iterable[str]) -> Iterable[str]:
    """Return the last parts of names of what belongs to a layer; "weight" is ModelOpt's alone."""
    return KEYS if anchors == _OF_MODELOPT else (key for key in KEYS if key != "weight")


Reader = Callable[[str, dict[str, Any]], QuantizedMatrix]


class _Config(GemmuleConfig):
    """How a layer is read that another tool wrote; nothing of it is saved.

    anchors: the last parts of tensors' names that a quantised layer has one of; read: returns the
    matrix of a layer's name and its tensors as arrays, by the last parts of their names.
    """

    def __init__(self, anchors: Iterable[str], read: Reader, files: Any = None) -> None:
        super().__init__()
        self.quant_method, self.anchors, self.read = _METHOD, tuple(anchors), read
        self.files = files

    def to_dict(self) -> dict[str, Any]:
        """Return what can be saved."""
        return GemmuleConfig().__dict__


class Read(Operation):
    """Replaces a linear layer by the one that another tool's tensors stand for."""

    def convert(self, tensors: dict[str, Any], **context: Any) -> dict[str, Any]:
        """Return the floats of what is no linear layer in codes, such as an embedding."""
        model, key = context["model"], context["full_layer_name"]
        name, quantizer = key.removesuffix(".weight"), self.hf_quantizer
        given = _by_part(tensors)
        if given.keys() == {"weight"} and name not in quantizer.chosen:
            return {key: given["weight"]}
        parts = {part: _array(tensor) for part, tensor in given.items()}
        device = next(iter(parts.values()))[1]
        try:
            matrix = quantizer.read(name, {part: array for part, (array, _) in parts.items()})
        except KeyError as error:
            require(name, parts, error.args)
            raise
        linear = model.get_submodule(name)
        if name not in quantizer.chosen:
            return {key: torch.from_numpy(matrix.dequantize()).to(device, linear.weight.dtype)}
        if matrix.shape != (linear.out_features, linear.in_features):
            raise ValueError(f"{name} is {matrix.shape}, but the model's is {linear.weight.shape}")
        layer = QuantLinear.from_matrix(matrix).to(device)
        layer.weight_dtype = linear.weight.dtype
        quantizer.put(name, layer, **context)
        return {}


class ReadExperts(Operation):
    """Keeps a projection of gpt-oss's experts as the stack that its blocks and scales are."""

    def convert(self, tensors: dict[str, Any], **context: Any) -> dict[str, Any]:
        """Return nothing that is left to load."""
        name, quantizer = context["full_layer_name"], self.hf_quantizer
        given = {f"_{key.rpartition('_')[2]}" for key in _by_part(tensors)}
        require(name, given, (_BLOCKS, _SCALES))
        blocks, scales = (_array(one) for _, one in sorted(_by_part(tensors).items()))
        weight = context["model"].get_parameter(name)
        stack = from_gpt_oss(blocks[0], scales[0])
        there = tuple(quantizer.stacked[name].stack_of(weight).shape)
        if stack.shape != there:
            raise ValueError(f"{name} is {stack.shape}, but the model's is {there}")
        made = QuantStack(stack).to(blocks[1])
        made.weight_dtype = weight.dtype
        quantizer.put_stack(name, made, **context)
        return {}


def _by_part(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors by the last part of their names, as patterns of the loader give it."""
    return {
        pattern.strip(".\\$"): value[0] if isinstance(value, list) else value
        for pattern, value in tensors.items()
    }


def _array(tensor: torch.Tensor) -> tuple[Any, torch.device]:
    host, name = tensor.cpu(), str(tensor.dtype).removeprefix("torch.")
    if name in NOT_NUMPYS:
        bits = host.view(getattr(torch, f"int{8 * host.itemsize}"))
        return bits.numpy().view(named_dtype(name)), tensor.device
    return host.numpy(), tensor.device


@register_quantizer(_METHOD)
class CheckpointQuantizer(GemmuleQuantizer):
    """Puts the layers that another tool quantised into a model while transformers loads it."""

    def __init__(self, quantization_config: _Config, **options: Any) -> None:
        super().__init__(quantization_config, **options | {"pre_quantized": True})
        self.anchors, self.read = quantization_config.anchors, quantization_config.read
        self.names = quantization_config.files

    def _chosen(self, model: Any, linears: dict[str, Any], files: Any) -> dict[str, dict[str, Any]]:
        given = (self.names or ()) if files is None else keys_of(files)
        keys = [re.sub(f"{_BLOCKS}$", ".blocks", key) for key in given]
        there = set(self.layers_in(model, keys, (*self.anchors, "blocks")).values())
        every = (*linears, *self.stacked)
        others = there.difference(every) if files is not None else ()
        if others or not there:
            raise ValueError(
                f"{len(others)} quantised weights are no linear layers of {type(model).__name__}, "
                f"such as {min(others, default='none at all')!r}: they are not served"
            )
        return {name: {} for name in every if name in there}

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        """Return the model's own conversions, and that of another tool's tensors to layers."""
        from transformers.core_model_loading import WeightConverter

        parts = self.anchors if self.names else (*_keys(self.anchors), *_OF_HQQ)
        sources = [rf"\.{part}$" for part in parts]
        ends = {name.rpartition(".")[2] for name in self.stacked if name in self.chosen}
        experts = [
            WeightConverter(
                [rf"\.{end}{part}$" for part in (_BLOCKS, _SCALES)], f".{end}", [ReadExperts(self)]
            )
            for end in sorted(ends)
        ]
        linear = WeightConverter(sources, ".weight", [Read(self)])
        return [*weight_conversions, *experts, linear]
