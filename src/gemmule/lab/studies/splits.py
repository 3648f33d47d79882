"""A product on a GPU from host arrays to host array, split as document 001 splits it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.errors import DeviceError
from gemmule.lab.records.rows import Times
from gemmule.lab.studies.grid import Measured
from gemmule.lab.verify import check

PARTS = ("allocate", "host to device", "kernel", "device to host", "free")
JUDGED, JUDGED_COLUMNS, EDGE = 1 << 22, 1024, 4
PERIOD = 16_777_213

Array = Any


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
    a: Array, b: Array, c: Array, multiply: Callable[..., None], ordinal: int
) -> dict[str, float]:
    """Multiply host float32 matrices once with raw allocations; return microseconds by part.

    multiply(A, B, C) launches on device arrays. DeviceError when the three matrices do not fit;
    what was allocated is given back.
    """
    watch, pointers = _Watch(ordinal), []
    try:
        with watch.part("allocate"):
            for host in (a, b, c):
                pointers.append(driver.allocate(host.nbytes, ordinal))
        views = [
            DeviceArray(at, host.shape, (host.shape[1], 1), "float32", ordinal, None)
            for at, host in zip(pointers, (a, b, c), strict=True)
        ]
        with watch.part("host to device"):
            for host, at in zip((a, b), pointers, strict=False):
                driver.copy(at, host.ctypes.data, host.nbytes, ordinal, 0)
        with watch.part("kernel"):
            multiply(*views)
        with watch.part("device to host"):
            driver.copy(c.ctypes.data, pointers[2], c.nbytes, ordinal, 0)
    finally:
        with watch.part("free"):
            for at in pointers:
                driver.free(at, ordinal)
    return watch.us


def rung_multiply(rung: str, params: dict[str, Any] | None = None) -> Callable[..., None]:
    """Return a product of device arrays by a rung, planned at the first call of each size."""
    plans: dict[tuple[int, ...], gm.Plan] = {}

    def multiply(a: DeviceArray, b: DeviceArray, c: DeviceArray) -> None:
        if a.shape not in plans:
            plans[a.shape] = gm.plan("matmul", a, b, rung=rung, params=params)
        plans[a.shape](a, b, out=c)

    return multiply


def cublas_multiply() -> Callable[..., None] | str:
    """Return cuBLAS's product of device arrays through PyTorch, or why there is none."""
    from gemmule.lab.peers.gpu_float import to_cuda, torch_missing

    reason = torch_missing()
    if reason is not None:
        return reason
    import torch

    def multiply(a: DeviceArray, b: DeviceArray, c: DeviceArray) -> None:
        # Row-major operands and A before B: PyTorch asks cuBLAS for B^T A^T in column-major order.
        torch.matmul(to_cuda(a), to_cuda(b), out=to_cuda(c))

    return multiply


def split(n: int, multiply: Callable[..., None], ordinal: int, repeats: int) -> Measured:
    """Return the median parts of `repeats` products of n x n, after one that is not counted.

    Judged by the oracle on sampled rows; ArithmeticError for a wrong result.
    """
    a, b = (_numbers(n, seed) for seed in (1, 2))
    c = np.empty_like(a)
    try:
        first = once(a, b, c, multiply, ordinal)
        judge(a, b, c)
        runs = [once(a, b, c, multiply, ordinal) for _ in range(repeats)]
    except DeviceError as error:
        if error.restart:
            raise
        return Measured(note=str(error))
    runs = runs or [first]
    totals = [sum(run.values()) for run in runs]
    figures = {name: float(np.median([run[name] for run in runs])) for name in PARTS}
    figures |= {f"first {name}": first[name] for name in PARTS}
    times = times_of_us(totals)
    figures["gflops"] = 2e-3 * n**3 / times.median
    return Measured(times, figures)


def _numbers(n: int, seed: int) -> Array:
    """Return normal numbers; those of large matrices repeat with a period that no row divides."""
    flat = np.random.default_rng(seed).standard_normal(min(n * n, PERIOD), np.float32)
    return np.resize(flat, (n, n))


def times_of_us(values: list[float]) -> Times:
    """Return the statistics of times in microseconds."""
    quartiles = [float(np.quantile(values, q)) for q in (0.25, 0.5, 0.75)]
    return Times(quartiles[1], quartiles[0], quartiles[2], min(values), len(values))


def judge(a: Array, b: Array, c: Array) -> None:
    """Hold the first and last rows of a product against the oracle; ArithmeticError if wrong."""
    n = len(a)
    count = max(2 * EDGE, JUDGED // max(n, 1) ** 2)
    rows = sorted({*range(min(n, count // 2)), *range(max(0, n - count // 2), n)})
    columns = sorted({*range(min(n, JUDGED_COLUMNS)), *range(max(0, n - EDGE), n)})
    left, right = np.ascontiguousarray(a[rows]), np.ascontiguousarray(b[:, columns])
    result = np.ascontiguousarray(c[rows][:, columns])
    plan = gm.plan("matmul", left, right, rung="triple_loop")
    verdict = check.judge("matmul", left, right, result, check.Rounding.of(plan))
    if not verdict.ok:
        raise ArithmeticError(f"a product of {n} x {n}: {verdict.text}")
