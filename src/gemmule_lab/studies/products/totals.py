"""Document 001's host-to-host products: proofs, checks, times by size, the largest that fits."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule_lab.ceilings.device import filled
from gemmule_lab.harness import device_operands
from gemmule_lab.harness.operands import OperandSet, drawn
from gemmule_lab.records.rows import times_of_us
from gemmule_lab.studies.grid import Bench, Case, Found, Measured, Names
from gemmule_lab.studies.harness import unless_refused
from gemmule_lab.studies.products import passes as by
from gemmule_lab.studies.products.passes import CUBLAS, Parts, Way, gpu_way, host_way
from gemmule_lab.verify import check

STEP, FITS, WHOLE, REFUSED = 1000, "a thousand columns", "the whole product", "the next size"
JUDGED_ROWS, JUDGED_COLUMNS, ALL, WIDTH = 8, 48, 128, 4096
LARGEST_PROOF = 1024
# Two thread pools that take turns disturb each other for some 60 ms (OpenBLAS, OpenMP and ours on
# 2 cores, November 2026).
REST_S = 0.15

Array = Any


@functools.lru_cache(1)
def _numbers(rows: int) -> Array:
    return drawn((rows, WIDTH), np.random.default_rng(1)).reshape(-1)


def operands(n: int) -> tuple[Array, Array, Array]:
    """Return random A and B, n x n, and a C that nothing was written to.

    Their numbers are drawn once for many sizes, since drawing anew takes longer than a product; B's
    are A's from the second row of the pool on.
    """
    pool = _numbers(1 << (n * n // WIDTH + 1).bit_length())
    a, b = (pool[at : at + n * n].reshape(n, n) for at in (0, WIDTH))
    return a, b, np.empty((n, n), np.float32)


def way_of(name: str, hosts: Sequence[Array], bench: Bench, stack: ExitStack) -> Way | str:
    """Return an implementation over host matrices, or why it is not here."""
    if name in by.HOST_NAMES:
        return host_way(name, *hosts)
    if bench.backend == "cuda":
        return gpu_way(name, hosts, bench.ordinal, stack)
    return "it needs a GPU"


def proof(bench: Bench, names: Names, case: Case) -> Found:
    """Multiply matrices of random sizes by every implementation, and judge each result.

    ArithmeticError stops the study. The figure is the largest difference between any two results.
    """
    chosen = np.random.default_rng().integers(1, LARGEST_PROOF + 1, int(case["runs"]))
    sizes = [int(n) for n in chosen]
    gpu = (by.NAIVE, by.SHARED, by.CUBLAS) if bench.backend == "cuda" else ()
    worst, products, absent = 0.0, 0, dict[str, str]()
    for n in sizes:
        results, lacking = _results(n, by.HOST_NAMES + gpu, bench)
        worst = max([worst, *(float(np.abs(a - b).max()) for a in results for b in results)])
        products += len(results)
        absent |= lacking
    figures = {"products": float(products), "largest difference": worst}
    note = f"sizes {', '.join(map(str, sizes))}"
    note += f"; without {', '.join(sorted(absent))}" if absent else ""
    return dict.fromkeys(names, Measured(figures=figures, note=note))


def _results(n: int, names: Sequence[str], bench: Bench) -> tuple[list[Array], dict[str, str]]:
    """Return the judged products of random matrices, and why others are not here."""
    a, b, _ = operands(n)
    results, absent = [], {}
    with ExitStack() as stack:
        for name in names:
            one = way_of(name, (a, b, np.full_like(a, np.nan)), bench, stack)
            if isinstance(one, str):
                absent[name] = one
            else:
                one.run()
                results.append(judge(a, b, one.result, name).copy())
    return results, absent


def small_check(bench: Bench, names: Names, case: Case) -> Found:
    """Judge the named libraries on matrices that do not commute; ArithmeticError when wrong."""
    found = {}
    for name in names:
        _, absent = _results(int(case["n"]), (name,), bench)
        found[name] = Measured(note=absent[name]) if absent else Measured(figures={"right": 1.0})
    return found


def totals(bench: Bench, names: Names, case: Case, repeats: int = by.REPEATS) -> Found:
    """Return the times of products of n x n, on the CPU and on the GPU in turns.

    NumPy's pool of threads would disturb Eigen's, so it has no turn among the others. Every result
    is judged; without repeats each runs just once.
    """
    n, found = int(case["n"]), dict[str, Measured]()
    hosts = operands(n)
    for group in ([x for x in names if x != by.NUMPY], [x for x in names if x == by.NUMPY]):
        present, firsts = list[Way](), dict[str, Parts]()
        with ExitStack() as stack:
            for name in group:
                way = way_of(name, hosts, bench, stack)
                first = way if isinstance(way, str) else _first(way, *hosts[:2])
                if isinstance(way, str) or isinstance(first, str):
                    found[name] = Measured(note=str(first))
                else:
                    firsts[name] = first
                    present.append(way)
            runs = by.in_turns(present, firsts, n, repeats)
        found |= {name: _measured(name, n, parts) for name, parts in runs.items()}
        time.sleep(REST_S if by.NUMPY in names else 0.0)
    return found


def _first(way: Way, a: Array, b: Array) -> Parts | str:
    """Run a way once and judge what it gave; return its parts, or why it cannot run here."""
    way.result.fill(np.nan)
    parts = unless_refused(way.run)
    if not isinstance(parts, str):
        judge(a, b, way.result, way.name)
    return parts


def _measured(name: str, n: int, runs: Sequence[Parts]) -> Measured:
    kept = by.counted(runs)
    times = times_of_us([sum(run.values()) for run in kept])
    figures = {part: float(np.median([run[part] for run in kept])) for part in runs[0]}
    params = {}
    if name not in by.HOST_NAMES:
        figures |= {f"first {part}": us for part, us in runs[0].items()}
        params = {"memory": "pinned" if name.endswith(by.PINNED) else "pageable"}
    return Measured(times, {**figures, "gflops": 2e-3 * n**3 / times.median}, params=params)


def judge(a: Array, b: Array, c: Array, name: str = "") -> Array:
    """Hold a small product, or rows and columns of a large one, against the oracle; return it.

    The first and last of both are among them. ArithmeticError, with the name, if one is wrong.
    """
    n = len(a)
    rows, columns = (
        sorted({0, 1, n - 2, n - 1, *np.linspace(0, n - 1, most, dtype=int).tolist()})
        if n > ALL
        else list(range(n))
        for most in (JUDGED_ROWS, JUDGED_COLUMNS)
    )
    parts = (a[rows], b[:, columns], c[rows][:, columns])
    left, right, result = (np.ascontiguousarray(part) for part in parts)
    plan = gm.plan("matmul", left, right, rung="triple_loop")
    verdict = check.judge("matmul", left, right, result, check.Rounding.of(plan))
    if not verdict.ok:
        raise ArithmeticError(f"{name}: a product of {n} x {n}: {verdict.text}")
    return c


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
            device_operands.judged(
                "matmul", OperandSet(left, by_columns(b, STEP), by_columns(c, STEP)), plan
            )
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
