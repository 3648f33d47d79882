"""An emulated GPU that works as late as it may, in any order that its streams and events allow.

Copies and kernels wait in the queues of their streams until somebody waits for them. Then steps of
streams are taken by chance, each when it may run. What a program forgot to order comes out wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from emulated_driver import EmulatedDriver, emulated
from fake_driver import CUresult, _Names

Work = Callable[[], None]


class LateDriver(EmulatedDriver):
    """`EmulatedDriver` with streams, events and page-locked memory."""

    CUevent_flags = CUstream_flags = CUmemorytype = _Names()
    CU_MEMHOSTALLOC_PORTABLE = 1

    def __init__(self, seed: int = 0) -> None:
        self.lock, self.local = threading.RLock(), threading.local()
        super().__init__(seed)
        self.random = random.Random(seed)
        self.queues: dict[int, deque[tuple[str, Any]]] = {0: deque()}
        self.recorded: dict[int, int] = {}  # event -> records given, and records reached
        self.reached: dict[int, int] = {}
        self.pinned: dict[int, tuple[Any, int]] = {}
        self.most_bytes = self.taken = 0

    @property
    def contexts(self) -> list[int]:
        """The context stack of the calling thread."""
        if not hasattr(self.local, "contexts"):
            self.local.contexts = []
        return self.local.contexts  # type: ignore[no-any-return]

    @contexts.setter
    def contexts(self, value: list[int]) -> None:
        self.local.contexts = value

    def CUDA_MEMCPY2D(self) -> SimpleNamespace:
        return SimpleNamespace()

    def _give(self, stream: int, kind: str, what: Any) -> None:
        with self.lock:
            self.queues[int(stream)].append((kind, what))

    def _step(self, wanted: Callable[[], bool]) -> None:
        """Do work until `wanted` holds: of one stream as far as it gets, else by chance."""
        with self.lock:
            favourite = self.random.choice(list(self.queues.values()))
            while not wanted():
                ready = [q for q in self.queues.values() if q and self._may_run(q[0])]
                assert ready, "the streams wait for each other, or for what was never given"
                ahead = favourite and self._may_run(favourite[0])
                queue = favourite if ahead else self.random.choice(ready)
                kind, what = queue.popleft()
                if kind == "run":
                    what()
                elif kind == "record":
                    event, number = what
                    self.reached[event] = max(self.reached[event], number)

    def _may_run(self, item: tuple[str, Any]) -> bool:
        kind, what = item
        return kind != "wait" or self.reached[what[0]] >= what[1]

    def cuStreamCreate(self, flags: str) -> tuple[Any, ...]:
        with self.lock:
            number = max(self.queues) + 1
            self.queues[number] = deque()
        return self._answer("cuStreamCreate", number)

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        self._step(lambda: not self.queues[stream])
        del self.queues[stream]
        return self._answer("cuStreamDestroy")

    def cuEventCreate(self, flags: str) -> tuple[Any, ...]:
        with self.lock:
            event = len(self.recorded) + 1
            self.recorded[event] = self.reached[event] = 0
        return self._answer("cuEventCreate", event)

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        return self._answer("cuEventDestroy")

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        with self.lock:
            self.recorded[event] += 1
            self._give(stream, "record", (event, self.recorded[event]))
        return self._answer("cuEventRecord")

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        self._give(stream, "wait", (event, self.recorded[event]))
        return self._answer("cuStreamWaitEvent")

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        number = self.recorded[event]
        self._step(lambda: self.reached[event] >= number)
        return self._answer("cuEventSynchronize")

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        self._step(lambda: not self.queues[int(stream)])
        return self._answer("cuStreamSynchronize")

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        self._step(lambda: not any(self.queues.values()))
        return self._answer("cuCtxSynchronize")

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        block = (ctypes.c_uint8 * (nbytes + 64))()
        address = -(-ctypes.addressof(block) // 64) * 64
        self.pinned[address] = (block, nbytes)
        return self._answer("cuMemHostAlloc", address)

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        self.cuCtxSynchronize()
        del self.pinned[address]
        return self._answer("cuMemFreeHost")

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        self.cuCtxSynchronize()
        with self.lock:
            result = super().cuMemAlloc(nbytes)
            if result[0] == 0:
                ctypes.memset(result[1], 0xFF, nbytes)  # NaN, where nothing was written
                self.taken += nbytes
                self.most_bytes = max(self.most_bytes, self.taken)
        return result

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        self.cuCtxSynchronize()
        with self.lock:
            self.taken -= self.memory[address][1]
            return super().cuMemFree(address)

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        result = self._answer("cuMemcpyAsync")
        if result[0] == 0:
            self._give(stream, "run", lambda: ctypes.memmove(target, source, nbytes))
        return result

    def cuMemcpy2DAsync(self, what: Any, stream: int) -> tuple[Any, ...]:
        def copy() -> None:
            for line in range(what.Height):
                ctypes.memmove(
                    what.dstDevice + line * what.dstPitch,
                    what.srcHost + line * what.srcPitch,
                    what.WidthInBytes,
                )

        self._give(stream, "run", copy)
        return self._answer("cuMemcpy2DAsync")

    def cuPointerGetAttribute(self, key: str, address: int) -> tuple[Any, ...]:
        if not key.endswith("MEMORY_TYPE"):
            return super().cuPointerGetAttribute(key, address)
        held = any(start <= address < start + n for start, (_, n) in self.pinned.items())
        return (CUresult.CUDA_SUCCESS, 1) if held else (CUresult.CUDA_ERROR_NO_DEVICE, None)

    def start(self, kernel: Work) -> None:
        """Leave a launched kernel to the queue of the default stream."""
        self._give(0, "run", kernel)


@contextlib.contextmanager
def late(seed: int = 0) -> Iterator[LateDriver]:
    """Give the CUDA back end one late device; undone afterwards."""
    with emulated(seed, LateDriver) as driver:
        assert isinstance(driver, LateDriver)
        yield driver
