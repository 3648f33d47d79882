"""Products of DTensors, on meshes of processes that talk by gloo."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest

import gemmule as gm

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

WORLD, CASES = 4, 6
OURS: dict[str, Callable[..., Any]] = {
    "matvec": gm.matvec,
    "vecmat": gm.vecmat,
    "matmul": gm.matmul,
}
THEIRS: dict[str, Callable[..., Any]] = {
    "matvec": lambda A, x: (A @ x[..., None])[..., 0],
    "vecmat": lambda x, A: (x[..., None, :] @ A)[..., 0, :],
    "matmul": torch.matmul,
}
# op, placements of both operands on an axis of a mesh, and those of a result that needs no message.
QUIET = [
    ("matvec", Shard(0), Replicate(), Shard(0)),
    ("matvec", Shard(1), Shard(0), Partial()),
    ("matvec", Replicate(), Replicate(), Replicate()),
    ("vecmat", Replicate(), Shard(1), Shard(0)),
    ("vecmat", Shard(0), Shard(0), Partial()),
    ("matmul", Shard(0), Replicate(), Shard(0)),
    ("matmul", Replicate(), Shard(1), Shard(1)),
    ("matmul", Shard(1), Shard(0), Partial()),
]
SHAPES = {"matvec": ((8, 6), (6,)), "vecmat": ((6,), (6, 8)), "matmul": ((8, 6), (6, 5))}


def sample(shape: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).double()


def rank_of(rank: int, port: int) -> None:
    """Run every check as one process of the mesh."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    meshes = [init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (2, 2))]
    for op, left, right, wanted in QUIET:
        quiet_product(op, left, right, wanted, meshes[0])
    rng = random.Random(7)
    for _ in range(CASES):
        random_product(rng, rng.choice(meshes))
    dist.destroy_process_group()


def quiet_product(op: str, left: Any, right: Any, wanted: Any, mesh: Any) -> None:
    a, b = (sample(shape, seed) for seed, shape in enumerate(SHAPES[op]))
    given = distribute_tensor(a, mesh, [left]), distribute_tensor(b, mesh, [right])
    with CommDebugMode() as messages:
        result = OURS[op](*given)
    assert messages.get_total_counts() == 0, (op, left, right)
    assert result.placements == (wanted,), (op, left, right, result.placements)
    assert torch.equal(result.full_tensor(), THEIRS[op](a, b))


def random_product(rng: random.Random, mesh: Any) -> None:
    """Compare one product, and often its gradients, placed anyhow; shards are uneven."""
    op = rng.choice(list(OURS))
    m, k, n = (rng.choice([1, 2, 3, 5, 8]) for _ in range(3))
    batch = [rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 0, 1, 2]))]
    cores = {"matvec": ([m, k], [k]), "vecmat": ([k], [k, n]), "matmul": ([m, k], [k, n])}[op]
    shapes = [[*batch[rng.randint(0, len(batch)) :], *core] for core in cores]
    if op == "matmul" and rng.random() < 0.3:
        shapes[rng.randint(0, 1)] = [k]
    whole = [sample(shape, rng.randint(0, 10**9)) for shape in shapes]
    placed = []
    for tensor in whole:
        ways = [Replicate(), *(Shard(i) for i in range(tensor.ndim))]
        placed.append(distribute_tensor(tensor, mesh, [rng.choice(ways) for _ in range(mesh.ndim)]))
    told = (op, shapes, [tensor.placements for tensor in placed])
    wants_gradients = rng.random() < 0.4
    for tensor in (*whole, *placed):
        tensor.requires_grad_(wants_gradients)
    result, exact = OURS[op](*placed), THEIRS[op](*whole)
    assert isinstance(result, DTensor), told
    assert torch.equal(result.full_tensor(), exact), told
    if wants_gradients:
        result.full_tensor().sum().backward()
        exact.sum().backward()
        for mine, theirs in zip(placed, whole, strict=True):
            assert torch.equal(mine.grad.full_tensor(), theirs.grad), told


def test_products_of_shards() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # so that PyTorch is imported once, not four times
    ranks = [context.Process(target=rank_of, args=(rank, port)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * WORLD, "each says why on stderr"


def test_a_rule_for_every_index_of_a_product() -> None:
    from gemmule.dispatch.dtensor import indices, rules

    assert indices("matmul", 3, 2) == (["batch0", "m", "k"], ["k", "n"], ["batch0", "m", "n"])
    assert indices("matmul", 1, 3) == (["k"], ["batch0", "k", "n"], ["batch0", "n"])
    assert indices("matmul", 2, 1) == (["m", "k"], ["k"], ["m"])
    assert indices("vecmat", 2, 3) == (["batch0", "k"], ["batch0", "k", "n"], ["batch0", "n"])
    shared = rules("matvec", (4, 3, 5), (1, 5))
    assert ([Shard(0)], [Shard(0), Replicate()]) in shared, "an axis of 1 is not shared out"
    assert ([Partial()], [Shard(2), Shard(1)]) in shared
