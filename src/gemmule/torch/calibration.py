"""What a model's linear layers are given in use: the statistics that quantising them well needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gemmule.torch.replacing import Filter, Place, by_weight, places


@dataclass(frozen=True, slots=True)
class Inputs:
    """What was seen of a layer's inputs x; tensors of float32 on the host.

    - ``rows``: how many x (in_features,) were seen, of all batches together.
    - ``mean_square``: ``(in_features,)``, the mean of x^2 in each column.
    - ``hessian``: ``(in_features, in_features)``, the mean of ``x x^T``; None if not asked for.
    """

    rows: int
    mean_square: torch.Tensor
    hessian: torch.Tensor | None = None


def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    hessian: bool = False,
    filter: Filter | None = None,  # noqa: A002  as in quantize_
) -> dict[str, Inputs]:
    """Run a model on a few batches and return what its linear layers were given, by their names.

    The result is `quantize_`'s ``calibration``: each layer is then quantised with the mean squares
    of its input as `gemmule.quantize`'s ``importance``, or by ``method="gptq"`` with its second
    moments.

    - ``batches``: what the model is called with, one call each: a dict by its names (as tokenisers
      of transformers give it), a tuple or list in order, anything else alone. They lie on the
      model's device. Some hundred sentences are enough, alike to those of use. Padding counts as
      inputs do: better give sentences of one length together.
    - ``hessian``: gather the second moments too, which ``"gptq"`` needs.
    - ``filter``: which layers, as `quantize_` takes it (default: all linear ones).

    The model runs in evaluation mode, under inference mode, and is afterwards as it was. Inputs are
    not kept: a layer takes n numbers (its ``in_features``), with ``hessian`` n^2, of float32, where
    it lies. If those of all layers are too many, calibrate and quantise part by part, by
    ``filter``; later parts then see what the quantised ones give them. Layers that share a weight
    have one entry, under each of their names; those that never ran have none.

    TypeError for what is no model, no batches, or where inputs are no float tensors; ValueError for
    no batches, a model without such layers, and inputs that are not finite, naming the layer.

    >>> import torch, gemmule.torch as gt
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
    >>> seen = gt.calibrate(model, [torch.randn(100, 64)], hessian=True)
    >>> seen["0"].rows, seen["1"].mean_square.shape
    (100, torch.Size([32]))
    >>> gt.quantize_(model, bits=4, group_size=32, method="gptq", calibration=seen)
    2 of 2 matrices quantised; 0.0 MB before, 0.0 MB after
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(batches, Iterable):
        raise TypeError(
            f"calibrate takes a torch.nn.Module and batches to run it on; got {model!r:.60} and "
            f"{batches!r:.60}"
        )
    if isinstance(batches, torch.Tensor | Mapping | str):
        raise TypeError(f"batches is one {type(batches).__name__}; give a list of such")
    groups = by_weight(places(model, filter))
    if not groups:
        raise ValueError("the model has no linear layer (within it, that the filter takes)")
    sums = [_Sums(group[0].full, hessian) for group in groups]
    with _watched(model, groups, sums), torch.inference_mode():
        count = 0
        for batch in batches:
            _call(model, batch)
            count += 1
    if not count:
        raise ValueError("there are no batches: give at least one, in a list for several parts")
    seen = [(group, one.inputs()) for group, one in zip(groups, sums, strict=True) if one.rows]
    return {place.full: inputs for group, inputs in seen for place in group}


class _Sums:
    """The sums over one layer's inputs, on its device; of `float32`, whatever the inputs are."""

    def __init__(self, name: str, hessian: bool) -> None:
        self.name, self.hessian, self.rows = name, hessian, 0
        self.total: Any = 0

    def see(self, layer: torch.nn.Module, given: Any, named: Mapping[str, Any]) -> None:
        """Add the rows of a call's input: a forward pre-hook."""
        x = given[0] if given else next(iter(named.values()))
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            raise TypeError(f"layer {self.name!r} was given a {type(x).__name__} of no floats")
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.rows += len(x)
        self.total = self.total + (x.T @ x if self.hessian else (x * x).sum(0))

    def inputs(self) -> Inputs:
        """Return the means; ValueError where they are not finite."""
        mean = (self.total / self.rows).cpu().clone()
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(
                f"layer {self.name!r} was given inputs that are not finite, or whose squares "
                "overflow float32: look for the batch that does it"
            )
        if not self.hessian:
            return Inputs(self.rows, mean)
        return Inputs(self.rows, mean.diagonal().clone(), mean)


@contextmanager
def _watched(
    model: torch.nn.Module, groups: list[list[Place]], sums: list[_Sums]
) -> Iterator[None]:
    """Let sums see what layers are given, in evaluation mode; after it all is as it was."""
    modes = {module: module.training for module in model.modules()}
    hooks = [
        layer.register_forward_pre_hook(one.see, with_kwargs=True)
        for group, one in zip(groups, sums, strict=True)
        for layer in {place.linear: None for place in group}
    ]
    model.eval()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode


def _call(model: torch.nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


def options_from(calibration: Mapping[str, Inputs], name: str, method: str) -> dict[str, Any]:
    """Return what a layer's statistics are for `gemmule.quantize`, by the method it is given.

    ValueError where the layer has none, or not those that the method needs.
    """
    if name not in calibration:
        raise ValueError(
            "the calibration has no inputs of it, as it did not run or was left out: give "
            "calibrate batches that reach it, leave it by the filter, or quantise it without"
        )
    seen = calibration[name]
    if method != "gptq":
        return {"importance": seen.mean_square}
    if seen.hessian is None:
        raise ValueError("method 'gptq' needs second moments: calibrate with hessian=True")
    return {"hessian": seen.hessian}
