"""`gemmule.torch.sharded` with one rank, its kernels emulated and PyTorch's memory on the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from cuemu.toolchain import missing_tools
from emulated_driver import EmulatedDriver, emulated, parameters
from gemmule.errors import DeviceError, PeerError

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed._symmetric_memory")
dist = pytest.importorskip("torch.distributed")
if missing_tools() is not None:
    pytest.skip(str(missing_tools()), allow_module_level=True)

from gemmule.torch import sharded  # noqa: E402


class Driver(EmulatedDriver):
    """One whose blocks are all there at once, as those that wait for others need it."""

    CU_MEMHOSTALLOC_PORTABLE = 1

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        memory = ctypes.create_string_buffer(nbytes + 64)
        self.memory[-len(self.memory)] = (memory, nbytes)
        return self._answer("cuMemHostAlloc", -(-ctypes.addressof(memory) // 64) * 64)

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        return self._answer("cuMemFreeHost")

    def _run(self, function: int, grid: Any, block: Any, cluster: Any, *rest: int) -> None:
        module, name = self.kernels[function - 1]
        smem, params = rest
        args = parameters(module, name, params)
        geometry = {"grid": grid, "block": block, "cluster": cluster, "smem": smem}
        module.launch(name, **geometry, args=args, seed=self.seed, cooperative=True)


class Stream:
    """The current stream, and how often it was made to wait for another."""

    def __init__(self) -> None:
        self.cuda_stream, self.waits = 0, 0

    def wait_stream(self, other: Stream) -> None:
        self.waits += 1


class Handle:
    """What symmetric memory tells of one rank's."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def get_buffer(self, rank: int, shape: Any, dtype: Any) -> Any:
        return self.tensor


INBOXES: list[Any] = []


def left_over(size: int, dtype: Any, device: Any) -> Any:
    """Return memory that still holds words of the first two products of an exchange before."""
    half = size // 2
    words = torch.tensor([(2 << 32) + 7] * half + [(1 << 32) + 7] * (size - half), dtype=dtype)
    INBOXES.append(words)
    return words


@pytest.fixture
def exchange() -> Iterator[sharded.Exchange]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    streams = {"current_stream": mock.Mock(return_value=Stream())}
    streams |= {"synchronize": mock.Mock(), "is_current_stream_capturing": mock.Mock()}
    streams["is_current_stream_capturing"].return_value = False
    streams["device"] = mock.Mock(return_value=contextlib.nullcontext())
    memory = {
        "empty": left_over,
        "rendezvous": lambda tensor, group: Handle(tensor),
    }
    with contextlib.ExitStack() as undo:
        undo.enter_context(emulated(kind=Driver))
        undo.enter_context(mock.patch.dict(os.environ, own))
        undo.enter_context(mock.patch.multiple(torch.cuda, **streams))
        undo.enter_context(mock.patch.multiple(sharded.symmetric, **memory))
        dist.init_process_group("gloo", rank=0, world_size=1)
        undo.callback(dist.destroy_process_group)
        undo.enter_context(mock.patch.object(sharded, "gpu_of", lambda device: device))
        yield sharded.Exchange(100, device=torch.device("cpu"))


def integers(*shape: int, dtype: Any) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def test_products_of_several_matrices_share_an_exchange(exchange: sharded.Exchange) -> None:
    made = []
    for rows, dtype in ((33, torch.float16), (20, torch.float32)):
        A, x = integers(rows, 40, dtype=dtype), integers(40, dtype=dtype)
        made.append((sharded.ShardedMatrix(A, exchange), x, (A.double() @ x.double()).to(dtype)))
    for _ in range(2):
        for W, x, exact in made:
            assert torch.equal(W @ x, exact)
            out = torch.empty_like(exact)
            assert W.matvec(x, out=out) is out
            assert torch.equal(out, exact)
    assert exchange.state[0] == 64 * 8
    W, x, exact = made[0]
    torch.cuda.current_stream.return_value = other = Stream()  # type: ignore[attr-defined]
    assert torch.equal(W @ x, exact)
    assert other.waits == 1, "a product on another stream waits for the one before"


def test_words_left_in_memory_are_no_results(exchange: sharded.Exchange) -> None:
    """They bear the numbers of the first products, so that a late rank would not be seen."""
    assert exchange.most_rows == 100
    assert INBOXES[-1].numel() >= 200
    assert not INBOXES[-1].any()


def test_what_does_not_fit_is_refused(exchange: sharded.Exchange) -> None:
    A = integers(8, 40, dtype=torch.float32)
    W, x = sharded.ShardedMatrix(A, exchange), integers(40, dtype=torch.float32)
    for given, words in ((A.T, "row order"), (A[0], "row order"), (A.to("meta"), "lies on meta")):
        with pytest.raises(ValueError, match=words):
            sharded.ShardedMatrix(given, exchange)
    with pytest.raises(ValueError, match="make it with more"):
        sharded.ShardedMatrix(integers(101, 3, dtype=torch.float32), exchange)
    with pytest.raises(TypeError, match="those that do are streamed_rows, clustered_rows"):
        sharded.ShardedMatrix(A.to(torch.complex64), exchange)
    with pytest.raises(ValueError, match="required are 40"):
        W @ x[:5]
    for out in (torch.empty(9), torch.empty(8, dtype=torch.float64), torch.empty(16)[::2]):
        with pytest.raises(ValueError, match="out has"):
            W.matvec(x, out=out)
    for rows, seconds in ((0, 10.0), (-1, 10.0), (5, 0.0), (5, -1.0), (5, float("nan"))):
        with pytest.raises(ValueError, match="both are positive"):
            sharded.Exchange(rows, device=torch.device("cpu"), timeout_s=seconds)


def test_what_is_no_exchange_is_refused() -> None:
    with pytest.raises(TypeError, match="needed is an Exchange"):
        sharded.ShardedMatrix(integers(8, 40, dtype=torch.float32), None)  # type: ignore[arg-type]


def test_an_exchange_needs_a_gpu() -> None:
    with pytest.raises(DeviceError, match=r"needs CUDA devices.*NCCL; device is cpu"):
        sharded.gpu_of(torch.device("cpu"))
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(DeviceError, match="finds none here"),
    ):
        sharded.gpu_of(None)
    assert sharded.gpu_of(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_a_late_rank_is_a_typed_error(exchange: sharded.Exchange) -> None:
    x = integers(40, dtype=torch.float32)
    W = sharded.ShardedMatrix(integers(8, 40, dtype=torch.float32), exchange)
    exchange.check()
    exchange.alarm.bytes.view("u8")[0] = 5 << 32 | (1 + 3)
    with pytest.raises(PeerError, match="rank 3's results of product 5") as raised:
        W @ x
    assert (raised.value.rank, raised.value.restart) == (3, True)
    with pytest.raises(PeerError):
        exchange.synchronize()
