"""Checks of products of DTensors, made by each process of a mesh of processes that talk by gloo."""

from __future__ import annotations

import os
import random
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import gemmule as gm
from checkout import ROOT
from gemmule.errors import PeerError
from gemmule.torch import sharded
from products import OURS, THEIRS

WORLD, CASES = 4, 6
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
# The same of batches of four, whose axis comes before the others.
BATCHED = [
    *((op, Shard(0), Shard(0), Shard(0)) for op in SHAPES),
    ("matvec", Shard(1), Replicate(), Shard(1)),
    ("matvec", Shard(2), Shard(1), Partial()),
    ("vecmat", Replicate(), Shard(2), Shard(1)),
    ("vecmat", Shard(1), Shard(1), Partial()),
    ("matmul", Shard(1), Replicate(), Shard(1)),
    ("matmul", Replicate(), Shard(2), Shard(2)),
]


def messages_sent() -> Any:
    """Return PyTorch's counter of messages, whose module brings its compilers: 2 s to import."""
    from torch.distributed.tensor.debug import CommDebugMode

    return CommDebugMode()


def sample(shape: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).double()


def rank_of(rank: int, port: int) -> None:
    """Run every check as one process of the mesh."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("down", "across"))
    meshes = [init_device_mesh("cpu", (WORLD,)), square]
    for op, left, right, wanted in QUIET:
        quiet_product(op, left, right, wanted, meshes[0])
    for op, left, right, wanted in BATCHED:
        quiet_product(op, left, right, wanted, meshes[0], (4,))
    rng = random.Random(7)
    for _ in range(CASES):
        random_product(rng, rng.choice(meshes))
    for mesh in meshes:
        grouped(mesh)
    lines = [meshes[0], square["down"], square["across"]]
    quiet_shards(meshes[0])
    sums_of_parts(meshes[0])
    for line in lines:
        parts_in_their_place(line)
    for _ in range(CASES):
        random_shards(rng, rng.choice(lines))
    refused(meshes[0])
    the_page_runs()
    told_by_all(rank)
    measured(rank)
    dist.destroy_process_group()


# Where A and W lie on each axis of a mesh, and whether the product itself sends nothing.
SPREAD: list[tuple[Any, Any, bool]] = [
    ((Replicate(),), (Shard(0),), True),
    ((Shard(0),), (Replicate(),), True),
    ((Replicate(),), (Shard(2),), True),
    ((Shard(1),), (Shard(1),), True),
    ((Shard(1),), (Replicate(),), True),
    ((Shard(0),), (Shard(0),), False),
    ((Replicate(), Shard(0)), (Shard(0), Replicate()), True),
    ((Replicate(), Replicate()), (Shard(0), Shard(2)), True),
    ((Replicate(), Replicate()), (Shard(0), Shard(0)), True),
]


def grouped(mesh: Any) -> None:
    """Experts that are shared out unevenly, so that a process may have none, and gradients."""
    for experts, tokens in ((6, 11), (3, 5), (5, 0)):
        ends = torch.randint(0, tokens + 1, (experts,), generator=torch.Generator().manual_seed(4))
        ends = ends.sort().values.int()
        indices = (torch.arange(2 * tokens) * 5 % (experts + 1)).view(tokens, 2)
        weights = sample((tokens, 2), 3)
        around = {"indices": indices, "weights": weights}
        ways = [((ends,), {}), ((), around), ((), {"indices": indices, "epilogue": "silu_gate"})]
        for left, right, quiet in SPREAD:
            if len(left) != mesh.ndim:
                continue
            for given, options in ways:
                grouped_product(mesh, (tokens, experts), (left, right), quiet, given, options)
    whole = sample((5, 8), 1), sample((3, 8, 6), 2)
    spread = [distribute_tensor(one, mesh, [Replicate()] * mesh.ndim) for one in whole]
    for pair in ((whole[0], spread[1]), (spread[0], whole[1])):
        with pytest.raises(TypeError, match="both must be DTensors of one mesh"):
            gm.grouped_matmul(*pair, torch.tensor([1, 3, 5], dtype=torch.int32))


def grouped_product(
    mesh: Any, sizes: Any, places: Any, quiet: bool, given: Any, options: Any
) -> None:
    whole = sample((sizes[0], 8), 1), sample((sizes[1], 8, 6), 2)
    shares = [options["weights"]] if "weights" in options else []
    places = *places, *([(Replicate(),) * mesh.ndim] if shares else [])
    plain = [one.clone().requires_grad_() for one in (*whole, *shares)]
    spread = [
        distribute_tensor(one, mesh, place).requires_grad_()
        for one, place in zip((*whole, *shares), places, strict=True)
    ]
    products = []
    with messages_sent() as sent:
        for a, w, *weights in (spread, plain):
            around = options | ({"weights": weights[0]} if weights else {})
            products.append(gm.grouped_matmul(a, w, *given, **around))
    found, wanted = products
    assert sent.get_total_counts() == 0 or not quiet or options, places
    torch.testing.assert_close(found.full_tensor(), wanted)
    grad = sample(wanted.shape, 5)
    wanted.backward(grad)
    found.full_tensor().backward(grad)
    for one, other in zip(spread, plain, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def quiet_product(
    op: str, left: Any, right: Any, wanted: Any, mesh: Any, batch: tuple[int, ...] = ()
) -> None:
    a, b = (sample((*batch, *shape), seed) for seed, shape in enumerate(SHAPES[op]))
    given = distribute_tensor(a, mesh, [left]), distribute_tensor(b, mesh, [right])
    with messages_sent() as messages:
        result = OURS[op](*given)
    assert messages.get_total_counts() == 0, (op, left, right)
    assert result.placements == (wanted,), (op, left, right, result.placements)
    assert torch.equal(result.full_tensor(), THEIRS[op](a, b))


def spread(tensor: Any, mesh: Any, places: list[Any]) -> Any:
    """Place a tensor; of a sum of parts the first process of each axis has the whole, others 0."""
    if not any(place.is_partial() for place in places):
        return distribute_tensor(tensor, mesh, places)
    others = [Replicate() if place.is_partial() else place for place in places]
    local = distribute_tensor(tensor, mesh, others).to_local()
    first = all(mesh.get_local_rank(i) == 0 for i, place in enumerate(places) if place.is_partial())
    local = local if first else torch.zeros_like(local)
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, places, run_check=False, shape=shape, stride=stride)


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
        ways = [Replicate(), Partial(), *(Shard(i) for i in range(tensor.ndim))]
        placed.append(spread(tensor, mesh, [rng.choice(ways) for _ in range(mesh.ndim)]))
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


def quiet_shards(mesh: Any) -> None:
    """Cut by rows, or by columns where the vector is cut, a matrix asks for no message."""
    W, x = sample((8, 128), 1), sample((128,), 2)
    Q = gm.quantize(W.numpy(), bits=4, group_size=32)
    exact = torch.from_numpy(Q.dequantize("float64")) @ x
    for dim, given, wanted in ((0, Replicate(), Shard(0)), (1, Shard(0), Partial())):
        part, placed = Q.shard(dim, mesh), distribute_tensor(x, mesh, [given])
        with messages_sent() as messages:
            result = gm.matvec(part, placed)
        assert messages.get_total_counts() == 0
        assert result.placements == (wanted,)
        torch.testing.assert_close(result.full_tensor(), exact, rtol=1e-6, atol=1e-4)
    assert Q.shard(1, mesh).local.nbytes < Q.nbytes / 3, "a part holds its part alone"
    with pytest.raises(TypeError, match="a DTensor of the same mesh is required"):
        gm.matvec(Q.shard(0, mesh), x.requires_grad_())
    with pytest.raises(ValueError, match="must be equal"):
        gm.vecmat(placed, Q.shard(0, mesh))
    with pytest.raises(ValueError, match="0, its rows, or 1"):
        Q.shard(2, mesh)


def sums_of_parts(mesh: Any) -> None:
    """A tensor that is a sum of parts: the product is one too, its gradient whole everywhere."""
    W, x = sample((8, 128), 1), sample((128,), 2)
    Q = gm.quantize(W.numpy(), bits=8, group_size=32)
    dense = torch.from_numpy(Q.dequantize("float64"))
    for given, wanted in ((Q, Partial()), (Q.shard(0, mesh), Shard(0))):
        placed = spread(x, mesh, [Partial()]).requires_grad_()
        result = gm.matvec(given, placed)
        assert result.placements == (wanted,)
        close = {"rtol": 1e-6, "atol": 1e-4}
        torch.testing.assert_close(result.full_tensor(), dense @ x, **close)
        result.full_tensor().sum().backward()
        torch.testing.assert_close(placed.grad.full_tensor(), dense.sum(0), **close)


def parts_in_their_place(mesh: Any) -> None:
    """Groups cut a matrix elsewhere than DTensor cuts a tensor: each part goes to its place."""
    Q = gm.quantize(sample((7, 100), 1).numpy(), bits=4, group_size=16).T
    part, dense = Q.shard(0, mesh), torch.from_numpy(Q.dequantize("float64"))
    for shape in ((7, 3), (2, 7, 3), (7,)):
        x = sample(shape, 2)
        result = part @ distribute_tensor(x, mesh, [Replicate()])
        torch.testing.assert_close(result.full_tensor(), dense @ x, rtol=1e-6, atol=1e-4)
    part, dense = Q.T.shard(1, mesh), dense.T
    for shape in ((3, 7), (2, 3, 7), (7,)):
        x = sample(shape, 3)
        result = distribute_tensor(x, mesh, [Replicate()]) @ part
        torch.testing.assert_close(result.full_tensor(), x @ dense, rtol=1e-6, atol=1e-4)


def refused(mesh: Any) -> None:
    """What is spread over processes, where one process's own is needed, and the other way round."""
    W, x = sample((8, 128), 1), sample((128,), 2)
    part = gm.quantize(W.numpy(), bits=4, group_size=32).shard(0, mesh)
    for plain in (x, x.numpy()):
        with pytest.raises(TypeError, match="Make the other operand one with distribute_tensor"):
            part @ plain
    placed = distribute_tensor(W, mesh, [Shard(0)])
    for ask in (gm.prepare, gm.quantize):
        with pytest.raises(TypeError, match=r"a DTensor.*to_local\(\)"):
            ask(placed)
    with pytest.raises(RuntimeError, match="needs CUDA devices"):
        sharded.Exchange(most_rows=16)
    with pytest.raises(TypeError, match="needed is a PyTorch DeviceMesh"):
        gm.quantize(W.numpy()).shard(0, None)


def the_page_runs() -> None:
    """The examples of docs/distributed.md that need no GPU give what they say."""
    text = (ROOT / "docs" / "distributed.md").read_text("utf-8")
    dense, cut, *_ = re.findall(r"```python\n(.*?)```", text, re.S)
    os.environ["WORLD_SIZE"] = str(WORLD)
    names: dict[str, Any] = {}
    exec(compile(dense + cut, "distributed.md", "exec"), names)
    W, x, Q = (names[name] for name in "WxQ")
    dense_q = torch.from_numpy(Q.dequantize("float32"))
    close = {"rtol": 1e-3, "atol": 1e-2}
    torch.testing.assert_close(names["y"].full_tensor(), W @ x, **close)
    torch.testing.assert_close(names["z"].full_tensor(), dense_q @ x, **close)
    torch.testing.assert_close(names["back"].full_tensor(), dense_q.T @ (dense_q @ x), **close)


def random_quantized(rng: random.Random) -> Any:
    """Return a matrix of odd sizes and groups, at times turned or with a permutation."""
    m, n = rng.choice([1, 2, 5, 16, 33]), rng.choice([1, 2, 7, 16, 33, 100])
    bits, size = rng.choice([4, 8]), rng.choice([None, -1, 7, 8, 16])
    Q = gm.quantize(sample((m, n), rng.randint(0, 10**9)).numpy(), bits=bits, group_size=size)
    if rng.random() < 0.3:
        perm = np.array(rng.sample(range(n), n), np.int32)
        form = {"shape": (m, n), "bits": bits, "group_size": size, "perm": perm}
        Q = gm.QuantizedMatrix.from_parts(Q.codes, Q.scales, Q.zeros, **form)
    return Q.T if rng.random() < 0.4 else Q


def random_shards(rng: random.Random, mesh: Any) -> None:
    """Compare a product of a quantised matrix, whole or cut, with a DTensor; and its gradient."""
    Q, dim = random_quantized(rng), rng.choice([0, 1, None])
    given = Q if dim is None else Q.shard(dim, mesh)
    dense = torch.from_numpy(Q.dequantize("float64"))
    op = rng.choice(["matvec", "vecmat", "Q @ B", "B @ Q"])
    shape = [rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 1]))]
    shape += [Q.shape[op in ("matvec", "Q @ B")], *[rng.choice([1, 3])] * (op == "Q @ B")]
    if op == "Q @ B":
        shape[-2:] = [Q.shape[1], shape[-1]]
    x, weight = sample(shape, rng.randint(0, 10**9)), rng.randint(0, 10**9)
    place = rng.choice([Replicate(), Partial(), *(Shard(i) for i in range(x.ndim))])
    placed = spread(x, mesh, [place])
    told = (op, Q, dim, Q.perm is not None, shape, place, mesh)
    x.requires_grad_()
    placed.requires_grad_()
    product, exact = {
        "matvec": lambda: (gm.matvec(given, placed), (dense @ x[..., None])[..., 0]),
        "vecmat": lambda: (gm.vecmat(placed, given), x @ dense),
        "Q @ B": lambda: (given @ placed, dense @ x),
        "B @ Q": lambda: (placed @ given, x @ dense),
    }[op]()
    assert isinstance(product, DTensor), told
    whole = product.full_tensor()
    close = {"rtol": 1e-5, "atol": 1e-4, "msg": lambda text: f"{told}: {text}"}
    torch.testing.assert_close(whole, exact, **close)
    by = sample(exact.shape, weight)
    (whole * by).sum().backward()
    (exact * by).sum().backward()
    torch.testing.assert_close(placed.grad.full_tensor(), x.grad, **close)


def told_by_all(rank: int) -> None:
    """What fails on one process is raised on all of them, and the next step finds them together."""
    from gemmule.sharded.agree import together

    def step() -> int:
        if rank == 2:
            raise MemoryError("no room for 5 bytes")
        return rank

    kind = MemoryError if rank == 2 else PeerError
    with pytest.raises(kind, match="no room for 5 bytes") as raised:
        together(dist.group.WORLD, "making room", step)
    assert rank == 2 or raised.value.rank == 2
    assert together(dist.group.WORLD, "again", lambda: rank) == tuple(range(WORLD))


def measured(rank: int) -> None:
    """The suite of benches checks every way, and writes what it measured once."""
    from gemmule_lab.distributed import session, ways
    from gemmule_lab.records import distributed

    session.ROUNDS, session.SET_BYTES = 2, {"cpu": 0}
    with tempfile.TemporaryDirectory() as own:
        folder = Path(together_at(own))
        session._measure(torch.device("cpu"), (32,), folder)
        if rank == 0:
            (path,) = folder.iterdir()
            rows = distributed.read(path).rows
            assert [row.way for row in rows][:1] == [ways.ALONE]
            assert {row.way for row in rows} >= {"own rows, all-gather", "DTensor, rows"}
            assert {(row.world, row.transport, row.n) for row in rows} == {(WORLD, "gloo", 32)}
            assert rows[0].over_alone == 1
            assert rows[1].sent_bytes == 8 * 4 * (WORLD - 1)
        dist.barrier()
    wrong = ways.operands(32, torch.float32, torch.device("cpu"), 0)
    wrong.rows[0][0] += 100 * (rank == 1)
    session.operands = lambda *given: wrong
    with pytest.raises(ValueError, match="gave another result than the exact one"):
        session.prepared(32, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="no multiple of 4 processes"):
        session.prepared(33, torch.float32, torch.device("cpu"))


def together_at(own: str) -> str:
    """Return the folder of rank 0."""
    from gemmule.sharded.agree import together

    return str(together(None, "choosing a folder", lambda: own)[0])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
