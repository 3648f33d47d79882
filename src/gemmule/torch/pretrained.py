"""Models of transformers with quantised layers: `from_pretrained` and `save_pretrained` know them.

``import gemmule.torch`` registers what is here with transformers, when that is imported. Then
``from_pretrained(folder, quantization_config=GemmuleConfig(bits=4))`` quantises layer by layer as
it loads, ``save_pretrained`` writes codes, and ``from_pretrained`` of that folder reads them.
"""

from __future__ import annotations

import copy
import ctypes
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from safetensors import safe_open
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from gemmule.quant import checks, float4
from gemmule.quant.quantize import check_method, quantize
from gemmule.torch.coded import Coded
from gemmule.torch.experts import Kept, QuantExperts, QuantStack, how_kept, is_experts
from gemmule.torch.floats import is_turned
from gemmule.torch.layer import QuantLinear
from gemmule.torch.parts import PARTS
from gemmule.torch.replacing import places, take_over
from gemmule.torch.saving import METHOD

FORMAT = 1
OPTIONS = ("bits", "group_size", "symmetric", "scale_dtype", "method")  # of `gemmule.quantize`
OF_EXPERTS = 2  # the format where experts are quantised, which earlier versions would pass over
# Of glibc. Floats that were read are freed between codes that stay; without it those pages remain
# the process's, how many by chance.
_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


@register_quantization_config(METHOD)
class GemmuleConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How a model of transformers is quantised; what ``config.json`` keeps of it.

    - ``bits``, ``group_size``, ``symmetric``, ``scale_dtype``, ``method``: those of
      `gemmule.quantize`. ``number_format``: its ``format``, of 4-bit floats.
    - ``modules_to_not_convert``: names of layers that stay floats, the ends of names, patterns
      (``"*.down_proj"``) or regular expressions, as transformers matches them; by default the
      output head and what is tied, which a list must name beside others. ``[]``: none.
    - ``layers``: options of single layers by name or pattern (``"*.down_proj"``), the first that
      fits; of a saved model the bits and groups that differ. ValueError for an option that
      `gemmule.quantize` has not. What meets no layer of a model is warned of.
    - ``format``: the version of what is saved; ValueError for one that this version does not read.

    >>> from gemmule.torch import GemmuleConfig
    >>> config = GemmuleConfig(bits=4, layers={"*.down_proj": {"bits": 8}})
    >>> config.options_of("model.layers.0.mlp.down_proj")["bits"]
    8
    >>> config.options_of("model.layers.0.mlp.up_proj")["bits"]
    4
    """

    def __init__(
        self,
        bits: int = 4,
        group_size: int | None = 64,
        *,
        symmetric: bool = False,
        scale_dtype: str = "float32",
        method: str = "rtn",
        number_format: str | None = None,
        modules_to_not_convert: list[str] | None = None,
        layers: Mapping[str, Mapping[str, Any]] | None = None,
        format: int = FORMAT,  # noqa: A002  the name in the file
        quant_method: str = METHOD,
    ) -> None:
        if format not in (FORMAT, OF_EXPERTS) or quant_method != METHOD:
            raise ValueError(
                f"a model saved as {quant_method!r}, format {format!r}; this version of gemmule "
                f"reads format {FORMAT} to {OF_EXPERTS}: update gemmule, or quantise it again"
            )
        self.quant_method, self.format = METHOD, format
        self.bits, self.group_size = checks.bits(bits), checks.group_size(group_size)
        self.symmetric, self.scale_dtype, self.method = symmetric, scale_dtype, method
        if number_format is not None:  # earlier versions, which do not know it, refuse it
            self.number_format = checks.one_of("number_format", number_format, float4.GROUP_SIZES)
            own = float4.BITS, float4.GROUP_SIZES[number_format]
            if bits != own[0] or group_size not in (own[1], 64):
                raise ValueError(
                    f"bits={bits}, group_size={group_size} with number_format={number_format!r}, "
                    f"which has {own[0]} bits in groups of {own[1]}: leave both away, or the format"
                )
            self.bits, self.group_size = own
        self.modules_to_not_convert = modules_to_not_convert
        self.layers = {name: dict(own or {}) for name, own in (layers or {}).items()}
        for name, given in self.layers.items():
            for option in given:
                checks.one_of(f"an option of layers[{name!r}]", option, (*OPTIONS, "format"))
            checks.bits(given.get("bits", self.bits))
            checks.group_size(given.get("group_size", self.group_size))
        for options in (vars(self), *({**vars(self), **own} for own in self.layers.values())):
            form = options.get("format") if options.get("format") in float4.GROUP_SIZES else None
            form = form or options.get("number_format")
            check_method(options["method"], symmetric=options["symmetric"], form=form)
            checks.one_of("scale_dtype", options["scale_dtype"], checks.SCALE_DTYPES)

    def options_of(self, name: str) -> dict[str, Any]:
        """Return the options of `gemmule.quantize` for the layer of a name."""
        options = {key: getattr(self, key) for key in OPTIONS}
        if hasattr(self, "number_format"):
            options["format"] = self.number_format
        fits = (own for pattern, own in self.layers.items() if _means(pattern, name))
        return options | next(fits, {})

    def describing(self, model: torch.nn.Module) -> GemmuleConfig:
        """Return these options with the bits and groups that a model's layers have."""
        layers = dict(quantised(model))
        forms = {name: layer._form for name, layer in layers.items()}
        made = GemmuleConfig(**self.to_dict())
        stacked = any(isinstance(layer, QuantStack) for layer in layers.values())
        made.format = OF_EXPERTS if stacked else FORMAT
        if forms:
            common = Counter((one["bits"], one["group_size"]) for one in forms.values())
            (made.bits, made.group_size), _ = common.most_common(1)[0]
        if hasattr(made, "number_format") and not any(one.format for one in layers.values()):
            del made.number_format  # on a GPU they became codes of 8 bits
        usual = {"bits": made.bits, "group_size": made.group_size}
        made.layers = {name: form for name, form in forms.items() if form != usual}
        return made


def _means(pattern: str, name: str) -> bool:
    """Tell whether a layer is meant; a base model's have names that lack the prefix, or have it."""
    ends = f".{name}".endswith(f".{pattern}") or pattern.endswith(f".{name}")
    return ends or fnmatchcase(name, pattern)


def _regular(pattern: str) -> str:
    """Return a pattern that begins with a star as the regular expression that it means.

    >>> _regular("*.down_proj"), _regular("lm_head")
    ('.*\\\\.down_proj', 'lm_head')
    """
    return ".*".join(map(re.escape, pattern.split("*"))) if pattern.startswith("*") else pattern


def quantised(model: torch.nn.Module) -> Iterable[tuple[str, Coded]]:
    """Return the quantised layers and projections of experts of a model by name."""
    return ((name, one) for name, one in model.named_modules() if isinstance(one, Coded))


def attach(model: torch.nn.Module, **options: Any) -> None:
    """Let ``save_pretrained`` of each model of transformers in `model` keep its quantised layers.

    `quantize_` does it; it is wanted where layers were put in by hand. Ties of quantised layers to
    embeddings, which `quantize_` has ended, are no longer made by ``tie_weights``. options: those
    of `GemmuleConfig` that are to be kept beside bits and groups.
    """
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(True for _ in quantised(module)):
            config = GemmuleConfig(**options).describing(module)
            module.hf_quantizer = GemmuleQuantizer(config)
            module.config.quantization_config = config
            _keep_whole(module)
            _untie(module, (name for name, _ in quantised(module)))


def _untie(model: Any, names: Iterable[str]) -> None:
    for name in names:
        model.all_tied_weights_keys.pop(f"{name}.weight", None)


def _keep_whole(model: Any) -> None:
    """Let saving leave a model's stacks as they are: it would cut them, as floats, by experts."""
    names = [f"{name}.codes" for name, one in quantised(model) if isinstance(one, QuantStack)]
    if not names:
        return
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        every = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [one for one in every if not isinstance(one, PrefixChange)]
    model._weight_conversions = [one for one in conversions if not _cuts(one, names)]


def _cuts(conversion: Any, names: Iterable[str]) -> bool:
    """Tell whether a conversion of weights, done backwards, is one of a tensor of these names."""
    if not hasattr(conversion, "operations"):
        return False
    back = conversion.reverse_transform()
    return any(back.rename_source_key(name)[1] is not None for name in names)


class Operation:
    """What the loader does with the tensors of a layer; transformers calls `convert`."""

    supports_many_to_many = False

    def __init__(self, quantizer: GemmuleQuantizer) -> None:
        self.hf_quantizer = quantizer  # its presence leaves dtypes as they are in the file

    def __deepcopy__(self, memo: Any) -> Operation:
        return self


class Quantise(Operation):
    """Replaces linear layers by quantised ones of the float weights that were just read."""

    def convert(self, tensors: dict[str, Any], **context: Any) -> dict[str, Any]:
        """Return what is no weight of a layer to be quantised."""
        left = {}
        for key, value in tensors.items():
            name, tensor = key.removesuffix(".weight"), _only(value)
            options = self.hf_quantizer.chosen.get(name)
            if options is None:
                left[key] = value
                continue
            how = self.hf_quantizer.stacked.get(name)
            if how is not None:
                stack = QuantStack.from_weight(how.stack_of(tensor), **options)
                self.hf_quantizer.put_stack(name, stack, **context)
            else:
                turned = is_turned(context["model"].get_submodule(name))
                matrix = quantize(tensor.T if turned else tensor, **options)
                layer = QuantLinear.from_matrix(matrix)
                layer.weight_dtype = tensor.dtype
                self.hf_quantizer.put(name, layer, **context)
            if _trim is not None:
                _trim(0)
        return left


def joins_experts(conversion: Any) -> bool:
    """Tell whether a conversion puts (out, in) matrices of experts behind each other."""
    kinds = [(type(one).__name__, one.dim) for one in getattr(conversion, "operations", ())[:2]]
    whole = len(kinds) == len(getattr(conversion, "operations", ()))
    return whole and kinds in _JOINING


_JOINING = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


class QuantiseEach(Operation):
    """Quantises the projections of experts that a file holds one by one, each as it was read.

    It stands for what would first join their floats, and calls that for experts that stay floats.
    """

    def __init__(self, quantizer: GemmuleQuantizer, joining: list[Any]) -> None:
        super().__init__(quantizer)
        self.joining = joining

    @classmethod
    def instead(cls, quantizer: GemmuleQuantizer, conversion: Any) -> Any:
        """Return a conversion with this one in the place of what joins (out, in) matrices."""
        if not joins_experts(conversion):
            return conversion
        changed = copy.deepcopy(conversion)
        changed.operations = [cls(quantizer, list(conversion.operations))]
        return changed

    def convert(self, tensors: dict[str, Any], **context: Any) -> dict[str, Any]:
        """Return what was joined, or nothing that is left to load."""
        name, quantizer = context["full_layer_name"], self.hf_quantizer
        options = quantizer.chosen.get(name)
        how = quantizer.stacked.get(name)
        if options is None or how is None or how.turned:
            for joining in self.joining:
                tensors = joining.convert(tensors, **context)
            return tensors
        sources = [tensors[one] for one in context["source_patterns"]]
        pieces = (piece for expert in zip(*sources, strict=True) for piece in expert)
        stack = QuantStack.from_rows(pieces, len(sources[0]), **options)
        quantizer.put_stack(name, stack, **context)
        return {}


class Assemble(Operation):
    """Replaces a linear layer by the one whose codes, scales, zero points and perm were read."""

    def convert(self, tensors: dict[str, Any], **context: Any) -> dict[str, Any]:
        """Return nothing that is left to load."""
        model, name = context["model"], context["full_layer_name"].removesuffix(".weight")
        by_name = {key.strip(".\\$").rpartition(".")[2]: value for key, value in tensors.items()}
        require(name, by_name, PARTS[:2])
        parts = [_only(by_name.get(part)) for part in PARTS]
        own = self.hf_quantizer.quantization_config.options_of(name)
        form = {"bits": own["bits"], "group_size": own["group_size"]}
        how = self.hf_quantizer.stacked.get(name)
        if how is not None:
            weight = how.stack_of(model.get_parameter(name))
            stack = QuantStack.from_tensors(*parts, shape=tuple(weight.shape), **form)
            stack.weight_dtype = self.hf_quantizer.dtype_of(name, weight.dtype)
            self.hf_quantizer.put_stack(name, stack, **context)
            return {}
        linear = model.get_submodule(name)
        turned = is_turned(linear)
        shape = tuple(reversed(linear.weight.shape)) if turned else tuple(linear.weight.shape)
        layer = QuantLinear.from_tensors(*parts, shape=shape, **form)
        layer.weight_dtype = self.hf_quantizer.dtype_of(f"{name}.weight", linear.weight.dtype)
        self.hf_quantizer.put(name, layer, **context)
        return {}


def require(name: str, there: Iterable[str], needed: Iterable[str]) -> None:
    """Raise ValueError for tensors of a weight that its files lack."""
    if missing := [part for part in needed if part not in there]:
        raise ValueError(
            f"{name} has {', '.join(sorted(there))}, but no {', '.join(missing)}: the checkpoint "
            "is not whole, fetch or write its files again"
        )


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


@register_quantizer(METHOD)
class GemmuleQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts quantised layers into a model while transformers loads it, and tells what it saves."""

    quantization_config: GemmuleConfig
    requires_calibration = False
    is_trainable = True
    is_compileable = True

    def __init__(self, quantization_config: GemmuleConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.chosen: dict[str, dict[str, Any]] = {}  # what is to be quantised, or was, by name
        self.stacked: dict[str, Kept] = {}  # those of them that are projections of experts
        self.halves: dict[str, QuantStack] = {}  # projections of experts whose other one is to come
        self.pending: set[str] = set()
        self.kept: dict[str, torch.dtype] = {}

    def validate_environment(self, device_map: Any = None, **_: Any) -> None:
        """Refuse layers on disk, where no codes are multiplied."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map puts layers on disk, where quantised ones cannot be: map them to the "
                "CPU, which needs about a quarter of the memory of 16-bit floats by 4 bits"
            )

    @property
    def quantized_element_size(self) -> float:
        """Bytes of a weight, its share of a scale and a zero point among them."""
        config = self.quantization_config
        return float(config.bits / 8 + 8 / max(config.group_size or 1024, 1))

    def is_serializable(self) -> bool:
        """Tell that ``save_pretrained`` may write such a model."""
        return True

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Tell whether a parameter is the weight of a layer that is or will be quantised."""
        name, key = param_name.rpartition(".")[::2]
        return param_name in self.chosen or (key == "weight" and name in self.chosen)

    def get_quantize_ops(self) -> Operation:
        """Return what quantises a weight that was read."""
        return Quantise(self)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, dtype: Any = None, **_: Any
    ) -> None:
        linears = {place.full: place.linear for place in places(model, None)}
        self.stacked = {
            f"{place.full}.{name}": how
            for place in places(model, None, is_experts)
            if (how := how_kept(place.linear)) is not None
            for name in how.names
        }
        self.kept = model._get_dtype_plan(dtype) if dtype is not None else {}
        self.chosen = self._chosen(model, linears, checkpoint_files)
        self.pending = set(self.chosen)
        _untie(model, self.chosen)

    def _chosen(self, model: Any, linears: dict[str, Any], files: Any) -> dict[str, dict[str, Any]]:
        config = self.quantization_config
        if self.pre_quantized:
            there = set(self.layers_in(model, keys_of(files), ("codes",)).values())
            every = (*linears, *self.stacked)
            return {name: config.options_of(name) for name in every if name in there}
        if config.method == "gptq":
            raise ValueError(
                "method='gptq' needs the inputs of each layer, which loading a model has not: load "
                "it in floats, then gemmule.torch.calibrate and quantize_"
            )
        asked = config.modules_to_not_convert
        asked = None if asked is None else [_regular(one) for one in asked]
        weights, modules = [*linears, *self.stacked], [name for name, _ in model.named_modules()]
        strange = [
            *(one for one in asked or () if all(should_convert_module(m, [one]) for m in modules)),
            *(one for one in config.layers if not any(_means(one, name) for name in weights)),
        ]
        if strange:
            told = f"no layer of this model is called {', '.join(map(repr, strange))}"
            warnings.warn(f"{told}: nothing follows from it", stacklevel=2)
        floats = self.get_modules_to_not_convert(model, asked)
        names = [name for name in linears if should_convert_module(name, floats)]
        for name, how in self.stacked.items():  # both projections of experts, or none
            experts = name.rpartition(".")[0]
            if all(should_convert_module(f"{experts}.{one}", floats) for one in how.names):
                names.append(name)
        return {name: config.options_of(name) for name in names}

    def layers_in(self, model: Any, keys: Iterable[str], parts: Iterable[str]) -> dict[str, str]:
        """Return the layers of a file whose tensors end in `parts`, with their names in a model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        every = get_model_conversion_mapping(model)
        renamings = [one for one in every if isinstance(one, WeightRenaming)]
        own, base, found = model.state_dict(), model.base_model_prefix, {}
        for name, part in (key.rpartition(".")[::2] for key in keys):
            if part in parts:
                key, _ = rename_source_key(f"{name}.weight", renamings, [], base, own)
                stacked, _ = rename_source_key(name, renamings, [], base, own)
                found[name] = stacked if stacked in own else key.removesuffix(".weight")
        return found

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        """Return the model's own conversions, and that of codes and scales to layers.

        model: not looked at, and not given by transformers before 5.20.
        """
        if not self.pre_quantized:
            return [QuantiseEach.instead(self, one) for one in weight_conversions]
        from transformers.core_model_loading import WeightConverter

        sources = [rf"\.{part}$" for part in PARTS]
        ends = {".".join(name.rsplit(".", 2)[-2:]) for name in self.stacked if name in self.chosen}
        stacks = [
            WeightConverter([rf"\.{end}\.{part}$" for part in PARTS], f".{end}", [Assemble(self)])
            for end in sorted(ends)
        ]
        linear = WeightConverter(sources, ".weight", [Assemble(self)])
        return [*weight_conversions, *stacks, linear]

    def dtype_of(self, name: str, usual: torch.dtype) -> torch.dtype:
        """Return the dtype that a weight of a name would have been loaded in."""
        found = (dtype for key, dtype in self.kept.items() if re.search(key, name))
        return next(found, usual)

    def put(
        self, name: str, layer: QuantLinear, *, model: Any, missing_keys: Any, **_: Any
    ) -> None:
        """Let a quantised layer take the place of the linear one of a name."""
        linear = model.get_submodule(name)
        if not isinstance(linear, QuantLinear):  # else it stands in two places, and is there
            take_over(layer, linear)
            layer.bias, layer.training = linear.bias, linear.training
            layer._is_hf_initialized = True  # no random numbers are drawn for it
            for place in places(model, lambda _, one: one is linear):
                place.put(layer)
        self.pending.discard(name)
        missing_keys.discard(f"{name}.weight")

    def put_stack(
        self, name: str, stack: QuantStack, *, model: Any, missing_keys: Any, **_: Any
    ) -> None:
        """Keep a projection of experts, and with the other one let them take the floats' place."""
        parent = name.rpartition(".")[0]
        self.halves[name] = stack
        self.pending.discard(name)
        missing_keys.discard(name)
        names = {one: f"{parent}.{one}" for one in self.stacked[name].names}
        if all(full in self.halves for full in names.values()):
            experts = model.get_submodule(parent)
            stacks = {one: self.halves.pop(full) for one, full in names.items()}
            made = QuantExperts.in_place_of(experts, stacks)
            made._is_hf_initialized = True
            for place in places(model, lambda _, one: one is experts, is_experts):
                place.put(made)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.pending and self.pre_quantized:  # else they were not in the file, and stay floats
            raise ValueError(
                f"{len(self.pending)} layers were not found where the model was loaded from, such "
                f"as {min(self.pending)!r}: the folder does not hold the whole model"
            )
        conversions = model._weight_conversions or []
        model._weight_conversions = [
            one
            for one in conversions
            if not any(isinstance(op, Operation) for op in getattr(one, "operations", ()))
        ]
        _keep_whole(model)
        self._describe(model)
        return model

    def _describe(self, model: Any) -> None:
        self.quantization_config = self.quantization_config.describing(model)
        model.config.quantization_config = self.quantization_config

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, str]]:
        """Return what ``save_pretrained`` writes, shared codes once for each layer."""
        self._describe(model)
        state, seen = model.state_dict(), set()
        for key, tensor in state.items():
            if key.rpartition(".")[2] in PARTS and tensor.data_ptr():
                if tensor.data_ptr() in seen:
                    state[key] = tensor.clone()
                seen.add(tensor.data_ptr())
        return state, {}


def keys_of(files: Iterable[str] | None) -> Iterable[str]:
    """Yield the names of the tensors in safetensors files."""
    for path in files or ():
        with safe_open(path, "pt") as file:
            yield from file.keys()
