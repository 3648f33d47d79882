"""What a quantised layer takes over from the one that it stands in for, and where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from gemmule.torch.floats import is_linear, weight_of

Options = Mapping[str, Any]
Filter = Callable[[str, torch.nn.Module], "bool | Options"]


class Place(NamedTuple):
    """Where a linear layer, or experts, stand in a model, and the options that are its own."""

    parent: torch.nn.Module
    name: str
    full: str
    linear: Any
    options: Options

    def put(self, layer: torch.nn.Module) -> None:
        """Let another layer stand there."""
        setattr(self.parent, self.name, layer)
        if isinstance(self.parent, torch.nn.TransformerEncoderLayer):
            self.parent.activation_relu_or_gelu = 0  # else a kernel of its own wants float weights


# Shared, not copied: the handles by which hooks are removed know these dictionaries.
_SHARED = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_OF_STATE = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def places(
    model: torch.nn.Module, wanted: Filter | None, known: Callable[[Any], bool] = is_linear
) -> Iterator[Place]:
    """Yield every place of a model where what `known` knows stands and is wanted."""
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():  # named_children leaves out what it has met
            full = f"{path}.{name}" if path else name
            wish = known(child) and (wanted is None or wanted(full, child))
            if wish or isinstance(wish, Mapping):
                options = wish if isinstance(wish, Mapping) else {}
                yield Place(parent, name, full, child, options)


def by_weight(taken: Iterable[Place]) -> list[list[Place]]:
    """Return places whose layers have the same weight together, in the order that they came."""
    groups: dict[Any, list[Place]] = {}
    for place in taken:
        groups.setdefault(memory(weight_of(place.linear)), []).append(place)
    return list(groups.values())


def loosened(model: torch.nn.Module, groups: list[list[Place]]) -> Iterator[tuple[str, str]]:
    """Yield layers and the names of parameters that have their weight and will keep it alone."""
    layers = {memory(group[0].linear.weight): group for group in groups}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        group = layers.get(memory(parameter))
        if group and name not in {f"{place.full}.weight" for place in group}:
            yield group[0].full, name


def refuse(
    linear: Any, kind: type[torch.nn.Module], parameters: Collection[str] = ("weight", "bias")
) -> None:
    """Raise ValueError for a layer of which `kind` would lose something, or compute otherwise."""
    further = set(linear._parameters).difference(parameters)
    if further or ("weight" in parameters and linear._parameters.get("weight") is None):
        why = f"computed, from {', '.join(sorted(further))}" if further else "no Parameter"
        raise ValueError(
            f"its weight is {why}, and would not be that any more. Make it a Parameter first: "
            "torch.nn.utils.remove_weight_norm, prune.remove, or set it"
        )
    if any(getattr(linear, hooks) for hooks in _OF_STATE):
        raise ValueError(
            "it has hooks of its state_dict, which would meet codes and scales instead of a "
            "weight. Remove them, and register what is wanted for those afterwards"
        )
    if linear._compiled_call_impl is not None:
        raise ValueError("it was compiled in place; quantise first, then call its compile()")
    declared = {name for one in kind.__mro__ for name in vars(one).get("__annotations__", ())}
    hidden = {
        name
        for name in (*_own(linear), *linear._buffers)
        if hasattr(kind, name) or name in declared
    }
    if hidden:
        raise ValueError(
            f"it has {', '.join(sorted(hidden))} of its own, where a {kind.__name__} has another. "
            "Take that off first, as forward that was replaced by another library"
        )


def take_over(layer: torch.nn.Module, linear: Any, without: Collection[str] | None = None) -> None:
    """Give a new layer what the old one had: hooks, attributes, buffers, layers within it.

    without: the names of weights, where all other parameters are taken over as well, and layers of
    these names stand for them.
    """
    if without is None:
        layer._modules = linear._modules  # shared: a layer within it may be replaced in turn
    else:
        layer._modules.update(linear._modules)
        kept = (one for one in linear._parameters.items() if one[0] not in without)
        layer._parameters.update(kept)
    for name in _SHARED:
        setattr(layer, name, getattr(linear, name))
    for name in _own(linear):
        setattr(layer, name, getattr(linear, name))
    for name in linear._buffers:
        persistent = name not in linear._non_persistent_buffers_set
        layer.register_buffer(name, linear._buffers[name], persistent=persistent)


def _own(linear: Any) -> list[str]:
    """Return the attributes that a linear layer has beside those of all."""
    plain = vars(torch.nn.Linear(1, 1, device="meta"))
    return [name for name in vars(linear) if name not in plain]


def memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what tells whether two tensors are the same numbers in the same memory."""
    lazy = torch.nn.parameter.is_lazy(tensor)
    if lazy or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        return (id(tensor),)
    where = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *where, tuple(tensor.shape), tensor.stride(), tensor.dtype
