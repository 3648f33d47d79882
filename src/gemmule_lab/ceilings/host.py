"""Ceilings of this CPU, measured in the run that uses them: read, copy, multiply-add.

Each ceiling is the best of several ways to reach it; every way's figure is kept. Reading and
copying go over arrays beyond the last-level cache. The loops are written in
`gemmule_lab.ceilings.loops`, load by load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gemmule.backends.cpu.jit import unavailable
from gemmule.backends.cpu.target import vector_bytes
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.memory import available_bytes, whole_lines
from gemmule.errors import DeviceError
from gemmule.timing.clock import Entry, HostClock
from gemmule.timing.machine import last_level_cache_bytes
from gemmule.timing.sampler import Budget, sample
from gemmule_lab.ceilings.cold import COLD_FROM, cold_from
from gemmule_lab.ceilings.loops import (
    ACCUMULATORS,
    STEP_BYTES,
    copy_loop,
    fma_loop,
    read_loop,
)
from gemmule_lab.records.rows import Ceiling, Row

FMA_STEPS = 1 << 20  # some 2 ms: waking a second thread takes tens of microseconds
ASSUMED_CACHE_BYTES = 256 << 20  # where the system does not tell: more than most caches
TOLERANCE = {"cpu": 0.10, "cuda": 0.03}


def measure_ceilings(
    *, max_seconds: float = 12.0, threads: int | None = None, seed: int = 0
) -> dict[str, Ceiling]:
    """Measure this CPU's ceilings: ``read`` and ``copy`` in GB/s, ``fma float32/64`` in GFLOP/s.

    Beside them ``cold from``: the MiB beyond which cyclic reading finds nothing in the cache.
    threads: the most to use (default: what products use). Reading and copying are tried with one
    thread and with all of them, one to eight streams per thread, 8-byte and vector-wide loads;
    copying counts bytes read and bytes written, with plain and with non-temporal stores.
    DeviceError without Numba, which the loops are compiled by.
    """
    reason = unavailable()
    if reason is not None:
        raise DeviceError(f"ceilings cannot be measured: {reason}.")
    workers = thread_count() if threads is None else threads
    if workers < 1:
        raise ValueError(f"threads is {workers}; it must be at least 1.")
    buffer = _buffer(workers)
    groups = {
        "read": _read_shapes(buffer, workers),
        "copy": _copy_shapes(buffer, workers),
        "fma float32": _fma_shapes("float32", workers),
        "fma float64": _fma_shapes("float64", workers),
    }
    share = max_seconds / len(groups)
    found = {name: _best(name, shapes, share, seed) for name, shapes in groups.items()}
    found[COLD_FROM] = cold_from(buffer.ctypes.data, buffer.nbytes, workers)
    return found


class _Shape:
    """One way to reach a ceiling: what a call does and how much that is."""

    def __init__(self, name: str, call: Callable[[], object], amount: float, threads: int) -> None:
        self.name = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
        self.call = call
        self.amount = amount
        self.threads = threads


def _best(name: str, shapes: Sequence[_Shape], max_seconds: float, seed: int) -> Ceiling:
    for shape in shapes:
        shape.call()  # compiles
    runs = [Entry(s.name, lambda _, s=s: s.call()) for s in shapes]  # type: ignore[misc]
    timed = sample(runs, HostClock(), Budget(max_seconds=max_seconds, max_blocks=15), seed=seed)
    rates = {s.name: s.amount / timed[s.name].median * 1e-9 for s in shapes}
    winner = max(shapes, key=lambda s: rates[s.name])
    unit = "GFLOP/s" if name.startswith("fma") else "GB/s"
    return Ceiling(name, rates[winner.name], unit, winner.name, winner.threads, rates)


def _buffer(threads: int) -> np.ndarray:
    """Return an aligned array of four times the cache, each page first touched where it lies."""
    cache = last_level_cache_bytes() or ASSUMED_CACHE_BYTES
    step = threads * 8 * STEP_BYTES
    size = min(4 * cache, available_bytes() // 4) // (2 * step) * (2 * step)
    aligned = whole_lines(size)
    aligned.view(np.float32).reshape(-1, 512)[:] = np.random.default_rng(0).standard_normal(512)
    return aligned


def _read_shapes(buffer: np.ndarray, threads: int) -> list[_Shape]:
    address, shapes = buffer.ctypes.data, []
    for workers in sorted({1, threads}):
        for lanes in (1, vector_bytes() // 8):
            for streams in (1, 2, 4, 8):
                length = buffer.nbytes // (workers * streams) // STEP_BYTES * STEP_BYTES
                loop = read_loop(streams, lanes, workers > 1)
                call = functools.partial(loop, address, 0, length, streams * length, workers)
                title = f"{streams} stream{'s' if streams > 1 else ''} of {8 * lanes}-byte loads"
                shapes.append(_Shape(title, call, workers * streams * length, workers))
    return shapes


def _copy_shapes(buffer: np.ndarray, threads: int) -> list[_Shape]:
    half = buffer.nbytes // 2
    address, shapes = buffer.ctypes.data, []
    for workers in sorted({1, threads}):
        for streaming in (False, True):
            length = half // workers // STEP_BYTES * STEP_BYTES
            loop = copy_loop(streaming, workers > 1)
            call = functools.partial(loop, address, half, length, length, workers)
            title = f"{'non-temporal' if streaming else 'plain'} stores"
            shapes.append(_Shape(title, call, 2 * workers * length, workers))
    return shapes


def _fma_shapes(dtype: str, threads: int) -> list[_Shape]:
    item = 4 if dtype == "float32" else 8
    shapes = []
    for workers in sorted({1, threads}):
        for width in sorted({16, 32, vector_bytes()}):
            lanes = width // item
            loop = fma_loop(dtype, lanes, workers > 1)
            call = functools.partial(loop, 0, 0, FMA_STEPS, 0, workers)
            amount = 2.0 * workers * lanes * ACCUMULATORS * FMA_STEPS
            shapes.append(_Shape(f"{8 * width}-bit vectors", call, amount, workers))
    return shapes


def above_ceiling(row: Row, ceilings: Mapping[str, Ceiling], backend: str) -> str | None:
    """Return the flag of a cold row that beats the read ceiling by more than the tolerance.

    10 % on a CPU, 3 % on a GPU (`backend`: ``cpu`` or ``cuda``). None when nothing is wrong: warm
    rows are served by a cache and meet no DRAM ceiling.
    """
    read = ceilings.get("read")
    if row.temperature != "cold" or read is None:
        return None
    excess = row.gbs / read.value - 1
    if excess <= TOLERANCE[backend]:
        return None
    return f"above the read ceiling by {100 * excess:.0f} %"


def enforce(
    rows: Sequence[Row],
    ceilings: Mapping[str, Ceiling],
    backend: str,
    measure_again: Callable[[], Mapping[str, Ceiling]],
) -> tuple[tuple[Row, ...], dict[str, Ceiling]]:
    """Hold cold rows against the read ceiling; measure it again when one rises above it.

    Returns the rows, kept all, and the ceilings that count now: of the old and the new figure the
    higher one. Rows still above carry the flag; shares of the ceiling are worked out anew. Ceilings
    are part of an environment, so the caller gives the rows the id of the one that holds these.
    """
    if not any(above_ceiling(row, ceilings, backend) for row in rows):
        return tuple(rows), dict(ceilings)
    again = measure_again()
    now = {name: _higher(old, again.get(name)) for name, old in ceilings.items()}
    return tuple(_against(row, now, backend) for row in rows), now


def _higher(old: Ceiling, new: Ceiling | None) -> Ceiling:
    better = old if new is None or old.value >= new.value else new
    return replace(better, measured=old.measured + (new is not None))


def _against(row: Row, ceilings: Mapping[str, Ceiling], backend: str) -> Row:
    flag = above_ceiling(row, ceilings, backend)
    others = tuple(f for f in row.flags if not f.startswith("above the read ceiling"))
    flags = (*others, flag) if flag else others
    if row.percent_of_ceiling is None:
        return replace(row, flags=flags)
    return replace(row, flags=flags, percent_of_ceiling=100 * row.gbs / ceilings["read"].value)
