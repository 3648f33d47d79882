"""The thin layer over the CUDA driver: devices, contexts, kernels, launches, typed errors.

Everything goes through cuda.bindings. Contexts are the devices' primary ones, which PyTorch, CuPy
and JAX share; kernels are loaded as libraries, which are context-independent, so one handle serves
every device of an architecture.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gemmule.backends.cuda import nvrtc
from gemmule.core import architectures
from gemmule.errors import INSTALL, DeviceError
from gemmule.settings import stand_in

# Errors after which the context is lost: the driver answers every later call with the same code.
_LOST = (
    "ILLEGAL_ADDRESS LAUNCH_FAILED ILLEGAL_INSTRUCTION MISALIGNED_ADDRESS INVALID_ADDRESS_SPACE "
    "INVALID_PC HARDWARE_STACK_ERROR ASSERT LAUNCH_TIMEOUT ECC_UNCORRECTABLE CONTEXT_IS_DESTROYED "
    "UNKNOWN"
)
STICKY = frozenset(f"CUDA_ERROR_{name}" for name in _LOST.split())


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What is fixed about one device. arch: what kernels are compiled for (`architectures`)."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    shared_bytes: int
    memory_bytes: int
    datasheet_bytes_per_s: float
    arch: str
    clock_hz: float = 0.0


@functools.cache
def bindings() -> Any:
    """Return cuda.bindings.driver after a successful cuInit; DeviceError says what is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"CUDA operands need cuda-bindings, which is not installed ({error}). "
            f"Install it: {INSTALL['cuda13']}. The CPU back end works without."
        ) from None
    try:
        (code,) = driver.cuInit(0)
    except Exception as error:
        raise DeviceError(
            f"no NVIDIA driver was found ({error}). Install the driver on a machine with an NVIDIA "
            "GPU, or use host arrays: the CPU back end works without."
        ) from None
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(
            f"the NVIDIA driver did not start: {code.name}. Is there a GPU, and is it visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})? "
            "The CPU back end works without."
        )
    _remember_process()
    return driver


@functools.cache
def _remember_process() -> int:
    return os.getpid()


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Return the values of a driver call's result tuple, or raise DeviceError."""
    code = result[0]
    if int(code) == 0:
        return result[1] if len(result) == 2 else result[1:]
    raise error_of(code, doing)


def error_of(code: Any, doing: str) -> DeviceError:
    """Return the typed error of a CUresult."""
    name = getattr(code, "name", str(code))
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return DeviceError(f"{doing}: out of GPU memory{_free_memory()}. Free some and try again.")
    if name in STICKY:
        return DeviceError(
            f"{doing}: the GPU context is lost ({name}), so every CUDA call of this process will "
            "fail from now on. Restart the process.",
            restart=True,
        )
    if name == "CUDA_ERROR_NO_BINARY_FOR_GPU":
        return DeviceError(f"{doing}: the kernel was built for another architecture ({name}).")
    return DeviceError(f"{doing}: the CUDA driver answered {name}.")


def _free_memory() -> str:
    driver = bindings()
    code, *rest = driver.cuMemGetInfo()
    return f" ({rest[0]:,} of {rest[1]:,} bytes are free)" if int(code) == 0 else ""


def memory_bytes(ordinal: int) -> tuple[int, int]:
    """Return a device's free and total memory in bytes."""
    with on_device(ordinal):
        free_bytes, total = check(
            bindings().cuMemGetInfo(), f"asking cuda:{ordinal} for its memory"
        )
    return int(free_bytes), int(total)


def device_count() -> int:
    """Return how many CUDA devices there are; DeviceError without a driver."""
    return int(check(bindings().cuDeviceGetCount(), "counting the CUDA devices"))


@functools.cache
def version() -> int:
    """Return the newest CUDA version that the driver supports: 13000 is 13.0."""
    return int(check(bindings().cuDriverGetVersion(), "asking for the driver's version"))


@functools.cache
def device_info(ordinal: int) -> DeviceInfo:
    """Return a device's fixed properties; DeviceError if it is absent or too old.

    With ``GEMMULE_ARCH`` those of an older chip for which it stands in, under a name that says so.
    """
    driver = bindings()
    count = device_count()
    if not 0 <= ordinal < count:
        raise DeviceError(f"cuda:{ordinal} was asked for, but there are {count} CUDA devices.")
    handle = check(driver.cuDeviceGet(ordinal), f"opening cuda:{ordinal}")
    attribute = driver.CUdevice_attribute

    def get(name: str) -> int:
        key = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(key, handle), f"reading {name}"))

    name = check(driver.cuDeviceGetName(256, handle), "reading the device's name")
    capability = (get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR"))
    text = name.split(b"\0")[0].decode()
    own = 10 * capability[0] + capability[1]
    if own < architectures.OLDEST:
        raise DeviceError(
            f"cuda:{ordinal} ({text}) has compute capability {capability[0]}.{capability[1]}; "
            "7.5 or newer is required. Use another device, or host arrays."
        )
    clock_hz, bus_bits = get("MEMORY_CLOCK_RATE") * 1000, get("GLOBAL_MEMORY_BUS_WIDTH")
    info = DeviceInfo(
        ordinal,
        text,
        capability,
        get("MULTIPROCESSOR_COUNT"),
        get("L2_CACHE_SIZE"),
        get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        int(check(driver.cuDeviceTotalMem(handle), "reading the memory size")),
        2.0 * clock_hz * bus_bits / 8,
        architectures.target(own, nvrtc.known_architectures()),
        1000.0 * get("CLOCK_RATE"),
    )
    return _standing_in(info, own)


def _standing_in(info: DeviceInfo, own: int) -> DeviceInfo:
    """Return a device as the older chip that ``GEMMULE_ARCH`` names; its own code is PTX there."""
    named = stand_in()
    if named is None or architectures.number(named) == own:
        return info
    older = [one for one in architectures.SHARED_BYTES if one < own]
    other = architectures.number(named)
    if other not in older:
        names = ", ".join(f"sm_{one}" for one in older) or "nothing"
        raise ValueError(
            f"GEMMULE_ARCH is {named}, and {info.name} (sm_{own}) can stand in for {names}. "
            "Name one of those, or unset it."
        )
    return replace(
        info,
        name=f"{info.name} as {named}",
        arch=f"compute_{other}",
        shared_bytes=min(info.shared_bytes, architectures.SHARED_BYTES[other]),
    )


@functools.cache
def _primary_context(ordinal: int) -> Any:
    driver = bindings()
    handle = check(driver.cuDeviceGet(ordinal), f"opening cuda:{ordinal}")
    return check(driver.cuDevicePrimaryCtxRetain(handle), f"opening the context of cuda:{ordinal}")


@contextmanager
def on_device(ordinal: int) -> Iterator[None]:
    """Make a device's primary context current for the block, and the former one again after it."""
    if _remember_process() != os.getpid():
        raise DeviceError(
            "this process was forked after CUDA had started, and CUDA does not survive a fork. "
            "Start workers with multiprocessing's 'spawn' method."
        )
    driver = bindings()
    check(driver.cuCtxPushCurrent(_primary_context(ordinal)), f"entering cuda:{ordinal}")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


def is_current(ordinal: int) -> bool:
    """Tell whether the device's primary context is this thread's current one."""
    _, context = bindings().cuCtxGetCurrent()
    return int(context) == _primary_handle(ordinal)


@functools.cache
def _primary_handle(ordinal: int) -> int:
    return int(_primary_context(ordinal))


_loading = threading.Lock()


@functools.lru_cache(maxsize=2048)
def load(cubin: bytes, symbol: str, ordinal: int, smem: int) -> Any:
    """Load a cubin and return the kernel's handle, with `smem` bytes of dynamic memory allowed.

    The code is on the device then. Left to the first launch, loading it waits for what runs there,
    which may be a kernel that waits for results of that very launch.
    """
    driver = bindings()
    with _loading, on_device(ordinal):
        library = check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), f"loading {symbol}")
        kernel = check(driver.cuLibraryGetKernel(library, symbol.encode()), f"finding {symbol}")
        if smem > 32 * 1024:  # static memory counts towards the 48 KiB that need no asking
            handle = check(driver.cuDeviceGet(ordinal), f"opening cuda:{ordinal}")
            key = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(
                driver.cuKernelSetAttribute(key, smem, kernel, handle),
                f"asking for {smem:,} bytes of shared memory for {symbol}",
            )
        function = check(driver.cuKernelGetFunction(kernel), f"entering {symbol}")
        check(driver.cuFuncLoad(function), f"loading {symbol} on cuda:{ordinal}")
    return kernel


_keepers: list[Callable[[int], None]] = []


def when_short(let_go: Callable[[int], None]) -> None:
    """Have ``let_go(ordinal)`` free what is kept for later, wherever a device has no room left."""
    _keepers.append(let_go)


def allocate(nbytes: int, ordinal: int) -> int:
    """Return the address of `nbytes` new bytes on a device; DeviceError when they do not fit."""
    driver = bindings()
    with on_device(ordinal):
        code, pointer = driver.cuMemAlloc(max(nbytes, 1))
        if code.name == "CUDA_ERROR_OUT_OF_MEMORY" and _keepers:
            for let_go in _keepers:
                let_go(ordinal)
            code, pointer = driver.cuMemAlloc(max(nbytes, 1))
        if code.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise DeviceError(
                f"cuda:{ordinal} has no room for {nbytes:,} bytes{_free_memory()}. "
                "Free some memory or use a smaller problem."
            )
        return int(check((code, pointer), f"allocating {nbytes:,} bytes on cuda:{ordinal}"))


def free(pointer: int, ordinal: int) -> None:
    """Give back what `allocate` returned; quiet when the context is gone already."""
    driver = bindings()
    try:
        with on_device(ordinal):
            driver.cuMemFree(pointer)
    except DeviceError:
        pass


def copy(target: int, source: int, nbytes: int, ordinal: int, stream: int) -> None:
    """Copy bytes between host and device or within a device, in stream order, and wait."""
    driver = bindings()
    if nbytes == 0:
        return
    with on_device(ordinal):
        check(driver.cuMemcpyAsync(target, source, nbytes, stream), f"copying {nbytes:,} bytes")
        check(driver.cuStreamSynchronize(stream), "waiting for a copy")


def wait(stream: int, ordinal: int) -> None:
    """Wait until the work that a stream has is done; DeviceError if any of it failed."""
    with on_device(ordinal):
        check(bindings().cuStreamSynchronize(stream), f"waiting for a stream of cuda:{ordinal}")


def synchronize(ordinal: int) -> None:
    """Wait until the device has done all work of this process; DeviceError if any of it failed."""
    driver = bindings()
    with on_device(ordinal):
        check(driver.cuCtxSynchronize(), f"waiting for cuda:{ordinal}")
