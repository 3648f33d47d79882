"""Measuring this host's rates for the CPU's cost model: 1 to 2 s, never in a product.

Each figure is the best of a few calls, of kernels and of NumPy as products use them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu import launch as cpu
from gemmule.backends.cpu import pool as cpu_pool
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.threads import thread_count
from gemmule.core.caches import forget_plans
from gemmule.core.host_rates import DEFAULT_RATES, HostRates
from gemmule.core.memory import available_bytes
from gemmule.core.problem import Problem
from gemmule.rungs._cpu_convert import widened
from gemmule.rungs.matmul.cpu._tile import register_tile, tile_product
from gemmule.rungs.matvec.cpu import four_rows, threads
from gemmule.rungs.vecmat.cpu import panel_threads, prefetched_columns
from gemmule.storage import rates as store_rates
from gemmule.storage.lines import today

ROW = 4096  # float32 numbers of a row of the matrix that is read
LARGEST_BYTES = 256 << 20  # a page that comes anew takes 2 us: of twice as many a second
CACHED_BYTES = 1 << 20
DEPTH = 256
TILES = 400
BLAS_SIZE = 1024
ROW_HALVES, FEWEST_ROWS = 16384, 64  # of a matrix whose sums leave the first-level cache


def measure_rates(*, fresh: bool = False) -> HostRates:
    """Return this machine's rates: the stored ones, else measured now and stored.

    fresh: measure again. One process at a time measures; the others wait for its figures. Later
    plans use them. They are not stored where the cache cannot be written.
    """
    machine = cpu.machine()
    names = (machine.name, machine.arch, machine.units)
    before = store_rates.read(*names)
    with store_rates.one_at_a_time(*names):
        known = store_rates.read(*names)
        if known is not None and (not fresh or known != before):
            return known
        rates = _measured(machine.cache_bytes)
        store_rates.save(*names, rates)
    cpu.forget_machine()
    forget_plans()
    return rates


def _measured(cache_bytes: int) -> HostRates:
    large = _matrix(min(4 * cache_bytes, LARGEST_BYTES, available_bytes() // 8))
    read, core_read = _reading(large)
    _, core_cached = _reading(_matrix(CACHED_BYTES), repeat=20)
    call, spread = _calls()
    few = np.ones(8, np.float32)
    return HostRates(
        read=max(read, core_read),
        core_read=core_read,
        core_cached=max(core_cached, core_read),
        fma=_fma(),
        blas=_blas(),
        convert=_converting(),
        call=call,
        spread=spread,
        blas_call=_best(lambda: np.dot(few, few), 50),
        asked=_asked(large),
        measured=today(),
    )


def _best(call: Callable[[], object], times: int) -> float:
    call()
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _matrix(nbytes: int) -> np.ndarray[Any, Any]:
    return np.ones((max(nbytes // (4 * ROW), 1), ROW), np.float32)


def _reading(matrix: np.ndarray[Any, Any], repeat: int = 4) -> tuple[float, float]:
    """Return the bytes a second that all threads and one read, as a product's matrix."""
    m = len(matrix)
    x, y = np.ones(ROW, np.float32), np.empty(m, np.float32)
    problem = Problem("matvec", m, ROW, a="float32", b="float32", out="float32")
    rates = []
    for rung in (threads.RUNG, four_rows.RUNG):
        run = rung.bind(problem, rung.check_params(problem, None))
        rates.append(matrix.nbytes / _best(functools.partial(run, matrix, x, y), repeat))
    return rates[0], rates[1]


def _asked(matrix: np.ndarray[Any, Any]) -> float:
    """Return how many times as fast x A is over long rows of halves that are prefetched."""
    columns = matrix.nbytes // (2 * ROW_HALVES)
    if prefetched_columns.RUNG.available() is not None or columns < FEWEST_ROWS:
        return DEFAULT_RATES.asked
    flat = matrix.reshape(-1).view(np.float16)
    halves = flat[: columns * ROW_HALVES].reshape(columns, ROW_HALVES).T
    x, y = np.zeros(columns, np.float16), np.empty(ROW_HALVES, np.float16)
    problem = Problem("matvec", ROW_HALVES, columns, a="float16", b="float16", out="float16")
    seconds = []
    for rung in (panel_threads.RUNG, prefetched_columns.RUNG):
        run = rung.bind(problem, rung.check_params(problem, None))
        seconds.append(_best(functools.partial(run, halves, x, y), 3))
    return seconds[0] / seconds[1]


@functools.cache
def _tiles_kernel() -> Kernel:
    multiply = tile_product("float32", register_tile("float32", narrow=False), 0)

    @kernel
    def tiles(a: int, b: int, depth: int, c: int, columns: int, times: int) -> None:
        for _ in range(times):
            multiply(a, b, depth, c, columns, 0)

    return tiles


def _fma() -> float:
    """Return the multiply-adds a second of one core, by the packed product's tile in its cache."""
    tile = register_tile("float32", narrow=False)
    a, b = np.zeros((DEPTH, tile.rows), np.float32), np.zeros((DEPTH, tile.columns), np.float32)
    c = np.zeros((tile.rows, tile.columns), np.float32)
    places = (a.ctypes.data, b.ctypes.data, DEPTH, c.ctypes.data, tile.columns, TILES)
    seconds = _best(lambda: _tiles_kernel()(*places), 5)
    return TILES * DEPTH * tile.rows * tile.columns / seconds


def _blas() -> float:
    matrix = np.ones((BLAS_SIZE, BLAS_SIZE), np.float32)
    out = np.empty_like(matrix)
    return 2.0 * BLAS_SIZE**3 / _best(lambda: np.matmul(matrix, matrix, out=out), 4)


def _converting() -> float:
    halves = np.ones((1 << 10, 1 << 10), np.float16)
    return halves.size / _best(lambda: widened(halves, np.dtype(np.float32)), 5)


@kernel
def _nothing(number: int, word: int) -> None:
    pass


def _calls() -> tuple[float, float]:
    """Return what a call of a kernel costs, and what helpers add to it."""
    pooled: Any = cpu_pool.in_pool(_nothing, 1)
    alone = _best(lambda: pooled.alone(1, 0), 200)
    shares = thread_count()
    together = _best(lambda: pooled(shares, 0), 200)
    return alone, max(together - alone, 1e-7)
