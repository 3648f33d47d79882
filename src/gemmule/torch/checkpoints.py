"""Models that other tools quantised, as models of transformers with quantised layers, in one call.

`load_checkpoint` takes the folder of a model by GPTQ, AWQ, HQQ or compressed-tensors, or a GGUF
file. Codes are taken one by one, never quantised again; what cannot be is named before anything is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.quantizers.auto import register_quantizer

from gemmule.quant.files import FilePath, named_dtype
from gemmule.quant.formats import KEYS, of_tensors
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.torch import gguf_models
from gemmule.torch.layer import QuantLinear
from gemmule.torch.pretrained import GemmuleConfig, GemmuleQuantizer, Operation, keys_of

_METHOD = "gemmule_checkpoint"
_ANCHORS = ("qweight", "W_q", "weight_packed")
_OF_HQQ = (
    "group_size", "packing", "stores_quant_config", "channel_wise", "optimize", "round_zero",
    "quant_scale", "quant_zero", "compute_dtype", "view_as_float", "unpack_view_dtype",
    "offload_meta", "encoded_state_dict",
)  # fmt: skip


def load_checkpoint(path: FilePath, *, model_class: Any = None, **options: Any) -> Any:
    """Return the model of transformers in a folder or a GGUF file that another tool quantised.

    path: a folder with a ``config.json`` whose quantisation is GPTQ (4 or 8 bits, act-order too),
    AWQ (``gemm``), HQQ (``axis=1``) or compressed-tensors (weights of 4 or 8 bits in
    ``pack-quantized``, activations as floats), in one safetensors file or several; or a ``.gguf``
    file of the types that `gemmule.quant.gguf` reads and an architecture in
    `gguf_models.ARCHITECTURES`. model_class: by default the architecture in the configuration.
    options: those of ``from_pretrained``, such as ``dtype`` and ``device_map``.

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
    if given.suffix == ".gguf":
        return gguf_models.load(given, model_class, _Config, **options)
    config = transformers.AutoConfig.from_pretrained(given)
    method = dict(getattr(config, "quantization_config", None) or {})
    if faults := list(_faults(method)):
        raise ValueError(f"{given} is not served: {'; '.join(faults)}")
    del config.quantization_config
    kind = model_class or getattr(transformers, config.architectures[0])
    stored_zero = 0 if method.get("checkpoint_format") == "gptq_v2" else 1
    own = _Config(_ANCHORS, lambda name, parts: of_tensors(parts, stored_zero))
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
        if config.get("format") not in ("pack-quantized", "mixed-precision"):
            yield f"compressed-tensors in {config.get('format')!r}; read is pack-quantized"
        for name, group in (config.get("config_groups") or {}).items():
            weights = group.get("weights") or {}
            if group.get("input_activations") or weights.get("num_bits") not in (4, 8):
                yield f"{name} quantises activations, or not by 4 or 8 bits"
    elif method == "gemmule":
        yield "it is this package's own: load it by from_pretrained"
    else:
        yield f"its quantisation is {method!r}; read are gptq, awq, hqq and compressed-tensors"


def _hqq_params(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yield the options of HQQ, which may be one set or one for each kind of layer."""
    if "weight_quant_params" in config:
        yield config["weight_quant_params"] or {}
    else:
        for own in config.values():
            if isinstance(own, dict):
                yield from _hqq_params(own) if "weight_quant_params" in own else (own,)


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
        """Return the floats of a matrix whose module is no linear layer, such as an embedding."""
        model, key = context["model"], context["full_layer_name"]
        name, quantizer = key.removesuffix(".weight"), self.hf_quantizer
        parts = {
            pattern.strip(".\\$"): _array(value[0] if isinstance(value, list) else value)
            for pattern, value in tensors.items()
        }
        device = next(iter(parts.values()))[1]
        matrix = quantizer.read(name, {part: array for part, (array, _) in parts.items()})
        linear = model.get_submodule(name)
        if name not in quantizer.chosen:
            return {key: torch.from_numpy(matrix.dequantize()).to(device, linear.weight.dtype)}
        if matrix.shape != (linear.out_features, linear.in_features):
            raise ValueError(f"{name} is {matrix.shape}, but the model's is {linear.weight.shape}")
        layer = QuantLinear.from_matrix(matrix).to(device)
        layer.weight_dtype = linear.weight.dtype
        quantizer.put(name, layer, **context)
        return {}


def _array(tensor: torch.Tensor) -> tuple[Any, torch.device]:
    host = tensor.cpu()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(named_dtype("bfloat16")), tensor.device
    return host.numpy(), tensor.device


@register_quantizer(_METHOD)
class CheckpointQuantizer(GemmuleQuantizer):
    """Puts the layers that another tool quantised into a model while transformers loads it."""

    def __init__(self, quantization_config: _Config, **options: Any) -> None:
        super().__init__(quantization_config, **options | {"pre_quantized": True})
        self.anchors, self.read = quantization_config.anchors, quantization_config.read
        self.names = quantization_config.files

    def _chosen(self, model: Any, linears: dict[str, Any], files: Any) -> dict[str, dict[str, Any]]:
        keys = self.names if files is None else keys_of(files)
        there = set(self.layers_in(model, keys, self.anchors).values())
        others = there.difference(linears) if files is not None else ()
        if others or not there:
            raise ValueError(
                f"{len(others)} quantised weights are no linear layers of {type(model).__name__}, "
                f"such as {min(others, default='none at all')!r}: they are not served"
            )
        return {name: {} for name in linears if name in there}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Return the model's own conversions, and that of another tool's tensors to layers."""
        from transformers.core_model_loading import WeightConverter

        parts = self.anchors if self.names else (*KEYS, *_OF_HQQ)
        sources = [rf"\.{part}$" for part in parts]
        return [*weight_conversions, WeightConverter(sources, ".weight", [Read(self)])]
