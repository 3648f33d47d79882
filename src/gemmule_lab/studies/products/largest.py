"""Where the memory of a GPU ends, shown by products: the last that is done, the first refused."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.errors import DeviceError
from gemmule_lab.ceilings.device import filled
from gemmule_lab.records.rows import times_of_us
from gemmule_lab.studies.documents.claims_001 import REFUSED
from gemmule_lab.studies.grid import Bench, Case, Found, Measured, Names
from gemmule_lab.studies.products.passes import CUBLAS, Way, gpu_way
from gemmule_lab.studies.products.totals import judge_part, ordinal_of

STEP = 1000
EDGE, COLUMNS = 4, 16
FITS, WHOLE = "a thousand columns", "the whole product"


def largest(bench: Bench, names: Names, case: Case) -> Found:
    """Multiply the largest matrices, n in thousands, that fit beside their product, and the next.

    Of the largest, a thousand columns are computed (all three matrices lie on the device); the
    whole product only where it is asked for. The next size goes the way of all others.
    """
    ordinal = ordinal_of(bench)
    bench.release()
    free_bytes, _ = driver.memory_bytes(ordinal)
    n = int((free_bytes / 12) ** 0.5) // STEP * STEP
    found: dict[str, Measured] = {}
    while n > 0 and not found:
        try:
            found = _products(n, names, ordinal)
        except DeviceError as error:
            if error.restart:
                raise
            n -= STEP
    if REFUSED in names:
        why = refusal(n + STEP, ordinal)
        figures = {"largest n": float(n), "next n refused": float(why is not None)}
        found[REFUSED] = Measured(figures=figures, note=why or "")
    return found


def _products(n: int, names: Names, ordinal: int) -> dict[str, Measured]:
    blocks = [filled(n * n, "float32", ordinal, seed) for seed in (1, 2)]
    a, b = (DeviceArray(x.pointer, (n, n), (n, 1), "float32", ordinal, x) for x in blocks)
    c = DeviceArray.empty((n, n), "float32", ordinal)
    found = {}
    for name, columns in ((FITS, STEP), (WHOLE, n)):
        if name in names:  # B and C lie by columns
            found[name] = _timed(a, _columns(b.T, columns), _columns(c.T, columns))
    return found


def _columns(matrix: DeviceArray, count: int) -> DeviceArray:
    """Return the first columns of a matrix that lies by columns."""
    rows = matrix.shape[0]
    return DeviceArray(matrix.pointer, (rows, count), (1, rows), "float32", matrix.ordinal, matrix)


def _timed(a: DeviceArray, b: DeviceArray, c: DeviceArray) -> Measured:
    start = time.perf_counter()
    gm.matmul(a, b, out=c)
    driver.synchronize(c.ordinal)
    us = (time.perf_counter() - start) * 1e6
    n, columns = c.shape
    right, result = (_columns(one, min(COLUMNS, columns)).to_host() for one in (b, c))
    for first in (0, n - EDGE):
        at = a.pointer + 4 * first * n
        rows = DeviceArray(at, (EDGE, n), (n, 1), "float32", a.ordinal, a).to_host()
        judge_part(rows, right, result[first : first + EDGE], n)
    return Measured(times_of_us([us]), {"n": float(n), "gflops": 2e-3 * n * n * columns / us})


def refusal(n: int, ordinal: int) -> str | None:
    """Return what a host-to-host product of n x n answers where its matrices do not fit."""
    host = np.empty((n, n), np.float32)  # no page of it is touched before the device refuses
    with ExitStack() as stack:
        one = gpu_way(CUBLAS, (host, host, host), ordinal, stack)
        try:
            if isinstance(one, Way):
                one.run()
        except DeviceError as error:
            if error.restart:
                raise
            return str(error)
    return None
