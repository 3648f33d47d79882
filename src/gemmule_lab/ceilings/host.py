"""Ceilings of this CPU, measured in the run that uses them: read, copy, multiply-add.

Each ceiling is the best of several ways to reach it; every way's figure is kept. Reading and
copying go over arrays beyond the last-level cache. The loops are written in
`gemmule_lab.ceilings.loops`, load by load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from gemmule.backends.cpu.jit import unavailable
from gemmule.backends.cpu.target import vector_bytes
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.memory import available_bytes, whole_lines
from gemmule.errors import DeviceError
from gemmule.timing.clock import HostClock
from gemmule.timing.machine import last_level_cache_bytes
from gemmule.timing.sampler import Budget
from gemmule_lab.ceilings.best import Way, best
from gemmule_lab.ceilings.cold import COLD_FROM, cold_from
from gemmule_lab.ceilings.loops import ACCUMULATORS, STEP_BYTES, copy_loop, fma_loop, read_loop
from gemmule_lab.records.rows import Ceiling

FMA_STEPS = 1 << 20  # some 2 ms: waking a second thread takes tens of microseconds
ASSUMED_CACHE_BYTES = 256 << 20  # where the system does not tell: more than most caches


def measure_ceilings(
    *, max_seconds: float = 12.0, threads: int | None = None, seed: int = 0
) -> dict[str, Ceiling]:
    """Measure this CPU's ceilings: ``read`` and ``copy`` in GB/s, ``fma float32/64`` in GFLOP/s.

    Beside them ``cold from``: the MiB beyond which cyclic reading finds nothing in the cache.
    threads: the most to use (default: what products use). Reading and copying are tried with one
    thread and with all of them, one to eight streams per thread, 8-byte and vector-wide loads;
    copying counts bytes read and bytes written, with plain and with non-temporal stores.
    DeviceError without llvmlite, which the loops are compiled by.
    """
    reason = unavailable()
    if reason is not None:
        raise DeviceError(f"ceilings cannot be measured: {reason}.")
    workers = thread_count() if threads is None else threads
    if workers < 1:
        raise ValueError(f"threads is {workers}; it must be at least 1.")
    buffer = _buffer(workers)
    groups = {
        "read": _read_ways(buffer, workers),
        "copy": _copy_ways(buffer, workers),
        "fma float32": _fma_ways("float32", workers),
        "fma float64": _fma_ways("float64", workers),
    }
    clock, budget = HostClock(), Budget(max_seconds=max_seconds / len(groups), max_blocks=15)
    found = {}
    for name, ways in groups.items():
        for way in ways:
            way.call()  # compiles
        found[name] = best(name, ways, clock, budget, seed)
    found[COLD_FROM] = cold_from(buffer.ctypes.data, buffer.nbytes, workers)
    return found


def _way(name: str, call: Callable[[], object], amount: float, threads: int) -> Way:
    return Way(f"{name}, {threads} thread{'s' if threads > 1 else ''}", call, amount, threads)


def _buffer(threads: int) -> np.ndarray:
    """Return an aligned array of four times the cache, each page first touched where it lies."""
    cache = last_level_cache_bytes() or ASSUMED_CACHE_BYTES
    step = threads * 8 * STEP_BYTES
    size = min(4 * cache, available_bytes() // 4) // (2 * step) * (2 * step)
    aligned = whole_lines(size)
    aligned.view(np.float32).reshape(-1, 512)[:] = np.random.default_rng(0).standard_normal(512)
    return aligned


def _read_ways(buffer: np.ndarray, threads: int) -> list[Way]:
    address, ways = buffer.ctypes.data, []
    for workers in sorted({1, threads}):
        for lanes in (1, vector_bytes() // 8):
            for streams in (1, 2, 4, 8):
                length = buffer.nbytes // (workers * streams) // STEP_BYTES * STEP_BYTES
                loop = read_loop(streams, lanes)
                call = functools.partial(loop, address, 0, length, streams * length, workers)
                title = f"{streams} stream{'s' if streams > 1 else ''} of {8 * lanes}-byte loads"
                ways.append(_way(title, call, workers * streams * length, workers))
    return ways


def _copy_ways(buffer: np.ndarray, threads: int) -> list[Way]:
    half = buffer.nbytes // 2
    address, ways = buffer.ctypes.data, []
    for workers in sorted({1, threads}):
        for streaming in (False, True):
            length = half // workers // STEP_BYTES * STEP_BYTES
            loop = copy_loop(streaming)
            call = functools.partial(loop, address, half, length, length, workers)
            title = f"{'non-temporal' if streaming else 'plain'} stores"
            ways.append(_way(title, call, 2 * workers * length, workers))
    return ways


def _fma_ways(dtype: str, threads: int) -> list[Way]:
    item = 4 if dtype == "float32" else 8
    ways = []
    for workers in sorted({1, threads}):
        for width in sorted({16, 32, vector_bytes()}):
            lanes = width // item
            loop = fma_loop(dtype, lanes)
            call = functools.partial(loop, 0, 0, FMA_STEPS, 0, workers)
            amount = 2.0 * workers * lanes * ACCUMULATORS * FMA_STEPS
            ways.append(_way(f"{8 * width}-bit vectors", call, amount, workers))
    return ways
