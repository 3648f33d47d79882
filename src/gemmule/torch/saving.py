"""Saving in the format of transformers, which would lose quantised weights: it is refused.

``PreTrainedModel.save_pretrained`` writes the codes under names that ``from_pretrained`` does not
know: it would answer with a model of random weights and a warning. transformers is never imported.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

_SAVE = "save_pretrained"


def refuse_while_saving(layer: str) -> None:
    """Raise ValueError where a ``save_pretrained`` of transformers asks for a layer's state."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _SAVE and loses_layers(frame.f_locals.get("self")):
            raise refusal(frame.f_locals["self"], layer)
        frame = frame.f_back


def loses_layers(model: Any) -> bool:
    """Tell whether a model's ``save_pretrained`` would write its layers; adapters alone may be."""
    names = {kind.__name__ for kind in type(model).__mro__}
    return "PreTrainedModel" in names and not getattr(model, "_hf_peft_config_loaded", False)


def refusal(model: Any, layer: str) -> ValueError:
    """Return the error for a model that has a quantised layer of that name."""
    return ValueError(
        f"save_pretrained of a {type(model).__name__} whose layer {layer or 'itself'!r} is a "
        "gemmule QuantLinear: from_pretrained knows no such layer and would put random weights in "
        "its place, so nothing of the model was written that it could read. Save "
        "torch.save(model.state_dict(), path) instead, and load by "
        "quantize_(the unquantised model, the same options).load_state_dict(torch.load(path)); or "
        "save_pretrained before quantize_, and quantise again after from_pretrained"
    )


class Saving:
    """What stands for a model's ``save_pretrained``, which asks no layer where a dict is given."""

    def __init__(self, model: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
        self.model, self.kind = model, kind

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Save a model that has none of the quantised layers any more; refuse any other."""
        layers = (name for name, one in self.model.named_modules() if isinstance(one, self.kind))
        layer = next(layers, None)
        if layer is not None and loses_layers(self.model):
            raise refusal(self.model, layer)
        return getattr(type(self.model), _SAVE)(self.model, *given, **options)


def guard(model: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    """Let every model of transformers in `model` refuse to be saved with layers of a kind."""
    for module in model.modules():
        if loses_layers(module) and hasattr(type(module), _SAVE):
            setattr(module, _SAVE, Saving(module, kind))
