"""Quantised linear layers of PyTorch: `QuantLinear`, `quantize_`, and the operator below them.

``torch.ops.gemmule.quantized_linear`` takes a quantised matrix as its tensors, so that a whole
model compiles without a graph break. It computes as `gemmule.matvec` and `gemmule.vecmat` do,
on the CPU and on CUDA devices, and is differentiable in x, not in the weights.

>>> import torch, gemmule.torch.linear as gl
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
>>> gl.quantize_(model, bits=8)
2 of 2 matrices quantised; 0.0 MB before, 0.0 MB after
>>> model(torch.ones(2, 64)).shape
torch.Size([2, 8])
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gemmule.torch.calibration import Inputs, options_from
from gemmule.torch.experts import QuantExperts, is_experts
from gemmule.torch.layer import QuantLinear
from gemmule.torch.replacing import Filter, Place, by_weight, loosened, places, refuse, take_over
from gemmule.torch.report import Report, nbytes, report_of

log = logging.getLogger("gemmule")
GROUP_SIZE = 64  # columns that share a scale, where nothing else is asked for


def quantize_(
    model: torch.nn.Module,
    bits: int = 4,
    group_size: int | None = GROUP_SIZE,
    *,
    filter: Filter | None = None,  # noqa: A002  the name that users of such functions look for
    calibration: Mapping[str, Inputs] | None = None,
    **options: Any,
) -> Report:
    """Replace a model's linear layers and experts by quantised ones, in place; tell what was done.

    The result prints how many layers were replaced, what was left and why, and the bytes; its
    ``model`` is the model. The logger ``gemmule`` warns where nothing, or less than half of what
    could be multiplied, was taken.

    filter: called with a layer's full name and the layer, a `torch.nn.Linear` or a ``Conv1D`` of
    transformers; True where it is replaced, or a dict of options for this layer alone (default:
    all; subclasses of Linear stay), or with the experts of a mixture of transformers, both of whose
    projections it decides on (`QuantExperts`). options: those of `gemmule.quantize`, such as
    ``method``, ``symmetric``, ``scale_dtype``, ``format``. calibration: what
    `gemmule.torch.calibrate` saw of the layers' inputs; each is then quantised with it as its
    ``importance``, or by ``method="gptq"``. Experts are quantised without.

    A layer that stands in several places stays one, and layers that share a weight share its
    codes, in memory, after ``.to(device)`` too. Where the other is not quantised, such as an
    embedding, the two are tied no more, and the logger ``gemmule`` warns of it. Forward and
    backward hooks, attributes, buffers and what stands within a layer go with it; hooks of the
    weight itself do not. Floats are freed layer by layer, where nobody else holds them.

    A model of transformers can be saved by ``save_pretrained`` and loaded by ``from_pretrained``
    (see `gemmule.torch.pretrained`), another by `gemmule.torch.files`.

    ValueError where the model is itself a linear layer: use `QuantLinear.from_linear`; for one on
    the device meta, which has no numbers; and, with nothing replaced, for layers whose weight hooks
    compute (pruned, normalised), that have hooks of their state_dict, or a ``forward`` of their
    own, which would not be what they were. Layers of `torch.nn.utils.parametrize` are subclasses,
    and stay. The old layer, where another model keeps it, shares its hooks from then on. Errors of
    `gemmule.quantize` name the layer; those before it are replaced then.

    >>> import torch, gemmule.torch.linear as gl
    >>> model = torch.nn.Sequential(torch.nn.Linear(640, 640), torch.nn.Linear(640, 2))
    >>> gl.quantize_(model, filter=lambda name, layer: layer.out_features > 2)
    1 of 2 matrices quantised; 1.6 MB before, 0.3 MB after
      left: 1 (0.0 MB): the filter left it
    >>> model[0]
    QuantLinear(in_features=640, out_features=640, bits=4, group_size=64, bias=True)
    """
    if not isinstance(model, torch.nn.Module) or not (filter is None or callable(filter)):
        raise TypeError(
            "quantize_ takes a torch.nn.Module, and as its filter None or a function; got a "
            f"{type(model).__name__} and a {type(filter).__name__}."
        )
    if type(model) is torch.nn.Linear:
        raise ValueError(
            "the model is one linear layer, which cannot be replaced in place: use "
            "gemmule.torch.QuantLinear.from_linear(layer, bits=4), which returns another."
        )
    before, taken = nbytes(model), list(places(model, filter))
    mixtures = list(places(model, filter, is_experts))
    common = {"bits": bits, "group_size": group_size, **options}
    _check_all(taken, mixtures, common)  # first: nothing is replaced if one is refused
    names = [place.full for place in (*taken, *mixtures)]
    every = (*places(model, None), *places(model, None, is_experts))
    declined = {place.full for place in every}.difference(names)
    groups = by_weight(taken)
    chosen = [_chosen(group[0], common, calibration) for group in groups]
    loose = list(loosened(model, groups))
    del taken, every
    while groups:
        _replace(groups.pop(0), chosen.pop(0))
    replaced = names[: len(names) - len(mixtures)] + _replace_experts(mixtures, common)
    for layer, name in loose:
        log.warning(
            "layer %r is quantised, but %r, which had the same weight, is not: they are tied "
            "no more, and the weight stays in memory",
            layer,
            name,
        )
    if "transformers" in sys.modules:
        from gemmule.torch import pretrained

        told = {key: key for key in ("symmetric", "scale_dtype", "method")}
        told["format"] = "number_format"
        kept = {name: options[key] for key, name in told.items() if key in options}
        pretrained.attach(model, **kept)
    report = report_of(model, replaced, declined, before)
    if report.share < 0.5:
        log.warning("less than half of the weights that are multiplied was quantised: %r", report)
    return report


def _chosen(
    place: Place, common: dict[str, Any], calibration: Mapping[str, Inputs] | None
) -> dict[str, Any]:
    """Return the options of a layer: its own, else those of all, beside its statistics."""
    own = _own(place, common)
    if calibration is None:
        return own
    method = own.get("method", "rtn")
    return {**_naming(place.full, options_from, calibration, place.full, method), **own}


def _own(place: Place, common: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's options before those of all, and a format's groups before the default."""
    own = {**common, **place.options}
    if own.get("format") is not None and own["group_size"] == GROUP_SIZE:
        del own["group_size"]
    return own


def _replace(group: list[Place], options: dict[str, Any]) -> None:
    """Put quantised layers where those of one weight stand; the group's own memory is freed."""
    made: dict[torch.nn.Module, QuantLinear] = {}
    twin: QuantLinear | None = None
    for place in group:
        if place.linear not in made:
            if twin is None:
                layer = _naming(place.full, QuantLinear.from_linear, place.linear, **options)
            else:
                layer = QuantLinear._tied(twin, place.linear)
            take_over(layer, place.linear)
            made[place.linear] = twin = layer
        place.put(made[place.linear])


def _replace_experts(mixtures: list[Place], common: dict[str, Any]) -> list[str]:
    """Put quantised experts where those of a model stand; return the names of their projections.

    The list is emptied, and floats are freed on the way.
    """
    names: list[str] = []
    stand: dict[torch.nn.Module, list[Place]] = {}
    while mixtures:
        stand.setdefault(mixtures[0].linear, []).append(mixtures.pop(0))
    groups = list(stand.values())
    stand.clear()
    while groups:
        group = groups.pop(0)
        first, own = group[0], _own(group[0], common)
        made = _naming(first.full, QuantExperts.from_experts, first.linear, **own)
        for place in group:
            place.put(made)
            names += [f"{place.full}.{name}" for name in made._names]
        del group, first, place
    return names


def _check_all(taken: list[Place], mixtures: list[Place], common: dict[str, Any]) -> None:
    """Raise ValueError for what would lose something, or lacks what a method needs."""
    for place in taken:
        _naming(place.full, refuse, place.linear, QuantLinear)
    for place in mixtures:
        _naming(place.full, QuantExperts.refuse, place.linear)
        if {**common, **place.options}.get("method") == "gptq":
            raise ValueError(
                f"layer {place.full!r}: method 'gptq' needs second moments, of which experts have "
                "none. Give them another method by the filter, as a dict, or leave them"
            )


def _naming(layer: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    try:
        return function(*given, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"layer {layer!r}: {error}") from error
