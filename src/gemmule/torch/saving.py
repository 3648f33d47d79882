"""Saving a model of transformers that does not know of its quantised layers: it is refused.

``save_pretrained`` writes the codes; without this package's entry in the model's configuration
``from_pretrained`` would not know them, and answer with random weights and a warning.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_SAVE, METHOD = "save_pretrained", "gemmule"


def refuse_while_saving(layer: str) -> None:
    """Raise ValueError where a ``save_pretrained`` that would lose it asks for a layer's state."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _SAVE and _loses_layers(frame.f_locals.get("self")):
            name = type(frame.f_locals["self"]).__name__
            raise ValueError(
                f"save_pretrained of a {name} whose layer {layer or 'itself'!r} is a gemmule "
                "QuantLinear, which its configuration does not tell: from_pretrained would put "
                "random weights in its place. Call gemmule.torch.pretrained.attach(model) first, "
                "as quantize_ does, or save torch.save(model.state_dict(), path)"
            )
        frame = frame.f_back


def _loses_layers(model: Any) -> bool:
    """Tell whether a model's ``save_pretrained`` would write its layers; adapters alone may be."""
    names = {kind.__name__ for kind in type(model).__mro__}
    if "PreTrainedModel" not in names or getattr(model, "_hf_peft_config_loaded", False):
        return False
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return getattr(config, "quant_method", None) != METHOD
