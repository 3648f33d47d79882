"""A CUDA driver without a GPU: the calls of cuda.bindings.driver that the back end makes.

Device memory is host memory, so copies are real; kernels are not run but noted. Faults are planted
by name: ``driver.faults["cuMemAlloc"] = "CUDA_ERROR_OUT_OF_MEMORY"``.
"""

from __future__ import annotations

import ctypes
import enum
import gc
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from gemmule.backends.cuda import driver, nvrtc, starter
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.plan import resolve

UNASKED = 48 << 10  # bytes of shared memory that a kernel may have without asking
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


class _Names:
    """Any attribute is its own name, as the enumerations of the driver are used."""

    def __getattr__(self, name: str) -> str:
        return name


ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "CLOCK_RATE": 1_980_000,
    "MEMORY_CLOCK_RATE": 3_201_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6016,
    "MULTIPROCESSOR_COUNT": 132,
    "L2_CACHE_SIZE": 60 << 20,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
}


class FakeDriver:
    """Stands for the module cuda.bindings.driver."""

    CUresult = CUresult
    CUdevice_attribute = CUpointer_attribute = CUfunction_attribute = _Names()

    def __init__(self, devices: int = 2, free_bytes: int = 1 << 30) -> None:
        self.devices, self.free_bytes, self.version = devices, free_bytes, 13_000
        self.attributes = dict(ATTRIBUTES)
        self.faults: dict[str, str] = {}
        self.capturing = False
        # (context, grid, block, shared bytes, stream)
        self.launches: list[tuple[Any, ...]] = []
        self.libraries: list[bytes] = []
        self.loaded: set[int] = set()  # kernels whose code is on the device
        self.memory: dict[int, tuple[Any, int]] = {}
        self.contexts: list[int] = []
        self.shared: dict[int, int] = {}  # dynamic bytes that a kernel was allowed
        self.owner: dict[int, int] = {}

    def _answer(self, call: str, *values: Any) -> tuple[Any, ...]:
        fault = self.faults.get(call)
        if fault is not None:
            return (CUresult[fault], *(None for _ in values))
        return (CUresult.CUDA_SUCCESS, *values)

    def CUfunction(self, handle: int) -> int:
        return handle

    CUstream = CUfunction

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._answer("cuInit")

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetCount", self.devices)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        if not 0 <= ordinal < self.devices:
            return (CUresult.CUDA_ERROR_INVALID_DEVICE, None)
        return self._answer("cuDeviceGet", ordinal)

    def cuDeviceGetAttribute(self, key: str, device: int) -> tuple[Any, ...]:
        name = key.removeprefix("CU_DEVICE_ATTRIBUTE_")
        return self._answer("cuDeviceGetAttribute", self.attributes[name])

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetName", b"Fake GPU\0".ljust(length, b"\0"))

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceTotalMem", 80 << 30)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return self._answer("cuDevicePrimaryCtxRetain", 1000 + device)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        result = self._answer("cuCtxPushCurrent")
        if result[0] == 0:
            self.contexts.append(context)
        return result

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return (CUresult.CUDA_SUCCESS, self.contexts.pop())

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return self._answer("cuCtxGetCurrent", self.contexts[-1] if self.contexts else 0)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return self._answer("cuCtxSynchronize")

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return self._answer("cuStreamSynchronize")

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        return self._answer("cuStreamIsCapturing", int(self.capturing))

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._answer("cuDriverGetVersion", self.version)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return self._answer("cuMemGetInfo", self.free_bytes, 80 << 30)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        if nbytes > self.free_bytes:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        result = self._answer("cuMemAlloc", 0)
        if result[0] != 0:
            return result
        block = (ctypes.c_uint8 * (nbytes + 512))()
        address = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address] = (block, nbytes)
        self.owner[address] = self.contexts[-1] - 1000
        self.free_bytes -= nbytes
        return (result[0], address)

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        _, nbytes = self.memory.pop(address)
        self.free_bytes += nbytes
        return self._answer("cuMemFree")

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        result = self._answer("cuMemcpyAsync")
        owners = {self._owner_of(target, None), self._owner_of(source, None)} - {None}
        assert owners <= {self.contexts[-1] - 1000}, f"memory of {owners} is copied"
        if result[0] == 0:
            ctypes.memmove(target, source, nbytes)
        return result

    def cuPointerGetAttribute(self, key: str, address: int) -> tuple[Any, ...]:
        return self._answer("cuPointerGetAttribute", self._owner_of(address, 0))

    def _owner_of(self, address: int, unknown: int | None) -> int | None:
        """Return the device whose memory this is."""
        around = (at for at, (_, size) in self.memory.items() if at <= address < at + size)
        return self.owner.get(next(around, 0), unknown)

    def cuLibraryLoadData(self, cubin: bytes, *_: Any) -> tuple[Any, ...]:
        self.libraries.append(cubin)
        return self._answer("cuLibraryLoadData", len(self.libraries))

    def cuLibraryGetKernel(self, library: int, symbol: bytes) -> tuple[Any, ...]:
        return self._answer("cuLibraryGetKernel", library)

    def cuKernelSetAttribute(self, key: str, nbytes: int, kernel: int, _: Any) -> tuple[Any, ...]:
        self.shared[kernel] = nbytes
        return self._answer("cuKernelSetAttribute")

    def cuKernelGetFunction(self, kernel: int) -> tuple[Any, ...]:
        return self._answer("cuKernelGetFunction", kernel)

    def cuFuncLoad(self, function: int) -> tuple[Any, ...]:
        self.loaded.add(function)
        return self._answer("cuFuncLoad")

    def launch(self, config: int, function: int, params: int, extra: None) -> int:
        """Stand for what the back end calls by ctypes: note a launch, with its struct at hand."""
        assert function in self.loaded, "its code would be loaded by the launch, which waits"
        numbers = struct.unpack("<7I4xQQI", ctypes.string_at(config, 52))
        attributes = [
            struct.unpack("<I4x3I", ctypes.string_at(numbers[8] + 72 * i, 20))
            for i in range(numbers[9])
        ]
        (code,) = self._answer("cuLaunchKernel")
        if code == 0:
            cluster = next((one[1:] for one in attributes if one[0] == CLUSTER), (1, 1, 1))
            context = self.contexts[-1] if self.contexts else 0
            allowed = self.shared.get(function, UNASKED)
            assert numbers[6] <= allowed, f"{numbers[6]} bytes of shared memory for {allowed}"
            self.launched(function, params, numbers[:3], numbers[3:6], cluster, numbers[6])
            self.launches.append((context, numbers[:3], numbers[3:6], *numbers[6:8]))
        return int(code)

    def launched(
        self,
        function: int,
        params: int,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        cluster: tuple[int, ...],
        smem: int,
    ) -> None:
        """Do what a kernel does: here nothing."""


CACHED = (
    driver.bindings,
    driver._remember_process,
    driver.device_info,
    driver.version,
    driver._primary_context,
    driver._primary_handle,
    driver.load,
    cuda_launch._machine,
    resolve,
)


def forget() -> None:
    """Drop whatever the back end remembers of a driver."""
    for function in CACHED:
        function.cache_clear()


@contextmanager
def driver_of(stand_in: Any) -> Iterator[Any]:
    """Put a driver in the place of NVIDIA's for a while."""
    nvrtc.cuda_core()  # which takes the real driver's types when it is first imported
    with (
        mock.patch.object(sys.modules["cuda.bindings"], "driver", stand_in),
        mock.patch.object(starter, "launch_function", return_value=stand_in.launch),
    ):
        forget()
        try:
            yield stand_in
            gc.collect()  # arrays give their memory back to the driver they came from
        finally:
            forget()
