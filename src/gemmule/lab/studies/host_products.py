"""Document 001's products from host to host: checked, split into parts, the largest that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.errors import DeviceError
from gemmule.lab.bench.host_to_host import PARTS, once
from gemmule.lab.records.rows import Times
from gemmule.lab.studies.cpu import REST_S, peer_calls
from gemmule.lab.studies.grid import Bench, Case, Found, Measured, Names
from gemmule.lab.studies.seeds.claims_001 import CPU_LOOP, CUBLAS, EIGEN, NAIVE, NUMPY, SHARED
from gemmule.lab.verify import check

JUDGED, JUDGED_COLUMNS, EDGE = 1 << 22, 1024, 4
PERIOD = 16_777_213
LARGEST_PROOF = 384
BUDGET_S = 0.25
STEP = 1000

Array = Any
Multiply = Callable[[Any, Any, Any], object]


def ordinal_of(bench: Bench) -> int:
    """Return the number of a bench's GPU."""
    return int(getattr(bench, "ordinal", 0))


def cpu_multiply(name: str) -> Multiply | str:
    """Return a host product ``(A, B, C)`` by name, or why there is none here."""
    if name == CPU_LOOP:
        return lambda a, b, c: gm.matmul(a, b, out=c, rung="triple_loop")
    if name == NUMPY:
        return lambda a, b, c: np.matmul(a, b, out=c)
    from gemmule.lab.peers import registry

    peer = next(p for p in registry.all_peers("cpu") if p.name == name)
    reason = peer.absent()
    if reason is not None:
        return reason

    def multiply(a: Any, b: Any, c: Any) -> None:
        prepared = peer.prepare(gm.plan("matmul", a, b).problem, a, b)
        prepared.call()
        c[...] = prepared.result()

    return multiply


def gpu_multiply(name: str, ordinal: int) -> Multiply | str:
    """Return a host-to-host product on the GPU by name, or why there is none here."""
    made = cublas_multiply() if name == CUBLAS else None
    if isinstance(made, str):
        return made
    chosen = made or rung_multiply({NAIVE: "naive", SHARED: "shared_tile"}[name])

    def multiply(a: Any, b: Any, c: Any) -> None:
        once((a, b, c), chosen, ordinal)

    return multiply


def proof(bench: Bench, names: Names, case: Case) -> Found:
    """Multiply matrices of random sizes by every implementation, and judge each result.

    ArithmeticError stops the study. The figure is the largest difference between any two results.
    """
    rng = np.random.default_rng()
    sizes = [int(n) for n in rng.integers(1, LARGEST_PROOF + 1, int(case["runs"]))]
    chosen = {name: cpu_multiply(name) for name in (CPU_LOOP, EIGEN, NUMPY)}
    if bench.backend == "cuda":
        ordinal = ordinal_of(bench)
        chosen |= {name: gpu_multiply(name, ordinal) for name in (NAIVE, SHARED, CUBLAS)}
    present = {name: made for name, made in chosen.items() if not isinstance(made, str)}
    worst = 0.0
    for n in sizes:
        results = _results(n, present, rng)
        worst = max([worst, *(float(np.abs(a - b).max()) for a in results for b in results)])
    figures = {"products": float(len(sizes) * len(present)), "largest difference": worst}
    absent = ", ".join(name for name in chosen if name not in present)
    note = f"sizes {', '.join(map(str, sizes))}" + (f"; without {absent}" if absent else "")
    return dict.fromkeys(names, Measured(figures=figures, note=note))


def _results(n: int, present: Mapping[str, Multiply], rng: np.random.Generator) -> list[Any]:
    a, b = (rng.standard_normal((n, n), np.float32) for _ in "AB")
    results = []
    for name, multiply in present.items():
        c = np.full((n, n), np.nan, np.float32)
        multiply(a, b, c)
        try:
            judge(a, b, c)
        except ArithmeticError as error:
            raise ArithmeticError(f"{name}: {error}") from None
        results.append(c)
    return results


def small_check(bench: Bench, names: Names, case: Case) -> Found:
    """Judge the named libraries on matrices that do not commute; ArithmeticError when wrong."""
    found = {}
    for name in names:
        gpu = name == CUBLAS
        made = gpu_multiply(name, ordinal_of(bench)) if gpu else cpu_multiply(name)
        if isinstance(made, str):
            found[name] = Measured(note=made)
            continue
        _results(int(case["n"]), {name: made}, np.random.default_rng(32))
        found[name] = Measured(figures={"right": 1.0})
    return found


def cpu_total(bench: Bench, names: Names, case: Case) -> Found:
    """Return the times of whole products on the CPU; each implementation rests before it runs."""
    n = int(case["n"])
    rng = np.random.default_rng(n)
    a, b = (rng.standard_normal((n, n), np.float32) for _ in "AB")
    found = {}
    for name in names:
        call = _call(name, a, b)
        if isinstance(call, str):
            found[name] = Measured(note=call)
            continue
        time.sleep(REST_S)
        call()
        runs: list[float] = []
        start = time.perf_counter()
        while len(runs) < 3 or (time.perf_counter() - start < BUDGET_S and len(runs) < 50):
            begin = time.perf_counter()
            call()
            runs.append((time.perf_counter() - begin) * 1e6)
            if runs[-1] > 4e6 * BUDGET_S:
                break
        times = times_of_us(runs)
        found[name] = Measured(times, {"gflops": 2e-3 * n**3 / times.median})
    return found


def _call(name: str, a: Any, b: Any) -> Callable[[], Any] | str:
    """Return one product of given host matrices, its result's memory allocated beforehand."""
    if name == EIGEN:
        calls = peer_calls(EIGEN, "matmul", [(a, b)])
        return calls if isinstance(calls, str) else calls[0]
    multiply, c = cpu_multiply(name), np.empty_like(a)
    return multiply if isinstance(multiply, str) else lambda: multiply(a, b, c)


def largest(bench: Bench, names: Names, case: Case) -> Found:
    """Find the largest n, in thousands, whose three matrices fit, and what the next one gives."""
    ordinal = ordinal_of(bench)
    bench.release()
    free_bytes, _ = driver.memory_bytes(ordinal)
    n = int((free_bytes / 12) ** 0.5) // STEP * STEP
    while n > 0 and not isinstance(_fits(n, ordinal), float):
        n -= STEP
    refusal = _fits(n + STEP, ordinal)
    figures = {"largest n": float(n), "next n refused": float(isinstance(refusal, str))}
    found = {"allocation": Measured(figures=figures, note=str(refusal))}
    if "product" in names:
        made = cublas_multiply()
        found["product"] = (
            Measured(note=made) if isinstance(made, str) else split_product(n, made, ordinal, 0)
        )
    return {name: found[name] for name in names}


def _fits(n: int, ordinal: int) -> float | str:
    """Allocate three n x n matrices and give them back; return 1.0, or the error's words."""
    pointers: list[int] = []
    try:
        for _ in "ABC":
            pointers.append(driver.allocate(4 * n * n, ordinal))
    except DeviceError as error:
        return str(error)
    finally:
        for pointer in pointers:
            driver.free(pointer, ordinal)
    return 1.0


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


def split_product(n: int, multiply: Callable[..., None], ordinal: int, repeats: int) -> Measured:
    """Return the median parts of `repeats` products of n x n, after one that is not counted.

    Judged by the oracle on sampled rows; ArithmeticError for a wrong result.
    """
    a, b = (_numbers(n, seed) for seed in (1, 2))
    c = np.empty_like(a)
    try:
        first = once((a, b, c), multiply, ordinal)
        judge(a, b, c)
        runs = [once((a, b, c), multiply, ordinal) for _ in range(repeats)]
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
