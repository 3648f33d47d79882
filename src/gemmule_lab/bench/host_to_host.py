"""Products on a GPU from host arrays to host array, split into parts, with raw allocations.

Each part is timed by the host's clock around work that is waited for. The first call (context,
compilation and loading) happens once a process.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import numpy_dtype
from gemmule.storage import lines
from gemmule_lab.report.render import terminal_table, wide_console
from gemmule_lab.report.tables import TableData, significant

PARTS = ("allocate", "host to device", "kernel", "device to host", "free")
PINNED = ", pinned"
PAGEABLE = ", pageable"  # what is said of a copy where there is a pinned one beside it
ROUNDS = 7
SIDES = (64, 1024, 4096)

Array = Any
Multiply = Callable[..., Any]


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


class _Watch:
    """Sums up host time by part, each ended by waiting for the device."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.us: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        driver.synchronize(self.ordinal)
        self.us[name] = (time.perf_counter() - start) * 1e6


def once(
    hosts: Sequence[Array], multiply: Multiply, ordinal: int, *, pinned: bool = False
) -> dict[str, float]:
    """Multiply the host arrays A, B into C once; return microseconds by part.

    multiply(A, B, C) launches on device arrays. pinned: copy from and to page-locked memory too.
    DeviceError when the three do not fit; what was allocated is given back.
    """
    watch, pointers = _Watch(ordinal), []
    a, b, c = hosts
    try:
        with watch.part("allocate"):
            for host in hosts:
                pointers.append(driver.allocate(host.nbytes, ordinal))
        views = [_view(at, host, ordinal) for at, host in zip(pointers, hosts, strict=True)]
        with watch.part("host to device"):
            _copy_in(pointers, (a, b), ordinal)
        if pinned:
            part = watch.part("host to device" + PINNED)
            with pinned_copy(a, ordinal) as first, pinned_copy(b, ordinal) as second, part:
                _copy_in(pointers, (first, second), ordinal)
        with watch.part("kernel"):
            multiply(*views)
        with watch.part("device to host"):
            driver.copy(c.ctypes.data, pointers[2], c.nbytes, ordinal, 0)
        if pinned:
            with pinned_copy(c, ordinal) as target, watch.part("device to host" + PINNED):
                driver.copy(target.ctypes.data, pointers[2], c.nbytes, ordinal, 0)
    finally:
        with watch.part("free"):
            for at in pointers:
                driver.free(at, ordinal)
    return watch.us


def _view(at: int, host: Array, ordinal: int) -> DeviceArray:
    strides = tuple(step // host.itemsize for step in host.strides)
    return DeviceArray(at, host.shape, strides, host.dtype.name, ordinal, None)


def _copy_in(pointers: Sequence[int], sources: Sequence[Array], ordinal: int) -> None:
    for at, source in zip(pointers, sources, strict=False):
        driver.copy(at, source.ctypes.data, source.nbytes, ordinal, 0)


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
    c = np.ones(result, a.dtype)
    start = time.perf_counter()
    left, right = (DeviceArray.from_host(host, ordinal) for host in (a, b))
    getattr(gm, op)(left, right)
    driver.synchronize(ordinal)
    first = Part("first call: context, compilation, loading", time.perf_counter() - start)
    plan = gm.plan(op, left, right)

    def multiply(a: DeviceArray, b: DeviceArray, c: DeviceArray) -> None:
        plan(a, b, out=c)

    runs = [once((a, b, c), multiply, ordinal, pinned=True) for _ in range(rounds)]
    moved = {"host to device": a.nbytes + b.nbytes, "device to host": c.nbytes}
    words = {"allocate": "allocation", **{name: name + PAGEABLE for name in moved}}
    return [first] + [
        Part(
            words.get(name, name),
            float(np.median([run[name] for run in runs])) * 1e-6,
            moved.get(name.removesuffix(PINNED), 0),
        )
        for name in runs[0]
    ]


def show(ordinal: int, sides: Sequence[int], out: Path) -> None:
    """Print and write the parts of a product's way from host to host, for square matrices."""
    records = []
    for op in ("matvec", "matmul"):
        for side in sides:
            parts = split(op, (side, side), ordinal=ordinal)
            wide_console().print(terminal_table(_table(f"{op}, {side} x {side}, float32", parts)))
            about = {"schema": 1, "op": op, "side": side}
            records += [{**about, **dataclasses.asdict(part)} for part in parts]
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S")
    path = out / f"cuda-split-{stamp}.jsonl"
    lines.write(path, records)
    click.echo(f"wrote {path}")


def _table(title: str, parts: Sequence[Part]) -> TableData:
    body = tuple(
        (
            part.name,
            significant(part.seconds * 1e3),
            "" if part.gbs is None else significant(part.gbs),
        )
        for part in parts
    )
    return TableData(title, ("part", "ms", "GB/s"), body, (False, True, True))
