"""Streams, events and page-locked memory of the driver, for copies that run beside kernels.

Methods work on the calling thread's current context, which has to be the device's: copies come by
the thousand, and entering a context costs as much as one of them (`driver.on_device`, `enter`).
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np

from gemmule.backends.cuda import arrays, driver

HOST_MEMORY = 1  # CU_MEMORYTYPE_HOST
EVENT_FLAGS = 1 | 2  # CU_EVENT_BLOCKING_SYNC: who waits leaves its core to others; no timing


def enter(ordinal: int) -> None:
    """Make a device's context the calling thread's own, as long as the thread lives."""
    driver.on_device(ordinal).__enter__()


class Event:
    """A point in a stream that others wait for; recorded anew each time it is used."""

    def __init__(self, ordinal: int) -> None:
        api = driver.bindings()
        with driver.on_device(ordinal):
            self.handle = driver.check(api.cuEventCreate(EVENT_FLAGS), "making an event")
        weakref.finalize(self, _end, "cuEventDestroy", self.handle, ordinal)

    def synchronize(self) -> None:
        """Wait until the work before the last record is done; at once if there was none."""
        driver.check(driver.bindings().cuEventSynchronize(self.handle), "waiting for a copy")


class Stream:
    """Work in an order of its own, which the default stream does not wait for.

    With `handle` 0 the legacy default stream, on which arrays of this package are computed.
    """

    def __init__(self, ordinal: int, handle: Any = None) -> None:
        api = driver.bindings()
        self.handle = handle
        if handle is None:
            with driver.on_device(ordinal):
                flag = api.CUstream_flags.CU_STREAM_NON_BLOCKING
                self.handle = driver.check(api.cuStreamCreate(flag), "making a stream")
            weakref.finalize(self, _end, "cuStreamDestroy", self.handle, ordinal)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes between page-locked host memory and the device, without waiting."""
        if nbytes:
            answer = driver.bindings().cuMemcpyAsync(target, source, nbytes, self.handle)
            driver.check(answer, "copying to or from page-locked memory")

    def copy_lines(self, target: int, source: int, width: int, lines: int, pitch: int) -> None:
        """Copy lines of `width` bytes, on the host `pitch` bytes apart, closed up to the device."""
        api = driver.bindings()
        what = api.CUDA_MEMCPY2D()
        what.srcMemoryType = api.CUmemorytype.CU_MEMORYTYPE_HOST
        what.dstMemoryType = api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        what.srcHost, what.srcPitch = source, pitch
        what.dstDevice, what.dstPitch = target, width
        what.WidthInBytes, what.Height = width, lines
        driver.check(api.cuMemcpy2DAsync(what, self.handle), f"copying {lines:,} lines")

    def record(self, event: Event) -> None:
        """Mark what was given to this stream so far."""
        driver.check(driver.bindings().cuEventRecord(event.handle, self.handle), "recording")

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for an event's last record."""
        answer = driver.bindings().cuStreamWaitEvent(self.handle, event.handle, 0)
        driver.check(answer, "ordering copies")

    def synchronize(self) -> None:
        """Wait until all work of this stream is done."""
        driver.check(driver.bindings().cuStreamSynchronize(self.handle), "waiting for copies")


def is_capturing(ordinal: int) -> bool:
    """Tell whether the caller's work may be going into a graph: then nothing may wait for it."""
    torch: Any = sys.modules.get("torch")
    if (
        torch is not None
        and torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    ):
        return True
    api = driver.bindings()
    with driver.on_device(ordinal):  # the legacy stream refuses while another that it waits for is
        code, status = api.cuStreamIsCapturing(arrays.chosen_stream())
    return int(code) != 0 or int(status) != 0


class PinnedBlock:
    """Page-locked host memory, freed with this object; MemoryError-like DeviceError if refused."""

    def __init__(self, nbytes: int, ordinal: int) -> None:
        api = driver.bindings()
        with driver.on_device(ordinal):
            answer = api.cuMemHostAlloc(nbytes, api.CU_MEMHOSTALLOC_PORTABLE)
            self.pointer = int(driver.check(answer, f"page-locking {nbytes:,} bytes"))
        self.nbytes = nbytes
        weakref.finalize(self, _end, "cuMemFreeHost", self.pointer, ordinal)

    @property
    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The memory as an array; it must not outlive the block."""
        face = {"data": (self.pointer, False), "shape": (self.nbytes,), "typestr": "|u1"}
        return np.asarray(_Face({**face, "version": 3}))


class _Face:
    """What NumPy asks for memory that is not its own."""

    def __init__(self, face: dict[str, Any]) -> None:
        self.__array_interface__ = face


def is_pinned(pointer: int, nbytes: int, ordinal: int) -> bool:
    """Tell whether host memory is page-locked as CUDA knows it, from its first byte to its last."""
    api = driver.bindings()
    key = api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    with driver.on_device(ordinal):
        for address in (pointer, pointer + max(0, nbytes - 1)):
            code, kind = api.cuPointerGetAttribute(key, address)
            if int(code) != 0 or int(kind) != HOST_MEMORY:
                return False
    return True


def _end(call: str, handle: Any, ordinal: int) -> None:
    """Give a handle back; quiet when the context is gone already."""
    try:
        with driver.on_device(ordinal):
            getattr(driver.bindings(), call)(handle)
    except Exception:  # at the end of the process anything may be gone
        return
