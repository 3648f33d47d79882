"""Sharding rules of the products, so that DTensor operands give DTensor results.

For each axis of a device mesh a product may be shared out along any index that it has: rows,
columns and batch axes give a result sharded alike, the summed index a result of partial sums.
PyTorch picks what moves the fewest bytes, so nothing is gathered that need not be. Rules are
registered when the first sharded product is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from gemmule.core.canonical import NAMES
from gemmule.dispatch import operators as operators  # its import defines what rules are for

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


def _register() -> None:
    for op in NAMES:
        overload = getattr(torch.ops.gemmule, op).default

        def rule(a: Any, b: Any, *, op: str = op, **options: Any) -> list[Rule]:
            given = [None] * len(options)
            return [(out, [*places, *given]) for out, places in rules(op, a.shape, b.shape)]

        register_sharding(overload)(rule)


_register()
