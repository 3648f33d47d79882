"""The weights of linear layers as floats: those that layers hold, and what codes stand for."""

from __future__ import annotations

import sys
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only


def is_linear(layer: Any) -> bool:
    """Tell whether a layer is one of those that quantised ones stand in for, no subclass of them.

    They are `torch.nn.Linear`, and transformers' ``Conv1D``, which is one with its weight turned.
    """
    return type(layer) is torch.nn.Linear or is_turned(layer)


def is_turned(layer: Any) -> bool:
    """Tell whether a layer is transformers' ``Conv1D``, which holds its weight (in, out)."""
    known = sys.modules.get("transformers.pytorch_utils")
    return known is not None and type(layer) is known.Conv1D


def weight_of(layer: Any) -> torch.Tensor:
    """Return a linear layer's weight (out, in), in the layer's memory."""
    return layer.weight.T if is_turned(layer) else layer.weight


class Floats(torch.Tensor):  # type: ignore[misc]
    """What a quantised layer has for ``weight``: of a weight's form, computed when it is read.

    dtype, shape and device cost nothing, which is what most models ask for. Every operation is
    given the dequantised numbers, a fresh tensor each time; none may write to them. What is taken
    out of it (``.data``, ``.detach()``, a slice) is such a tensor of its own.
    """

    _is_hf_initialized = True  # transformers would draw random numbers for it
    _layer: Any

    @staticmethod
    def __new__(cls, layer: Any) -> Self:
        """Make the view of a layer's weight."""
        shape = (layer.out_features, layer.in_features)
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=layer.weight_dtype, device=layer.codes.device
        )
        made._layer = layer
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), options: Any = None
    ) -> Any:
        """Refuse to be given other data, which would be lost."""
        if function in (torch.Tensor.data.__set__, torch.Tensor.__setitem__):
            raise TypeError(_FIXED)
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return function(*given, **(options or {}))

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, given: Any = (), options: Any = None
    ) -> Any:
        """Compute with the dequantised numbers; TypeError for what would write to them."""
        arguments = zip(function._schema.arguments, given, strict=False)
        if any(one.is_write and isinstance(value, cls) for one, value in arguments):
            raise TypeError(_FIXED)
        given, options = tree_map_only(cls, _read, (given, options or {}))
        return function(*given, **options)

    def __repr__(self, **_: Any) -> str:
        return f"Floats({self._layer}, dtype={self.dtype}, device={self.device})"


def _read(floats: Floats) -> torch.Tensor:
    return floats._layer.dequantize()


_FIXED = (
    "the weight of a QuantLinear is computed from its codes and cannot be written to: adapters "
    "are served beside it, not merged into it. Make a layer of the floats: "
    "torch.nn.Linear with .weight.detach() of this one"
)
