"""Sharding rules of the products, so that DTensor operands give DTensor results.

For each axis of a device mesh a product may be shared out along any index that it has: rows,
columns and batch axes give a result sharded alike, the summed index a result of partial sums.
PyTorch picks what moves the fewest bytes, so nothing is gathered that need not be. Rules are
registered when the first sharded product is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from gemmule.core.canonical import NAMES
from gemmule.core.operand import c_strides
from gemmule.frameworks import operators as operators  # its import defines what rules are for
from gemmule.quant.shards import QuantizedShards, cuts

Rule = tuple[list[Any], list[Any]]  # placements of the result, and of both operands


def rules(op: str, a: tuple[int, ...], b: tuple[int, ...]) -> list[Rule]:
    """Return how one axis of a mesh may share out the product of operands of these shapes."""
    left, right, out = indices(op, len(a), len(b))
    sizes = [dict(zip(left, a, strict=True)), dict(zip(right, b, strict=True))]
    found: list[Rule] = [
        ([Replicate()], [Replicate(), Replicate()]),
        ([Partial()], [Partial(), Replicate()]),
        ([Partial()], [Replicate(), Partial()]),
    ]
    for index in dict.fromkeys((*left, *right)):
        whole = max(size.get(index, 1) for size in sizes)
        places = [
            Shard(names.index(index)) if size.get(index, 1) == whole != 1 else Replicate()
            for names, size in zip((left, right), sizes, strict=True)
        ]
        if places != [Replicate(), Replicate()]:
            found.append(([Shard(out.index(index)) if index in out else Partial()], places))
    return found


def indices(op: str, a: int, b: int) -> tuple[list[str], list[str], list[str]]:
    """Return the names of the axes of both operands, of a and b dimensions, and of the result."""
    cores = {"matvec": ("mk", "k"), "vecmat": ("k", "kn"), "matmul": ("mk", "kn")}[op]
    left, right = (
        core[-1:] if rank == 1 and place == 0 else core[:rank]
        for place, (core, rank) in enumerate(zip(cores, (a, b), strict=True))
    )
    most = max(a - len(left), b - len(right))
    batch = [f"batch{i}" for i in range(most)]
    names = [[*batch[most - (rank - len(core)) :], *core] for core, rank in ((left, a), (right, b))]
    out = [*batch, *(index for index in "mn" if index in (*left, *right))]
    return names[0], names[1], out


# ---- quantised matrices, whole or cut by `QuantizedMatrix.shard` ---------------------------------
def quantized(op: str, a: Any, b: Any, multiply: Callable[[Any, Any], Any]) -> DTensor:
    """Return the product of a quantised matrix and a DTensor; `multiply` computes a local one.

    A whole matrix is the same on every process. TypeError where the tensor is no DTensor,
    ValueError where it lies on another mesh than the parts.
    """
    first = not isinstance(a, torch.Tensor)
    matrix, tensor = (a, b) if first else (b, a)
    parts = matrix if isinstance(matrix, QuantizedShards) else None
    aside = False  # whether DTensor would cut the result elsewhere than the matrix is cut
    _check(op, parts, matrix, tensor, 1 if first else 0)
    axis = tensor.ndim - (2 if op == "matmul" and first and tensor.ndim > 1 else 1)
    if parts is None:
        given, back, result = _whole(tensor.placements, axis)
    elif parts.dim == (0 if first else 1):
        given, back, result = [Replicate()], [Partial()], [Shard(axis)]
        aside = parts.order is not None or not _as_dtensor(parts, matrix.shape[parts.dim])
    else:
        alike = parts.order is None and _as_dtensor(parts, tensor.shape[axis])
        cut = tensor.placements[0] == Shard(axis) and alike
        given, back = ([Shard(axis)],) * 2 if cut else ([Replicate()], [Partial()])
        result = [Partial()]
    local = tensor.redistribute(placements=given).to_local(grad_placements=back)
    if parts is not None and result == [Partial()] and given == [Replicate()]:
        local = _own(parts, local, axis)
    held = matrix if parts is None else parts.local
    product = multiply(held, local) if first else multiply(local, held)
    if parts is not None and aside:
        product, result = _among_zeros(parts, product, axis), [Partial()]
    shape = list(tensor.shape)
    shape[axis] = matrix.shape[0 if first else 1]
    return DTensor.from_local(
        product,
        tensor.device_mesh,
        result,
        run_check=False,
        shape=torch.Size(shape),
        stride=c_strides(tuple(shape)),
    )


def _check(op: str, parts: Any, matrix: Any, tensor: Any, inner: int) -> None:
    if not isinstance(tensor, DTensor):
        raise TypeError(
            f"{op} was given a part of a quantised matrix and a {type(tensor).__name__}; beside it "
            "a DTensor of the same mesh is required. Make one with distribute_tensor."
        )
    if parts is not None and parts.mesh != tensor.device_mesh:
        raise ValueError(
            f"the matrix is cut over {parts.mesh} and the tensor lies on {tensor.device_mesh}; "
            "both must have the same mesh."
        )
    axis = -2 if op == "matmul" and inner == 1 and tensor.ndim > 1 else -1
    if tensor.shape[axis] != matrix.shape[inner]:
        raise ValueError(
            f"{op}: the matrix has shape {tuple(matrix.shape)} and the tensor "
            f"{tuple(tensor.shape)}; {matrix.shape[inner]} and {tensor.shape[axis]} must be equal."
        )


def _whole(placements: Any, axis: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Return placements of a tensor beside a whole matrix, of its gradient, and of the result."""
    given = [Replicate() if place == Shard(axis) else place for place in placements]
    back = [Replicate() if place.is_partial() else place for place in given]
    return given, back, given


def _as_dtensor(parts: QuantizedShards[Any], size: int) -> bool:
    """Whether DTensor cuts an axis of this size where the matrix is cut."""
    return parts.bounds == cuts(size, parts.mesh.size())


def _own(parts: QuantizedShards[Any], tensor: Any, axis: int) -> Any:
    """Return what this process's part meets of a tensor that is whole on every process."""
    if parts.order is not None:
        return tensor.index_select(axis, torch.from_numpy(parts.order).to(tensor.device))
    rank = parts.mesh.get_local_rank()
    first, last = parts.bounds[rank : rank + 2]
    return tensor.narrow(axis, first, last - first)


def _among_zeros(parts: QuantizedShards[Any], product: Any, axis: int) -> Any:
    """Return this process's part of a result in its place, zeros beside it: a partial sum."""
    if parts.order is not None:
        shape = list(product.shape)
        shape[axis] = parts.bounds[-1]
        at = torch.from_numpy(parts.order).to(product.device, torch.int64)
        return product.new_zeros(shape).index_copy(axis, at, product)
    rank = parts.mesh.get_local_rank()
    sides = [0, 0] * (product.ndim - 1 - axis)
    sides += [parts.bounds[rank], parts.bounds[-1] - parts.bounds[rank + 1]]
    return torch.nn.functional.pad(product, sides)


def _register() -> None:
    for op in NAMES:
        overload = getattr(torch.ops.gemmule, op).default

        def rule(a: Any, b: Any, *, op: str = op, **options: Any) -> list[Rule]:
            given = [None] * len(options)
            return [(out, [*places, *given]) for out, places in rules(op, a.shape, b.shape)]

        register_sharding(overload)(rule)


_register()
