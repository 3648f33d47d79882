"""Styles of ``parallelize_module`` for quantised layers: each process multiplies its own codes.

PyTorch's own styles cut parameters, which codes are not. These cut the matrix, where no group is
cut, and leave inputs, results and gradients to DTensors, as PyTorch's styles do: between a
`ColwiseQuant` and the `RowwiseQuant` behind it nothing moves, and behind that one sum is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from gemmule.quant.shards import cuts
from gemmule.torch.layer import QuantLinear
from gemmule.torch.parts import PARTS, order_at, tensor_of


class _Cut(QuantLinear):
    """A layer's part on one process of a mesh; its sizes and its state_dict are the part's."""

    style: Any
    mesh: Any
    whole: int

    def _given(self, x: torch.Tensor) -> DTensor:
        """Return what the layer is called with, in the layout that its style multiplies."""
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, self.style.input_layouts, run_check=False)
        return x.redistribute(placements=self.style.desired_input_layouts)

    def _answer(self, y: DTensor) -> torch.Tensor:
        return y.to_local() if self.style.use_local_output else y


class _Columns(_Cut):
    """Some outputs of a layer, from all of its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the style says: by default this process's outputs."""
        local = self._given(x).to_local(grad_placements=(Partial(),))
        y = super().forward(local)
        # The sizes are told, as those of a matrix that is cut unevenly cannot be guessed.
        shape = torch.Size((*y.shape[:-1], self.whole))
        strides = torch.empty(shape, device="meta").stride()
        spread = DTensor.from_local(
            y, self.mesh, (Shard(-1),), run_check=False, shape=shape, stride=strides
        )
        return self._answer(spread.redistribute(placements=self.style.output_layouts))


class _Rows(_Cut):
    """What some inputs of a layer add to all of its outputs; the bias joins their sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the style says: by default the whole sum, on every process."""
        parts = (self.codes, self.scales, self.zeros, self.perm)
        local = self._given(x).to_local()
        y = torch.ops.gemmule.quantized_linear.default(local, *parts, *self._shape, False, None)
        spread = DTensor.from_local(y, self.mesh, (Partial(),), run_check=False)
        spread = spread.redistribute(placements=self.style.output_layouts)
        if self.bias is not None:
            bias = DTensor.from_local(self.bias, self.mesh, (Replicate(),), run_check=False)
            spread = spread + bias.to(spread.dtype)
        return self._answer(spread)


class ColwiseQuant(ColwiseParallel):  # type: ignore[misc]
    """`ColwiseParallel` for a `QuantLinear`: every process keeps some rows of its matrix and bias.

    Arguments are those of `ColwiseParallel`. The layer, which has to be whole and the same on every
    process, is changed in place: its sizes, its buffers and its state_dict become the part's.

    >>> plan = {"up": ColwiseQuant(), "down": RowwiseQuant()}  # for parallelize_module
    """

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        layer = _cut(module, 0, device_mesh, self)
        layer.__class__ = _Columns
        return layer


class RowwiseQuant(RowwiseParallel):  # type: ignore[misc]
    """`RowwiseParallel` for a `QuantLinear`: every process keeps some columns, and the whole bias.

    Arguments are those of `RowwiseParallel`; see `ColwiseQuant`. ValueError where the inputs that
    DTensors give a process are no whole groups, or columns are permuted.

    >>> plan = {"up": ColwiseQuant(), "down": RowwiseQuant()}  # for parallelize_module
    """

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        self.desired_input_layouts = (Shard(-1),)
        layer = _cut(module, 1, device_mesh, self)
        layer.__class__ = _Rows
        return layer


def _cut(layer: Any, dim: int, mesh: Any, style: Any) -> Any:
    """Keep this process's part of a layer."""
    name = type(style).__name__
    if not isinstance(layer, QuantLinear) or isinstance(layer, _Cut):
        told = "a layer that is cut already" if isinstance(layer, _Cut) else type(layer).__name__
        raise TypeError(f"{name} cuts a whole QuantLinear, and was given {told}")
    part = layer.matrix.shard(dim, mesh)
    size = part.shape[dim]
    if part.order is not None:
        raise ValueError(
            "the layer's columns are permuted, so a part of them wants inputs of every process: "
            "use ColwiseQuant, or quantise it without a permutation."
        )
    if part.bounds != cuts(size, mesh.size()):
        raise ValueError(
            f"{size} inputs on {mesh.size()} processes are {-(-size // mesh.size())} each, which "
            f"is no multiple of the groups of {layer.group_size}. Quantise the layer in smaller "
            "groups, or use ColwiseQuant."
        )
    own = part.local.to(layout=order_at(layer.codes))
    layer.style, layer.mesh, layer.whole = style, mesh, size
    layer._hold(tuple(tensor_of(getattr(own, one)) for one in PARTS))
    layer.out_features, layer.in_features = own.stored_shape
    bias, rank = layer.bias, mesh.get_local_rank()
    if bias is not None and dim == 0:
        kept = bias.detach()[part.bounds[rank] : part.bounds[rank + 1]].clone()
        layer.bias = torch.nn.Parameter(kept, requires_grad=bias.requires_grad)
    return layer
