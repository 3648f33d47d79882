"""Products on a GPU from host arrays to host array, split into parts, with raw allocations.

The kernel's part lies between two events and holds a few microseconds of launching; every other
part is host time around work that is waited for. The first call (context, compilation and loading)
happens once a process.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import numpy_dtype
from gemmule.storage import lines
from gemmule_lab.records import log
from gemmule_lab.report.render import print_table
from gemmule_lab.report.tables import Column, TableData, significant, table_of

PINNED = ", pinned"
PAGEABLE = ", pageable"  # what is said of a copy where there is a pinned one beside it
ROUNDS = 7
SIDES = (64, 1024, 4096)

Array = Any
Launch = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One part of the way: seconds (the median over rounds), bytes moved, 0 where none are."""

    name: str
    seconds: float
    nbytes: int = 0

    @property
    def gbs(self) -> float | None:
        """10^9 bytes a second, None for parts that move nothing."""
        return self.nbytes / self.seconds * 1e-9 if self.nbytes else None


class Pass:
    """One product from host arrays A, B to host array C on a GPU, split into parts.

    bind(pointers) makes the launch on matrices in device memory.
    """

    def __init__(
        self, hosts: Sequence[Array], bind: Callable[[Sequence[int]], Launch], ordinal: int
    ) -> None:
        self.hosts, self.bind, self.ordinal = hosts, bind, ordinal
        api = driver.bindings()
        with driver.on_device(ordinal):
            self.events = [driver.check(api.cuEventCreate(0), "making an event") for _ in "ab"]

    def __del__(self) -> None:
        api = driver.bindings()
        for event in getattr(self, "events", ()):
            api.cuEventDestroy(event)

    def run(self) -> dict[str, float]:
        """Multiply once; DeviceError when the matrices do not fit. All memory is given back."""
        us: dict[str, float] = {}
        pointers: list[int] = []
        a, b, c = self.hosts
        start = time.perf_counter()
        try:
            for host in self.hosts:
                pointers.append(driver.allocate(host.nbytes, self.ordinal))
            start = self._ended(us, "allocate", start)
            launch = self.bind(pointers)
            start = time.perf_counter()
            for at, host in zip(pointers, (a, b), strict=False):
                driver.copy(at, host.ctypes.data, host.nbytes, self.ordinal, 0)
            self._ended(us, "host to device", start)
            self._multiply(us, launch)
            start = time.perf_counter()
            driver.copy(c.ctypes.data, pointers[2], c.nbytes, self.ordinal, 0)
            start = self._ended(us, "device to host", start)
        finally:
            for at in pointers:
                driver.free(at, self.ordinal)
        self._ended(us, "free", start)
        return us

    def _ended(self, us: dict[str, float], part: str, start: float) -> float:
        driver.synchronize(self.ordinal)
        now = time.perf_counter()
        us[part] = (now - start) * 1e6
        return now

    def _multiply(self, us: dict[str, float], launch: Launch) -> None:
        api, (before, after) = driver.bindings(), self.events
        with driver.on_device(self.ordinal):
            start = time.perf_counter()
            driver.check(api.cuEventRecord(before, 0), "timing")
            launch()
            driver.check(api.cuEventRecord(after, 0), "timing")
            driver.check(api.cuEventSynchronize(after), "multiplying")
            whole = (time.perf_counter() - start) * 1e6
            ms = driver.check(api.cuEventElapsedTime(before, after), "timing")
        us["kernel"] = min(float(ms) * 1e3, whole)
        us["launch"] = whole - us["kernel"]


@contextmanager
def pinned_copy(host: Array, ordinal: int) -> Iterator[np.ndarray]:
    """Give page-locked host memory that holds a copy of an array's bytes, for the block."""
    import ctypes

    api = driver.bindings()
    with driver.on_device(ordinal):
        address = int(driver.check(api.cuMemAllocHost(max(host.nbytes, 1)), "pinning host memory"))
    try:
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * host.nbytes).from_address(address))
        memory[:] = host.reshape(-1).view(np.uint8)
        yield memory
    finally:
        with driver.on_device(ordinal):
            driver.check(api.cuMemFreeHost(address), "unpinning host memory")


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
    inner = shape[1]
    other, result = ((inner,), shape[:1]) if op == "matvec" else ((inner, inner), shape)
    a, b = (
        rng.standard_normal(size, np.float32).astype(numpy_dtype(dtype)) for size in (shape, other)
    )
    hosts = (a, b, np.ones(result, a.dtype))
    start = time.perf_counter()
    left, right = (DeviceArray.from_host(host, ordinal) for host in (a, b))
    getattr(gm, op)(left, right)
    driver.synchronize(ordinal)
    first = Part("first call: context, compilation, loading", time.perf_counter() - start)
    plan = gm.plan(op, left, right)

    def bind(pointers: Sequence[int]) -> Launch:
        views = [_view(at, host, ordinal) for at, host in zip(pointers, hosts, strict=True)]
        return lambda: plan(*views[:2], out=views[2])

    with ExitStack() as stack:
        copies = [stack.enter_context(pinned_copy(host, ordinal)) for host in hosts]
        ways = {PAGEABLE: Pass(hosts, bind, ordinal), PINNED: Pass(copies, bind, ordinal)}
        runs = [{how: way.run() for how, way in ways.items()} for _ in range(rounds)]

    def part(name: str, how: str = PAGEABLE, nbytes: int = 0, words: str = "") -> Part:
        seconds = float(np.median([run[how][name] for run in runs])) * 1e-6
        return Part(words or name + (how if nbytes else ""), seconds, nbytes)

    moved = {"host to device": a.nbytes + b.nbytes, "device to host": hosts[2].nbytes}
    into, back = ([part(name, how, size) for how in ways] for name, size in moved.items())
    allocation = part("allocate", words="allocation")
    return [first, allocation, *into, part("kernel"), *back, part("free")]


def _view(at: int, host: Array, ordinal: int) -> DeviceArray:
    strides = tuple(step // host.itemsize for step in host.strides)
    return DeviceArray(at, host.shape, strides, host.dtype.name, ordinal, None)


def show(ordinal: int, sides: Sequence[int], out: Path) -> dict[str, Any]:
    """Print, write and return the parts of square products' way from host to host."""
    records = []
    for op in ("matvec", "matmul"):
        for side in sides:
            parts = split(op, (side, side), ordinal=ordinal)
            print_table(_table(f"{op}, {side} x {side}, float32", parts))
            about = {"schema": 1, "op": op, "side": side}
            records += [{**about, **dataclasses.asdict(part)} for part in parts]
    path = log.fresh(out, "cuda-split")
    lines.write(path, records)
    click.echo(f"wrote {path}")
    return {"file": path, "parts": records}


def _table(title: str, parts: Sequence[Part]) -> TableData:
    columns: tuple[Column[Part], ...] = (
        ("part", lambda part: part.name, False),
        ("ms", lambda part: significant(part.seconds * 1e3), True),
        ("GB/s", lambda part: "" if part.gbs is None else significant(part.gbs), True),
    )
    return table_of(title, parts, columns)
