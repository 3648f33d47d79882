"""Grouped products of DTensors: each process multiplies its experts, its columns or its rows.

Which process has which experts is known to all, how many rows each expert has to the device alone:
nothing waits for it, and where a message is needed PyTorch sends it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from gemmule.core.grouped import Routing
from gemmule.core.operand import c_strides
from gemmule.quant.shards import cuts

# Of an axis of a mesh, by where W lies: where A lies, the result, and the gradients of both.
# A's and the result's axes are rows (tokens) and columns, those of W experts, rows and columns.
_PLACES = {
    Shard(0): (Replicate(), Partial(), Partial(), Shard(0)),
    Shard(1): (Shard(1), Partial(), Shard(1), Shard(1)),
    Shard(2): (Replicate(), Shard(1), Partial(), Shard(2)),
}


def product(a: Any, w: Any, ends: Any, out: Any, dtype: Any, routing: Routing | None) -> DTensor:
    """Return a grouped product of DTensors of one mesh.

    offsets, indices and weights are tensors that are the same on every process, or replicated
    DTensors. By indices, only experts and tokens are shared out. The gradient of weights that are
    plain is this process's share of it. TypeError and ValueError for what is not served.
    """
    _check(a, w, out)
    mesh, places = w.device_mesh, []
    for one, other in zip(a.placements, w.placements, strict=True):
        places.append(_of_axis(one, other, by_indices=routing is not None))
    left, right, result, back_left, back_right = (
        list(column) for column in zip(*places, strict=True)
    )
    rows = a.redistribute(placements=left).to_local(grad_placements=back_left)
    matrices = w.redistribute(placements=right).to_local(grad_placements=back_right)
    expert, token = (_begin(one.shape[0], mesh, at) for one, at in ((w, right), (a, left)))
    operators = torch.ops.gemmule
    if routing is not None:
        # An index that names none of this process's experts adds nothing: the sums are partial.
        own = slice(token, token + len(rows))
        indices = _whole(routing.indices, "indices")[own] - expert
        back = [Replicate() if place == Replicate() else Partial() for place in result]
        weights = routing.weights
        weights = None if weights is None else _whole(weights, "weights", back)[own]
        given = indices, weights, None, routing.epilogue
        found = operators.routed_matmul.default(rows, matrices, *given, out_dtype=dtype)
        shape = a.shape[0], *found.shape[1:]
    else:
        bounds = (_whole(ends, "offsets") - token).clamp(0, len(rows))
        found = _own(rows, matrices, bounds, expert, dtype)
        shape = a.shape[0], w.shape[2]
    about = {"run_check": False, "shape": torch.Size(shape), "stride": c_strides(shape)}
    return DTensor.from_local(found, mesh, result, **about)


def _of_axis(a: Any, w: Any, *, by_indices: bool) -> tuple[Any, ...]:
    """Return where A, W, the result and both gradients lie on an axis of the mesh."""
    if by_indices:
        w, a = w if w == Shard(0) else Replicate(), a if a == Shard(0) else Replicate()
    if w.is_partial() or w == Replicate():
        if a == Shard(0):
            return a, Replicate(), Shard(0), Shard(0), Partial()
        if a != Shard(1):
            result = Partial() if a.is_partial() else Replicate()
            return a, Replicate(), result, Replicate(), result
        w = Shard(1)
    left, result, of_a, of_w = _PLACES[w]
    return left, w, result, of_a, of_w


def _own(rows: Any, matrices: Any, bounds: Any, expert: int, dtype: Any) -> Any:
    """Return this process's products in their rows, zeros in all others.

    Rows of the experts before its first one are turned behind those of its last.
    """
    multiply = torch.ops.gemmule.grouped_matmul.default
    own = bounds[expert : expert + len(matrices)]
    if not expert or not len(rows):
        return multiply(rows, matrices, own.contiguous(), out_dtype=dtype)
    begin = bounds[expert - 1]
    places = torch.arange(len(rows), device=rows.device)
    turned = rows[(places + begin) % len(rows)]
    found = multiply(turned, matrices, (own - begin).contiguous(), out_dtype=dtype)
    return found[(places - begin) % len(rows)]


def _begin(size: int, mesh: Any, placements: list[Any]) -> int:
    """Return where this process's part of a tensor's first axis begins, as DTensor cuts it."""
    begin = 0
    for dim, place in enumerate(placements):
        if place == Shard(0):
            bounds, rank = cuts(size, mesh.size(dim)), mesh.get_local_rank(dim)
            begin, size = begin + bounds[rank], bounds[rank + 1] - bounds[rank]
    return begin


def _whole(tensor: Any, name: str, back: Any = None) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    if any(place != Replicate() for place in tensor.placements):
        raise ValueError(
            f"{name} lies as {tensor.placements}; every process needs all of them. Redistribute "
            "them to Replicate(), or give a tensor that is the same on every process."
        )
    return tensor.to_local(grad_placements=back)


def _check(a: Any, w: Any, out: Any) -> None:
    if not (isinstance(a, DTensor) and isinstance(w, DTensor)):
        raise TypeError(
            f"grouped_matmul was given A, a {type(a).__name__}, and W, a {type(w).__name__}; both "
            "must be DTensors of one mesh. Of a stack of codes give each process that of its own "
            "experts, and indices from which its first expert's number is subtracted."
        )
    if a.device_mesh != w.device_mesh:
        raise ValueError(
            f"A lies on {a.device_mesh} and W on {w.device_mesh}; both must have the same mesh."
        )
    if out is not None:
        raise ValueError("grouped_matmul of DTensors takes no out=; use what it returns.")
