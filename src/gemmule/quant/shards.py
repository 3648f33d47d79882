"""Parts of a quantised matrix that several processes share, cut where no group is cut.

What a part holds needs no PyTorch; `gemmule.frameworks.dtensor` multiplies parts with DTensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gemmule.core.operand import Factor
from gemmule.quant import checks

Matrix = TypeVar("Matrix", bound=Any)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedShards(Factor, Generic[Matrix]):
    """One process's part of a matrix that is cut along `dim` over a device mesh.

    - ``local``: the part itself; ``shape``: that of the whole matrix.
    - ``bounds``: where each process's part begins along `dim`, and where the last one ends.
    - ``order``: None, or which entries of a vector along `dim` the part's own meet, in their order
      (where the whole matrix has a permutation and its columns are cut).
    """

    local: Matrix
    shape: tuple[int, int]
    dim: int
    mesh: Any
    bounds: tuple[int, ...]
    order: NDArray[np.int32] | None = None

    @property
    def ndim(self) -> int:
        """2."""
        return 2


def shard(matrix: Matrix, dim: int, mesh: Any) -> QuantizedShards[Matrix]:
    """Return this process's part; see `QuantizedMatrix.shard`."""
    if dim not in (0, 1):
        raise ValueError(f"dim is {dim}; a matrix is cut along 0, its rows, or 1, its columns.")
    if not hasattr(mesh, "get_local_rank"):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; needed is a PyTorch DeviceMesh of one dimension, "
            "such as init_device_mesh('cuda', (2,))."
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions; give one of them, such as mesh['name']."
        )
    stored = 1 - dim if matrix.transposed else dim
    size = matrix.stored_shape[stored]
    unit = _unit(matrix) if stored else 1
    bounds = cuts(size, mesh.size(), unit)
    rank = mesh.get_local_rank()
    local, order = cut(matrix, stored, bounds[rank], bounds[rank + 1])
    return QuantizedShards(local, matrix.shape, dim, mesh, bounds, order)


def _unit(matrix: Any) -> int:
    """Return what the columns of each part but the last are a multiple of."""
    size = matrix.group_size
    if size is None or size < 0:
        return 2 if matrix.bits == 4 else 1
    return int(2 * size if matrix.bits == 4 and size % 2 else size)


def cuts(size: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Return where parts begin, whole units each and as DTensor has them, and where they end.

    >>> cuts(10, 4), cuts(100, 2, 32)
    ((0, 3, 6, 9, 10), (0, 64, 100))
    """
    step = -(-size // (unit * parts)) * unit
    return tuple(min(size, part * step) for part in range(parts + 1))


def cut(
    matrix: Matrix, axis: int, first: int, last: int
) -> tuple[Matrix, NDArray[np.int32] | None]:
    """Return stored rows (axis 0) or columns (axis 1) of a matrix, and their places in a vector.

    The places are None where they are first .. last in order. The part is a copy, made on the host.
    """
    host = matrix.to("cpu", "row")
    m, n = matrix.stored_shape
    shape = (last - first, n) if axis == 0 else (m, last - first)
    each = 2 if matrix.bits == 4 else 1
    codes_at = (
        slice(first, last) if axis == 0 else slice(None),
        slice(None) if axis == 0 else slice(first // each, -(-last // each)),
    )
    parts_at = _groups_at(matrix, axis, first, last)
    zeros_at = parts_at if host.factors is None else (parts_at[0], slice(None))
    order = None
    if axis == 1 and host.perm is not None:
        order = np.array(host.perm[first:last])  # PyTorch warns of what is read-only
    part = replace(
        host,
        codes=checks.read_only(host.codes[codes_at]),
        scales=checks.read_only(host.scales[parts_at]),
        zeros=None if host.zeros is None else checks.read_only(host.zeros[zeros_at]),
        perm=None if axis == 1 else host.perm,
        stored_shape=shape,
        error=None,
    )
    return part.to(matrix.device, matrix.layout), order


def _groups_at(matrix: Any, axis: int, first: int, last: int) -> tuple[slice, slice]:
    """Return which scales belong to rows or columns first .. last."""
    size, every = matrix.group_size, slice(None)
    if size is None:
        return every, every
    if axis == 0:
        return slice(first, last), every
    return (every, every) if size < 0 else (every, slice(first // size, -(-last // size)))
