"""Where the memory of a GPU ends, shown by products: the last that is done, the first refused."""

from __future__ import annotations

import functools
import sys
import time
from contextlib import ExitStack

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule_lab.ceilings.device import filled
from gemmule_lab.harness.device_operands import judged
from gemmule_lab.harness.operands import OperandSet
from gemmule_lab.records.rows import times_of_us
from gemmule_lab.studies.documents.claims_001 import REFUSED
from gemmule_lab.studies.grid import Bench, Case, Found, Measured, Names
from gemmule_lab.studies.harness import unless_refused
from gemmule_lab.studies.products.passes import CUBLAS, Way, gpu_way

STEP = 1000
FITS, WHOLE = "a thousand columns", "the whole product"


def largest(bench: Bench, names: Names, case: Case) -> Found:
    """Multiply the largest matrices, n in thousands, that fit beside their product, and the next.

    Of the largest, a thousand columns are computed (all three matrices lie on the device); the
    whole product only where it is asked for. The next size goes the way of all others.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()  # what it keeps from the products before
    free_bytes, _ = driver.memory_bytes(bench.ordinal)
    n = int((free_bytes / 12) ** 0.5) // STEP * STEP
    found: dict[str, Measured] = {}
    while n > 0 and not found:
        made = unless_refused(functools.partial(_products, n, names, bench.ordinal))
        found, n = ({}, n - STEP) if isinstance(made, str) else (made, n)
    if REFUSED in names:
        why = refusal(n + STEP, bench.ordinal)
        figures = {"largest n": float(n), "next n refused": float(why is not None)}
        found[REFUSED] = Measured(figures=figures, note=why or "")
    return found


def _products(n: int, names: Names, ordinal: int) -> dict[str, Measured]:
    """Return the named products, a few columns of each judged; B and C lie by columns."""
    a, b = (filled(n * n, "float32", ordinal, seed) for seed in (1, 2))
    c = DeviceArray.empty((n * n,), "float32", ordinal)

    def by_columns(block: DeviceArray, count: int) -> DeviceArray:
        return DeviceArray(block.pointer, (n, count), (1, n), "float32", ordinal, block)

    left = DeviceArray(a.pointer, (n, n), (n, 1), "float32", ordinal, a)
    found = {}
    for name, columns in ((FITS, STEP), (WHOLE, n)):
        if name in names:
            right, out = (by_columns(block, columns) for block in (b, c))
            plan = gm.plan("matmul", left, right)
            start = time.perf_counter()
            plan(left, right, out=out)
            driver.synchronize(ordinal)
            us = (time.perf_counter() - start) * 1e6
            judged("matmul", OperandSet(left, by_columns(b, STEP), by_columns(c, STEP)), plan)
            figures = {"n": float(n), "gflops": 2e-3 * n * n * columns / us}
            found[name] = Measured(times_of_us([us]), figures)
    return found


def refusal(n: int, ordinal: int) -> str | None:
    """Return what a host-to-host product of n x n answers where its matrices do not fit."""
    host = np.empty((n, n), np.float32)  # no page of it is touched before the device refuses
    with ExitStack() as stack:
        one = gpu_way(CUBLAS, (host, host, host), ordinal, stack)
        made = unless_refused(one.run) if isinstance(one, Way) else None
    return made if isinstance(made, str) else None
