"""Matvecs over several GPUs of one host (or of one NVLink domain), without a collective.

The rows of a matrix are shared out to the ranks of a process group, one process a GPU. Each block
of the kernel writes its results straight into the memory of every peer, and the kernel ends when
the whole result is here: one launch on each rank, which may be captured in a CUDA graph. Memory is
PyTorch's symmetric memory; NVLink multicast is never used.

    torch.distributed.init_process_group("nccl", device_id=device)
    exchange = Exchange(most_rows=16384)        # every rank calls it
    W = ShardedMatrix(my_rows, exchange)        # every rank, with its own rows in rank order
    y = W @ x                                   # every rank, with the same x: the whole product
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from gemmule import backends
from gemmule.arrays.interop import quantized_form
from gemmule.backends.cuda.launch_args import addresses_of
from gemmule.backends.cuda.streams import PinnedBlock
from gemmule.core.operand import Form, alignment_of
from gemmule.errors import DeviceError, PeerError
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.sharded.agree import together
from gemmule.sharded.product import PeerProduct
from gemmule.sharded.rows import STATE_BYTES, WORD_BYTES, Rows, Seat, half_words


class Exchange:
    """The memory through which the GPUs of a process group hand results to each other.

    Every rank of `group` (default: all) makes one at the same time, with the same `most_rows`, the
    most rows of a result; 64 bytes each. `device`: this rank's GPU, by default the current one. A
    rank that waits longer than `timeout_s` for another's results gives up: the missing numbers are
    NaN (-1 for integers), and the next call, or `check`, raises PeerError, which names the rank.

    Any number of matrices may share an exchange. Its products follow one another: all ranks call
    them in the same order, from one thread, and one stream at a time: on another stream a product
    waits for the one before, except under graph capture. Streams that work at the same time need an
    exchange each. Captured products replay in any number, as long as all ranks replay the same.

    Raises PeerError where a rank cannot make it (out of memory, GPUs that cannot reach each other),
    DeviceError on a rank that has no CUDA device.
    """

    def __init__(
        self,
        most_rows: int,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        if most_rows < 1 or not timeout_s > 0:
            raise ValueError(
                f"most_rows is {most_rows} and timeout_s {timeout_s}; both are positive."
            )
        self.group: Any = dist.group.WORLD if group is None else group
        self.device = together(self.group, "finding a GPU", lambda: gpu_of(device))[self.rank]
        self.ordinal = self.device.index or 0
        self.most_rows, self.timeout_s = most_rows, timeout_s
        self._stream: torch.cuda.Stream | None = None
        together(self.group, "making room for results", self._make)
        self.seat = together(self.group, "reaching the memory of peers", self._meet)[self.rank]

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return int(dist.get_rank(self.group))

    def _make(self) -> None:
        half = half_words(self.most_rows, dist.get_world_size(self.group))
        with torch.cuda.device(self.device):
            self._inbox = symmetric.empty(2 * half, dtype=torch.int64, device=self.device)
            self._inbox.zero_()
            self.state = torch.zeros(STATE_BYTES // 8, dtype=torch.int64, device=self.device)
            self.alarm = PinnedBlock(WORD_BYTES, self.ordinal)
            self.alarm.bytes[:] = 0
            torch.cuda.synchronize(self.device)

    def _meet(self) -> Seat:
        half, world = self._inbox.numel() // 2, dist.get_world_size(self.group)
        self._handle = symmetric.rendezvous(self._inbox, self.group)
        seen = [
            self._handle.get_buffer(rank, (2 * half,), torch.int64).data_ptr()
            for rank in range(world)
        ]
        if seen[self.rank] != self._inbox.data_ptr():
            raise RuntimeError("PyTorch's symmetric memory shows another address for this rank's")
        places = (self.state.data_ptr(), self.alarm.pointer)
        return Seat(self.rank, tuple(seen), *places, half, self.timeout_s)

    def check(self) -> None:
        """Raise PeerError if a product that has ended by now did not get all its results."""
        alarm = int(self.alarm.bytes.view(np.uint64)[0])
        if not alarm:
            return
        number, late = alarm >> 32, (alarm & 0xFFFFFFFF) - 1
        raise PeerError(
            f"rank {self.rank} waited {self.timeout_s:g} s for rank {late}'s results of product "
            f"{number}, and they did not come: that rank has died, hangs, or makes other products. "
            "What is missing is NaN. Start the processes again, or give Exchange more timeout_s.",
            rank=late,
            restart=True,
        )

    def synchronize(self) -> None:
        """Wait for all work of this rank's GPU; PeerError if a product did not get its results."""
        torch.cuda.synchronize(self.device)
        self.check()

    def _ordered(self) -> int:
        """Return the current stream, which waits for the stream of the product before."""
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            return int(stream.cuda_stream)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        return int(stream.cuda_stream)


def gpu_of(device: torch.device | None) -> torch.device:
    """Return a rank's GPU, by default the current one; DeviceError where there is none."""
    if device is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if device is None or device.type != "cuda":
        given = "PyTorch finds none here" if device is None else f"device is {device}"
        raise DeviceError(
            f"an Exchange needs CUDA devices, one a rank, in a process group of NCCL; {given}. On "
            "CPUs multiply DTensors by gemmule.matvec."
        )
    return device


class ShardedMatrix:
    """A matrix whose rows are shared out to the ranks of an exchange, in the order of the ranks.

    local: this rank's rows (r, n), a CUDA tensor in row order with n the same everywhere, r as it
    likes and 0 too; or a quantised matrix on the GPU, in layout ``mma16`` (`QuantizedMatrix.shard`
    cuts one). Every rank makes it at the same time. The rows are not copied. `x_dtype`: that of the
    vectors, by default the matrix's own, float16 beside a quantised one.

    Raises ValueError for another shape or order, TypeError for dtypes that no kernel takes; where
    one rank fails, PeerError on all of them.
    """

    def __init__(
        self,
        local: torch.Tensor | QuantizedMatrix,
        exchange: Exchange,
        *,
        x_dtype: torch.dtype | None = None,
        rung: str | None = None,
    ) -> None:
        if not isinstance(exchange, Exchange):
            raise TypeError(
                f"exchange is a {type(exchange).__name__}; needed is an Exchange, which every rank "
                "makes once: Exchange(most_rows=...)."
            )
        self.local, self.exchange, self._rung = local, exchange, rung
        self._products: dict[tuple[torch.dtype, int], PeerProduct] = {}
        told = together(exchange.group, "sharing out a matrix", self._facts)
        self.rows = Rows(tuple(count for count, _, _ in told))
        if len({(n, kind) for _, n, kind in told}) > 1:
            raise ValueError(
                f"the ranks' rows differ in columns or dtype: {[fact[1:] for fact in told]}; "
                "all must have the same."
            )
        if self.rows.total > exchange.most_rows:
            raise ValueError(
                f"the matrix has {self.rows.total} rows and the exchange takes "
                f"{exchange.most_rows}; make it with more."
            )
        self.shape = (self.rows.total, told[0][1])
        default = torch.float16 if isinstance(local, QuantizedMatrix) else local.dtype
        together(exchange.group, "preparing a product", lambda: self._ready(x_dtype or default))

    def _ready(self, dtype: torch.dtype) -> None:
        """Build the kernel for aligned vectors, so that no rank waits for another's compiler."""
        self._product(dtype, 16).load(self.exchange.ordinal)

    def _facts(self) -> tuple[int, int, str]:
        local = self.local
        if isinstance(local, QuantizedMatrix):
            return (*local.shape, f"int{local.bits} in groups of {local.group_size}")
        if local.ndim != 2 or (local.stride(1) != 1 and local.shape[1] > 1):
            raise ValueError(
                f"a shard has shape {tuple(local.shape)} and strides {local.stride()}; required "
                "are rows of a 2-D tensor in row order. Call .contiguous() first."
            )
        if local.device != self.exchange.device:
            raise ValueError(
                f"a shard lies on {local.device}, its exchange on {self.exchange.device}."
            )
        return (*local.shape, str(local.dtype))

    def _form(self) -> Form:
        local = self.local
        if isinstance(local, QuantizedMatrix):
            return local.kept(quantized_form)
        alignment = alignment_of(local.data_ptr())
        dtype = str(local.dtype).removeprefix("torch.")
        return Form(tuple(local.shape), tuple(local.stride()), dtype, alignment)

    def _product(self, dtype: torch.dtype, alignment: int) -> PeerProduct:
        found = self._products.get((dtype, alignment))
        if found is None:
            name = str(dtype).removeprefix("torch.")
            vector = Form((self.shape[1],), (1,), name, alignment)
            machine = backends.get("cuda").machine(f"cuda:{self.exchange.ordinal}")
            found = PeerProduct(
                self._form(), vector, self.rows, self.exchange.seat, machine, self._rung
            )
            self._products[dtype, alignment] = found
        return found

    def matvec(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``A x``, whole, on every rank: x (n,) is the same on all of them.

        It runs on the current stream and nothing waits for it on the host. `out`, if given, is
        contiguous, of the result's shape and dtype. Not differentiable. Raises PeerError where a
        product before this one is known to have failed.
        """
        exchange = self.exchange
        exchange.check()
        if x.shape != self.shape[1:] or x.device != exchange.device or not x.is_contiguous():
            raise ValueError(
                f"x has shape {tuple(x.shape)} on {x.device}; required are {self.shape[1]} "
                f"neighbouring numbers on {exchange.device}."
            )
        product = self._product(x.dtype, alignment_of(x.data_ptr()))
        dtype = getattr(torch, product.dtype)
        if out is None:
            out = torch.empty(self.shape[0], dtype=dtype, device=x.device)
        elif (out.shape, out.dtype, out.device) != (self.shape[:1], dtype, x.device):
            raise ValueError(
                f"out has shape {tuple(out.shape)} and dtype {out.dtype} on {out.device}; "
                f"required are {self.shape[0]} numbers of {dtype} on {x.device}."
            )
        elif not out.is_contiguous():
            raise ValueError(f"out has strides {out.stride()}; its numbers must be neighbours.")
        local = self.local
        left = addresses_of(local) if isinstance(local, QuantizedMatrix) else (local.data_ptr(),)
        operands = (*left, x.data_ptr())
        stream = exchange._ordered()
        product.start(operands, out.data_ptr(), exchange.ordinal, stream)
        return out

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``self.matvec(x)``."""
        return self.matvec(x)
