"""Matvecs over several GPUs: two ranks of one GPU on two streams, and two GPUs where there are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed._symmetric_memory")

import torch.distributed as dist  # noqa: E402

from gemmule import backends  # noqa: E402
from gemmule.backends.cuda.streams import PinnedBlock  # noqa: E402
from gemmule.core.operand import Form  # noqa: E402
from gemmule.errors import PeerError  # noqa: E402
from gemmule.sharded.product import PeerProduct  # noqa: E402
from gemmule.sharded.rows import STATE_BYTES, WORD_BYTES, Rows, Seat, half_words  # noqa: E402

DTYPES = ("float16", "bfloat16", "float32", "float64")


def integers(*shape: int, dtype: str, seed: int = 0) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    whole = torch.randint(-1, 2, shape, generator=generator, device="cuda")
    return whole.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(700, 1300), (5, 0), (1, 64, 128)])
def test_ranks_on_streams_of_one_gpu(counts: tuple[int, ...], dtype: str) -> None:
    """Each rank's grid waits for those of the others, so they have to run side by side."""
    rows, n, machine = Rows(counts), 520, backends.get("cuda").machine("cuda:0")
    half, world = half_words(rows.total, len(counts)), len(counts)
    boxes = [torch.zeros(2 * half, dtype=torch.int64, device="cuda") for _ in counts]
    states = [torch.zeros(STATE_BYTES // 8, dtype=torch.int64, device="cuda") for _ in counts]
    alarms, streams = [PinnedBlock(WORD_BYTES, 0) for _ in counts], []
    A, x = integers(rows.total, n, dtype=dtype), integers(n, dtype=dtype, seed=1)
    exact = (A.double() @ x.double()).to(A.dtype)
    products, outs = [], [torch.zeros_like(exact) for _ in counts]
    for rank, count in enumerate(counts):
        alarms[rank].bytes[:] = 0
        places = tuple(box.data_ptr() for box in boxes)
        seat = Seat(rank, places, states[rank].data_ptr(), alarms[rank].pointer, half, 5.0)
        form, vector = Form((count, n), (n, 1), dtype, 16), Form.packed((n,), dtype)
        products.append(PeerProduct(form, vector, rows, seat, machine))
        products[-1].load(0)
        streams.append(torch.cuda.Stream())
    torch.cuda.synchronize()
    for number in range(20):
        for rank in sorted(range(world), key=lambda rank: (rank * 7 + number) % 5):
            first = rows.first(rank)
            own = A.data_ptr() + first * n * A.itemsize
            places = (own, x.data_ptr())
            products[rank].start(places, outs[rank].data_ptr(), 0, streams[rank].cuda_stream)
    torch.cuda.synchronize()
    for rank in range(world):
        assert not alarms[rank].bytes.any()
        assert torch.equal(outs[rank], exact)
        assert states[rank].tolist() == [64 * 20, 0]


def two_gpus(rank: int) -> None:
    """Be one process of two: products, a graph, and the other's end."""
    from gemmule.torch.sharded import Exchange, ShardedMatrix

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    exchange = Exchange(4096, timeout_s=3)
    for dtype in DTYPES:
        A, x = integers(4096, 2048, dtype=dtype), integers(2048, dtype=dtype, seed=1)
        exact = (A.double() @ x.double()).to(A.dtype)
        W = ShardedMatrix(A[:1000] if rank == 0 else A[1000:], exchange)
        for _ in range(50):
            assert torch.equal(W @ x, exact)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [W @ x for _ in range(3)]
        for _ in range(50):
            graph.replay()
        exchange.synchronize()
        assert all(torch.equal(result, exact) for result in results)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    W @ x
    with pytest.raises(PeerError, match="rank 1's results"):
        exchange.synchronize()
    assert time.monotonic() < begin + 30
    os._exit(0)  # what would end the group waits for the other


def test_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": "29541", "NCCL_NVLS_ENABLE": "0"}
        own["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        command = [sys.executable, str(Path(__file__)), str(rank)]
        ranks.append(subprocess.Popen(command, env=os.environ | own))
    codes = [process.wait(120) for process in ranks]
    assert codes == [0, -signal.SIGKILL]


if __name__ == "__main__":
    two_gpus(int(sys.argv[1]))
