"""The ways of one matvec over several processes, each with what it sends on paper.

All give the whole result on every process, but ``own rows alone``: the part without messages, which
the others are held against.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import gemmule as gm

ALONE = "own rows alone"
# Newer PyTorch has another name for it.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, slots=True)
class Operands:
    """One size on one process: sets of whole matrices' shares, so that no call finds its own in a
    cache, and the vector, which all processes have."""

    rows: tuple[torch.Tensor, ...]
    columns: tuple[torch.Tensor, ...]
    x: torch.Tensor
    n: int


@dataclass(frozen=True, slots=True)
class Way:
    """One way: `run` computes a product and returns it. sent_bytes, messages: of one process, for
    one product; an all-gather or all-reduce among w processes counts as w - 1 messages."""

    name: str
    run: Callable[[], Any]
    sent_bytes: int
    messages: int


def operands(n: int, dtype: torch.dtype, device: torch.device, nbytes: int) -> Operands:
    """Make as many sets of shares of n x n matrices as take `nbytes` here, at least two.

    Small integers, the same on all processes, so that sums are exact in any order.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator(device=device).manual_seed(n)
    share = n // world * n * dtype.itemsize
    rows, columns = [], []
    for _ in range(max(2, -(-nbytes // (2 * share)))):
        whole = torch.randint(-1, 2, (n, n), generator=generator, device=device).to(dtype)
        rows.append(whole.chunk(world)[rank].clone())
        columns.append(whole.chunk(world, dim=1)[rank].clone())
    x = torch.randint(-1, 2, (n,), generator=generator, device=device).to(dtype)
    return Operands(tuple(rows), tuple(columns), x, n)


def ways(given: Operands) -> Iterator[Way]:
    """Yield the ways of a product of these operands."""
    world, device, x, n = dist.get_world_size(), given.x.device, given.x, given.n
    part, whole = x.new_empty(n // world), x.new_empty(n)
    mesh = init_device_mesh(device.type, (world,))
    each, others = n // world * x.itemsize, world - 1
    alone, own, across = map(itertools.cycle, (given.rows, given.rows, given.columns))

    yield Way(ALONE, lambda: gm.matvec(next(alone), x, out=part), 0, 0)

    def gather() -> torch.Tensor:
        gm.matvec(next(own), x, out=part)
        all_gather(whole, part)
        return whole

    yield Way("own rows, all-gather", gather, each * others, others)

    def by_columns() -> torch.Tensor:
        first = dist.get_rank() * (n // world)
        gm.matvec(next(across), x[first : first + n // world], out=whole)
        dist.all_reduce(whole)
        return whole

    yield Way("own columns, all-reduce", by_columns, 2 * each * others, 2 * others)
    placed = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    shared = itertools.cycle(
        [DTensor.from_local(rows, mesh, [Shard(0)], run_check=False) for rows in given.rows]
    )

    def tensors() -> torch.Tensor:
        result: torch.Tensor = gm.matvec(next(shared), placed).full_tensor()
        return result

    yield Way("DTensor, rows", tensors, each * others, others)
    if device.type == "cuda":
        yield from _straight(given, whole)


def _straight(given: Operands, whole: torch.Tensor) -> Iterator[Way]:
    """Yield the products whose kernels send: 8 bytes for every 4 of the result, none waited for."""
    from gemmule.torch.sharded import Exchange, ShardedMatrix

    exchange, others = Exchange(given.n), dist.get_world_size() - 1
    shared = itertools.cycle([ShardedMatrix(rows, exchange) for rows in given.rows])
    rows = given.n // dist.get_world_size()
    words = rows * max(1, whole.itemsize // 4)
    yield Way(
        "own rows, sent by the kernel",
        lambda: next(shared).matvec(given.x, out=whole),
        8 * words * others,
        rows * others,
    )
