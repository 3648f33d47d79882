"""One product from host to host, split into its parts, with plain allocations of the driver.

First call: context, compilation and loading; then allocation, copies from pinned and from pageable
memory, the kernel, the copy back, and freeing. Each part is timed by the host clock around work
that is waited for, the median of several rounds; the first call happens once a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import numpy_dtype

ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the way: seconds (the median over rounds), bytes moved, 0 where none are."""

    name: str
    seconds: float
    nbytes: int = 0

    @property
    def gbs(self) -> float | None:
        """10^9 bytes a second, None for parts that move nothing."""
        return self.nbytes / self.seconds * 1e-9 if self.nbytes else None


def split(
    op: str = "matvec",
    shape: tuple[int, int] = (4096, 4096),
    dtype: str = "float32",
    *,
    ordinal: int = 0,
    rounds: int = ROUNDS,
) -> list[Part]:
    """Return the parts of a matvec or of a square matmul over a matrix of `shape`, in order.

    The matrix's bytes are those copied in (for a matmul twice over), the result's those copied out.
    DeviceError without a GPU or where the operands do not fit.
    """
    if op not in ("matvec", "matmul"):
        raise ValueError(f"op is {op!r}; it must be 'matvec' or 'matmul'.")
    rng = np.random.default_rng(0)
    a = rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))
    inner = shape[1]
    b = rng.standard_normal((inner,) if op == "matvec" else (inner, inner), np.float32)
    b = b.astype(numpy_dtype(dtype))
    first = _seconds(lambda: _first_call(op, a, b, ordinal))
    parts = [Part("first call: context, compilation, loading", first)]
    seen: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, seconds in _round(op, a, b, ordinal):
            seen.setdefault(name, []).append(seconds)
    moved_in, moved_out = a.nbytes + b.nbytes, _result_bytes(op, a, b)
    nbytes = {
        "host to device, pageable": moved_in,
        "host to device, pinned": moved_in,
        "device to host, pageable": moved_out,
        "device to host, pinned": moved_out,
    }
    return parts + [
        Part(name, float(np.median(times)), nbytes.get(name, 0)) for name, times in seen.items()
    ]


def _result_bytes(op: str, a: np.ndarray, b: np.ndarray) -> int:
    columns = 1 if op == "matvec" else int(b.shape[1])
    return int(a.shape[0]) * columns * a.itemsize


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _first_call(op: str, a: np.ndarray, b: np.ndarray, ordinal: int) -> None:
    left, right = (DeviceArray.from_host(host, ordinal) for host in (a, b))
    getattr(gm, op)(left, right)
    driver.synchronize(ordinal)


def _round(op: str, a: np.ndarray, b: np.ndarray, ordinal: int) -> Iterator[tuple[str, float]]:
    """Go the whole way once, yielding each part's name and seconds."""
    sizes = (a.nbytes, b.nbytes, _result_bytes(op, a, b))
    start = time.perf_counter()
    places = [driver.allocate(size, ordinal) for size in sizes]
    yield "allocation", time.perf_counter() - start
    try:
        for name, hosts in (("pageable", (a, b)), ("pinned", None)):
            with _source(hosts, a, b) as sources:
                start = time.perf_counter()
                for place, source in zip(places, sources, strict=False):
                    driver.copy(place, source.ctypes.data, source.nbytes, ordinal, 0)
                yield f"host to device, {name}", time.perf_counter() - start
        yield "kernel", _kernel(op, a, b, places, ordinal)
        for name in ("pageable", "pinned"):
            with _target(name, sizes[2]) as target:
                start = time.perf_counter()
                driver.copy(target.ctypes.data, places[2], sizes[2], ordinal, 0)
                yield f"device to host, {name}", time.perf_counter() - start
    finally:
        start = time.perf_counter()
        for place in places:
            driver.free(place, ordinal)
        freed = time.perf_counter() - start
    yield "free", freed


def _kernel(op: str, a: np.ndarray, b: np.ndarray, places: list[int], ordinal: int) -> float:
    """Return the seconds from the planned call until the device is done."""

    def view(place: int, shape: tuple[int, ...]) -> DeviceArray:
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        return DeviceArray(place, shape, strides, a.dtype.name, ordinal, None)

    left, right = view(places[0], a.shape), view(places[1], b.shape)
    out = view(places[2], (a.shape[0],) if op == "matvec" else (a.shape[0], b.shape[1]))
    plan = gm.plan(op, left, right)
    driver.synchronize(ordinal)
    start = time.perf_counter()
    plan(left, right, out=out)
    driver.synchronize(ordinal)
    return time.perf_counter() - start


@contextmanager
def _pinned(nbytes: int) -> Iterator[np.ndarray]:
    """Give page-locked host memory as bytes, for the block."""
    import ctypes

    api = driver.bindings()
    with driver.on_device(0):
        address = int(driver.check(api.cuMemAllocHost(max(nbytes, 1)), "pinning host memory"))
    try:
        yield np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    finally:
        with driver.on_device(0):
            driver.check(api.cuMemFreeHost(address), "unpinning host memory")


@contextmanager
def _source(
    hosts: tuple[np.ndarray, ...] | None, a: np.ndarray, b: np.ndarray
) -> Iterator[list[np.ndarray]]:
    """Give the operands' bytes in ordinary memory, or copied to pinned memory."""
    if hosts is not None:
        yield list(hosts)
        return
    with _pinned(a.nbytes) as first, _pinned(b.nbytes) as second:
        first[:] = a.reshape(-1).view(np.uint8)
        second[:] = b.reshape(-1).view(np.uint8)
        yield [first, second]


@contextmanager
def _target(name: str, nbytes: int) -> Iterator[np.ndarray]:
    """Give host memory to copy a result to, touched before."""
    if name == "pinned":
        with _pinned(nbytes) as memory:
            yield memory
        return
    yield np.ones(nbytes, np.uint8)
