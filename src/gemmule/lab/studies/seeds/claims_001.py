"""What document 001 says, and the rules that decide each sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from gemmule.lab.records.results import geomean
from gemmule.lab.studies import verdicts
from gemmule.lab.studies.published import published
from gemmule.lab.studies.records import Claim, Finding, Rows, decided, unmeasured

CPU_LOOP, EIGEN, NUMPY = "cpu loop", "eigen", "numpy"
NAIVE, SHARED, CUBLAS = "naive", "shared tile", "cublas"
FMA_ON, FMA_OFF = "naive, fused", "naive, multiply and add apart"
TOTAL, KERNELS = "total", "kernels"
FIRST_SIZES = (64, 1024)


def by_size(rows: Rows, name: str, part: str | None = None) -> dict[int, float]:
    """Return n -> microseconds of an implementation's totals, or of one part of them."""
    return {
        int(row.case["n"]): row.us if part is None else row.figures[part]
        for row in rows.where(TOTAL, name=name).timed()
        if part is None or part in row.figures
    }


def break_even(cpu: Mapping[int, float], gpu: Mapping[int, float]) -> int | None:
    """Return the smallest common size from which the GPU is faster at every size, or None.

    >>> break_even({1: 1.0, 10: 9.0, 50: 80.0}, {1: 20.0, 10: 20.0, 50: 25.0})
    50
    """
    found = None
    for n in sorted(set(cpu) & set(gpu), reverse=True):
        if gpu[n] >= cpu[n]:
            break
        found = n
    return found


def _break_even(cpu: str, gpu: str, key: str) -> Callable[[Rows], Finding]:
    printed = published("001")["break_even"][key]

    def judge(rows: Rows) -> Finding:
        left, right = by_size(rows, cpu), by_size(rows, gpu)
        name, substitute = cpu, ""
        if not left and cpu == EIGEN:
            left, name = by_size(rows, NUMPY), NUMPY
            substitute = " (Eigen is not installed here; NumPy's BLAS in its place)"
        if not set(left) & set(right):
            return unmeasured(verdicts.NO_GPU)
        ours = break_even(left, right)
        if ours is None:
            return decided(False, f"{gpu} never overtakes {name} for good{substitute}")
        return decided(
            printed / 2 <= ours <= 2 * printed,
            f"{gpu} is faster than {name} from n = {ours}{substitute}, {printed} printed",
        )

    return judge


def _loading(rows: Rows) -> Finding:
    found = rows.where(TOTAL, name=SHARED).timed()
    small = [
        sum(row.figures[part] for part in ("allocate", "host to device", "device to host", "free"))
        for row in found
        if int(row.case["n"]) <= 101
    ]
    if not small:
        return unmeasured(verdicts.NO_GPU)
    ms = float(np.median(small)) / 1000
    words = f"{ms:.3f} ms to allocate, copy both ways and free, median over n <= 101"
    return decided(0.125 <= ms <= 0.5, words)


def _cpu_slow(rows: Rows) -> Finding:
    cpu, gpu = by_size(rows, CPU_LOOP), by_size(rows, SHARED)
    near = [n for n in set(cpu) & set(gpu) if 900 <= n <= 1100]
    if not near:
        return unmeasured(verdicts.NO_GPU)
    n = max(near)
    words = f"n = {n}: CPU loop {cpu[n] / 1e6:.2f} s, GPU {gpu[n] / 1e3:.2f} ms"
    return decided(cpu[n] > 10 * gpu[n] and cpu[n] > 1e5, words)


def _eigen_45_s(rows: Rows) -> Finding:
    times, name = by_size(rows, EIGEN), EIGEN
    if not times:
        return unmeasured("Eigen's headers or a compiler are not installed")
    n = max(times)
    seconds = times[n] * 1e-6 * (10000 / n) ** 3
    words = "measured" if n == 10000 else f"n^3 from n = {n}"
    return decided(seconds > 45, f"{name} takes {seconds:.1f} s at 10000 ({words})")


def _cublas_10_s(rows: Rows) -> Finding:
    times = by_size(rows, CUBLAS)
    if not times:
        return unmeasured(verdicts.NO_GPU)
    n = max(times)
    seconds = times[n] * 1e-6 * max(1.0, (26000 / n) ** 3)
    words = "measured" if n >= 26000 else f"n^3 from n = {n}"
    return decided(seconds < 10, f"{seconds:.2f} s at {max(n, 26000)} ({words})")


def exponent(times: Mapping[int, float]) -> float:
    """Return the slope of log time over log n by least squares.

    >>> round(exponent({10: 1.0, 100: 1000.0}), 3)
    3.0
    """
    n, t = np.log(list(times)), np.log(list(times.values()))
    return float(np.polyfit(n, t, 1)[0])


def _scales_alike(rows: Rows) -> Finding:
    cpu = {n: t for n, t in by_size(rows, CPU_LOOP).items() if n >= 256}
    naive = {n: t for n, t in by_size(rows, NAIVE, "kernel").items() if n >= 256}
    if len(cpu) < 2 or len(naive) < 2:
        return unmeasured(verdicts.NO_GPU)
    left, right = exponent(cpu), exponent(naive)
    return decided(
        abs(left - right) < 0.3,
        f"time grows as n^{left:.2f} on the CPU and n^{right:.2f} in the naive kernel, from 256",
    )


def _shared_far_faster(rows: Rows) -> Finding:
    naive, shared = by_size(rows, NAIVE, "kernel"), by_size(rows, SHARED, "kernel")
    ratios = [naive[n] / shared[n] for n in set(naive) & set(shared) if n >= 512]
    if not ratios:
        return unmeasured(verdicts.NO_GPU)
    words = f"kernel times, naive in blocks of one thread over shared: {verdicts.spread(ratios)}"
    return decided(geomean(ratios) >= 5, words)


def _compute_peak(rows: Rows) -> Finding:
    fma = rows.ceiling("fma float32", "cuda")
    one = rows.where(KERNELS, name="shared tile 32", temperature="warm").timed()
    if fma is None or not one:
        return unmeasured(verdicts.NO_GPU)
    row = max(one, key=lambda r: int(r.case["n"]))
    share = row.figures["gflops"] / fma
    words = f"{row.figures['gflops']:,.0f} of {fma:,.0f} GFLOP/s: {100 * share:.0f} %"
    counted = rows.where("counters").figure("SM throughput percent")
    if counted is not None:
        words += (
            f"; the profiler's busiest unit of the multiprocessor is at {counted:.0f} %, which is "
            "not the arithmetic"
        )
    return decided(share > 0.8, words)


def _bank_conflicts(rows: Rows) -> Finding:
    counted = rows.where("counters", backend="cuda")
    found = [counted.figure(f"bank conflicts, {which}") for which in ("loads", "stores")]
    conflicts, waves = [v for v in found if v is not None], counted.figure("shared load wavefronts")
    if not conflicts or waves is None:
        return verdicts.uncounted(counted)
    words = f"{sum(conflicts):,.0f} in {waves:,.0f} wavefronts of shared loads"
    return decided(sum(conflicts) / waves < 0.01, words)


def _barrier(rows: Rows) -> Finding:
    counted = rows.where("counters", backend="cuda")
    cycles = counted.figure("barrier stall cycles")
    if cycles is None:
        return verdicts.uncounted(counted)
    return decided(7 <= cycles <= 28, f"{cycles:.1f} cycles between instructions of a warp")


def _fma(rows: Rows) -> Finding:
    warm = rows.where(KERNELS, backend="cuda", temperature="warm")
    found = verdicts.no_gain(warm, FMA_ON, FMA_OFF)
    words = "; compilers fuse unless told not to, so the document compared like with like"
    return Finding(
        found.outcome, found.figure + (words if verdicts.speedups(warm, FMA_ON, FMA_OFF) else "")
    )


def _dominant(n: int, part: str) -> Callable[[Rows], Finding]:
    def judge(rows: Rows) -> Finding:
        row = next(iter(rows.where(TOTAL, name=SHARED, n=n).timed()), None)
        if row is None:
            return unmeasured(verdicts.NO_GPU)
        parts = {k: v for k, v in row.figures.items() if not k.startswith("first")}
        words = ", ".join(f"{name} {us:.0f} us" for name, us in parts.items() if name != "gflops")
        first = rows.where("first call", n=n).figure("first cudaMalloc us")
        words += "" if first is None else f"; first cudaMalloc of a process {first:,.0f} us"
        timed = {k: v for k, v in parts.items() if k != "gflops"}
        return decided(max(timed, key=lambda k: timed[k]) == part, f"n = {n}: {words}")

    return judge


def _order(rows: Rows) -> Finding:
    """Compute what a column-major library makes of row-major operands: no device is needed."""
    a, b = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.0, 1.0], [1.0, 1.0]])
    seen = (a.T @ b.T).T  # both read as their transposes, the result written as its transpose
    is_ab, is_ba = np.array_equal(seen, a @ b), np.array_equal(seen, b @ a)
    return decided(is_ab, f"it gives B A: {is_ba}; A^T B^T = (B A)^T, so swap the operands")


def _epsilon(rows: Rows) -> Finding:
    """Apply the document's comparison to NaN, and to the rounding of a long sum."""
    passes = not abs(float("nan") - 1.0) > float(np.finfo(np.float32).eps)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(4096).astype(np.float32) for _ in "xy")
    error = abs(float(np.float32(math.fsum(x * y))) - float(np.cumsum(x * y, dtype=np.float32)[-1]))
    words = f"NaN passes: {passes}; a right sum of 4,096 products is off by {error:.1e}"
    return decided(not passes and error <= float(np.finfo(np.float32).eps), words)


def _memory_end(rows: Rows) -> Finding:
    found = rows.where("largest", name="allocation")
    n, refused = found.figure("largest n"), found.figure("next n refused")
    if n is None or refused is None:
        return unmeasured(verdicts.NO_GPU)
    note = next(row.note for row in found)
    return decided(n == 26000, f"here {n:,.0f} fits and the next thousand gives: {note}")


_TWICE = "within a factor of two of the printed size"
CLAIMS = (
    Claim("break-even-library", "Up to 41 x 41 Eigen is faster than cuBLAS.",
          f"confirmed if the GPU's total is smaller from a size {_TWICE} on",
          _break_even(EIGEN, CUBLAS, "eigen_cublas")),
    Claim("break-even-own", "Up to 64 x 64 the CPU is faster than the own kernels.",
          f"confirmed if the GPU's total is smaller from a size {_TWICE} on",
          _break_even(CPU_LOOP, SHARED, "cpu_own")),
    Claim("loading", "Loading takes about 0.25 ms.",
          "confirmed between 0.125 and 0.5 ms, kernel excluded", _loading),
    Claim("cpu-slow", "The CPU gets slow at about 1000.",
          "confirmed if its loop takes over 0.1 s and ten times the GPU's total there", _cpu_slow),
    Claim("eigen-45", "Eigen takes over 45 s at 10000.", "confirmed if measured, or extrapolated "
          "by n^3 from the largest size, above 45 s", _eigen_45_s),
    Claim("cublas-10", "cuBLAS stays below 10 s up to 26000, copies included.",
          "confirmed if measured, or extrapolated by n^3, below 10 s", _cublas_10_s),
    Claim("memory-end", "26000 is the largest size; 27000 runs out of memory.",
          "confirmed if 26000 is the largest thousand here too", _memory_end),
    Claim("naive-scales", "The naive kernel scales nearly as badly as the CPU.",
          "confirmed if the exponents of n differ by less than 0.3", _scales_alike),
    Claim("shared-gain", "Shared memory makes an immense difference to the naive kernel.",
          "confirmed if the kernel is 5 times as fast from n = 512 on", _shared_far_faster),
    Claim("peak", "The shared kernel uses over 80 % of the computing power.",
          "confirmed if it reaches 80 % of the measured FMA ceiling", _compute_peak),
    Claim("banks", "There are no bank conflicts.",
          "confirmed if counted conflicts are below 1 % of the wavefronts (the counter takes in "
          "arbitration with other traffic)", _bank_conflicts),
    Claim("barrier", "A warp waits 14 cycles at barriers.",
          "confirmed within a factor of two", _barrier),
    Claim("fmaf", "Fused multiply-add brings no gain.",
          "confirmed unless faster than separate operations by more than 2 %", _fma),
    Claim("kernel-1024", "At 1024 the kernel takes most of the time.",
          "confirmed if it is the largest part", _dominant(1024, "kernel")),
    Claim("malloc-64", "At 64 allocating takes most of the time, the first cudaMalloc above all.",
          "confirmed if it is the largest part", _dominant(64, "allocate")),
    Claim("order", "A column-major library needs no change for row-major operands.",
          "confirmed if 2 x 2 matrices that do not commute come out as A B", _order),
    Claim("epsilon", "FLT_EPSILON as an absolute tolerance tells right results from wrong ones.",
          "confirmed if NaN fails it and a right long sum passes", _epsilon),
)  # fmt: skip
