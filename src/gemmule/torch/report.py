"""What `quantize_` did to a model: the layers that it took, those that it left, and the bytes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gemmule.torch.coded import Coded
from gemmule.torch.experts import QuantExperts
from gemmule.torch.floats import is_linear

_SHOWN = 20
_LOOKED_UP = "an embedding, whose rows are looked up and not multiplied"
_DECLINED = "the filter left it"


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What a model was and is; ``model`` is the model itself.

    - ``replaced``: names of the layers that are quantised now, shared ones by each name.
    - ``skipped``: the matrices left as floats, by name, and why; vectors are not told.
    - ``bytes_before``, ``bytes_after``: of all parameters and buffers, each memory counted once.
    - ``share``: how much of what is multiplied (embeddings and what the filter left apart) was
      quantised, by the count of its weights: 0 to 1.
    """

    model: Any
    replaced: tuple[str, ...]
    skipped: dict[str, str]
    bytes_before: int
    bytes_after: int
    share: float
    sizes: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        matrices = len(self.replaced) + len(self.skipped)
        lines = [
            f"{len(self.replaced)} of {matrices} matrices quantised; "
            f"{self.bytes_before / 1e6:.1f} MB before, {self.bytes_after / 1e6:.1f} MB after"
        ]
        alike: dict[tuple[str, str], list[str]] = {}
        for name, why in self.skipped.items():
            alike.setdefault((re.sub(r"\.\d+(?=\.|$)", ".*", name), why), []).append(name)
        for (pattern, why), names in list(alike.items())[:_SHOWN]:
            size = sum(self.sizes.get(name, 0) for name in names) / 1e6
            shown, count = (names[0], "") if len(names) == 1 else (pattern, f" x {len(names)}")
            lines.append(f"  left: {shown}{count} ({size:.1f} MB): {why}")
        if len(alike) > _SHOWN:
            lines.append(f"  left: {len(alike) - _SHOWN} more kinds, in .skipped")
        return "\n".join(lines)


def nbytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, each memory once."""
    held = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not torch.nn.parameter.is_lazy(tensor) and tensor.layout is torch.strided:
            storage = None if tensor.is_nested else tensor.untyped_storage()
            held[id(tensor) if storage is None else storage._cdata] = tensor.nbytes
    return sum(held.values())


def report_of(
    model: torch.nn.Module, replaced: Collection[str], declined: Collection[str], before: int
) -> Report:
    """Return the report on a model whose layers have been replaced."""
    skipped, sizes, left = {}, {}, 0
    for name, why, tensor in _matrices(model, declined):
        skipped[name], sizes[name] = why, tensor.numel() * tensor.element_size()
        left += 0 if why in (_LOOKED_UP, _DECLINED) else tensor.numel()
    layers = {one for one in model.modules() if isinstance(one, Coded)}
    taken = sum(one._shape.rows * one._shape.columns for one in layers)
    share = taken / (taken + left) if taken else 0.0
    after = nbytes(model)
    return Report(model, tuple(replaced), skipped, before, after, share, sizes)


def _matrices(
    model: torch.nn.Module, declined: Collection[str]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the name of each matrix of floats that a model has, why it is one, and the matrix."""
    for path, module in model.named_modules():
        if isinstance(module, QuantExperts):  # whose biases are vectors, one for each expert
            continue
        for key, tensor in module.named_parameters(recurse=False):
            if torch.nn.parameter.is_lazy(tensor) or tensor.is_nested or tensor.ndim < 2:
                continue
            kind = type(module).__name__
            name = path if key == "weight" else f"{path}.{key}".lstrip(".")
            if isinstance(module, torch.nn.Embedding):
                why = _LOOKED_UP
            elif path in declined:
                why = _DECLINED
            elif is_linear(module):
                why = "it stands where no layer can be replaced"
            elif isinstance(module, torch.nn.Linear):
                why = f"{kind} is a subclass of Linear, which may compute otherwise"
            else:
                why = f"a {tensor.ndim}-D parameter of {kind}, which is no linear layer"
            yield name, why, tensor
