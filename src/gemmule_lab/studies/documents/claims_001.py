"""What document 001 says: times by size, where a GPU overtakes, and each sentence's rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gemmule_lab.records.results import geomean
from gemmule_lab.studies import verdicts
from gemmule_lab.studies.products.passes import CPU_LOOP, CUBLAS, EIGEN, NAIVE, NUMPY, SHARED
from gemmule_lab.studies.records import Finding, Rows, decided
from gemmule_lab.studies.verdicts import needed, published

TOTAL = "host to host"
FMA_ON, FMA_OFF = "shared tile 32", "shared tile 32, multiply and add apart"
LONE_NAIVE, LONE_TILE = "naive, blocks of one thread", "shared tile 1"
KERNELS = "kernels"
REFUSED = "the next size"
CONFLICTS = "bank conflicts"
STORE_PASSES, LOAD_PASSES = "shared store wavefronts", "shared load wavefronts"
FIRST_SIZES = (64, 1024)
SMALL = 64
BALANCED, ALIKE = 1.25, 1.1
CLAIMS = verdicts.Claims("001")


def totals_of(rows: Rows) -> Rows:
    """Return the timed products from host to host."""
    return rows.where(TOTAL).timed()


def by_size(rows: Rows, name: str, part: str | None = None) -> dict[int, float]:
    """Return n -> microseconds of an implementation's totals, or of one part of them."""
    return {
        int(row.case["n"]): row.us if part is None else row.figures[part]
        for row in totals_of(rows).where(name=name)
        if part is None or part in row.figures
    }


@dataclass(frozen=True, slots=True)
class Crossing:
    """The size from which the GPU stays faster, and its ends by the quartiles of both times."""

    n: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """The size and its interval, ``47 (45 to 52)``."""
        return f"{self.n:.0f} ({self.low:.0f} to {self.high:.0f})"


def crossing(rows: Rows, cpu: str, gpu: str) -> Crossing | None:
    """Return where the GPU overtakes the CPU for good, between sizes by logarithms, or None."""
    left, right = (
        {int(row.case["n"]): row.times_us for row in totals_of(rows).where(name=name)}
        for name in (cpu, gpu)
    )
    common = sorted(set(left) & set(right))
    times = [
        (n, a, b) for n in common if (a := left[n]) is not None and (b := right[n]) is not None
    ]
    middle = last_crossing({n: a.median / b.median for n, a, b in times})
    if middle is None:
        return None
    low = last_crossing({n: a.q3 / b.q1 for n, a, b in times})
    high = last_crossing({n: a.q1 / b.q3 for n, a, b in times})
    return Crossing(middle, low or middle, float("inf") if high is None else high)


def last_crossing(ratios: Mapping[int, float]) -> float | None:
    """Return the size at which a ratio rises above 1 for good; None if it ends below.

    >>> last_crossing({1: 0.1, 10: 0.5, 40: 2.0, 50: 3.0})
    20.0
    """
    sizes = sorted(ratios)
    if not sizes or ratios[sizes[-1]] <= 1:
        return None
    below = [n for n in sizes if ratios[n] <= 1]
    if not below:
        return float(sizes[0])
    n, after = below[-1], sizes[sizes.index(below[-1]) + 1]
    share = -math.log(ratios[n]) / math.log(ratios[after] / ratios[n])
    return round(math.exp(math.log(n) + share * math.log(after / n)), 6)


@CLAIMS.rule("break-even-library", EIGEN, CUBLAS, "eigen_cublas")
@CLAIMS.rule("break-even-own", CPU_LOOP, SHARED, "cpu_own")
def _break_even(rows: Rows, cpu: str, gpu: str, key: str) -> Finding:
    printed, substitute = published("001")["break_even"][key], ""
    if not by_size(rows, cpu) and cpu == EIGEN:
        cpu, substitute = NUMPY, " (Eigen is not installed here; NumPy's BLAS in its place)"
    needed(set(by_size(rows, cpu)) & set(by_size(rows, gpu)), verdicts.NO_PAIR)
    ours = crossing(rows, cpu, gpu)
    if ours is None:
        return decided(False, f"{gpu} never overtakes {cpu} for good{substitute}")
    words = f"{gpu} is faster than {cpu} from n = {ours.words}{substitute}, {printed} printed"
    return decided(printed / 2 <= ours.n <= 2 * printed, words)


@CLAIMS.rule("loading")
def _loading(rows: Rows) -> Finding:
    found = totals_of(rows).where(name=SHARED)
    small = [
        sum(row.figures[part] for part in ("allocate", "host to device", "device to host", "free"))
        for row in found
        if int(row.case["n"]) <= 101
    ]
    ms = float(np.median(needed(small))) / 1000
    words = f"{ms:.3f} ms to allocate, copy both ways and free, median over n <= 101"
    return decided(0.125 <= ms <= 0.5, words)


@CLAIMS.rule("cpu-slow")
def _cpu_slow(rows: Rows) -> Finding:
    cpu, gpu = by_size(rows, CPU_LOOP), by_size(rows, SHARED)
    near = [n for n in set(cpu) & set(gpu) if 900 <= n <= 1100]
    n = max(needed(near, verdicts.NO_PAIR))
    words = f"n = {n}: CPU loop {cpu[n] / 1e6:.2f} s, GPU {gpu[n] / 1e3:.2f} ms"
    return decided(cpu[n] > 10 * gpu[n] and cpu[n] > 1e5, words)


def _seconds_at(rows: Rows, name: str, n: int, why: str = verdicts.NO_GPU) -> tuple[float, str]:
    """Return the seconds of a product of n x n, by n^3 where only smaller ones are on file."""
    times = by_size(rows, name)
    last = max(needed(times, why))
    words = "measured" if last >= n else f"n^3 from n = {last}"
    return times[last] * 1e-6 * max(1.0, (n / last) ** 3), words


@CLAIMS.rule("eigen-45")
def _eigen_45_s(rows: Rows) -> Finding:
    why = "Eigen's headers or a compiler are not installed"
    seconds, words = _seconds_at(rows, EIGEN, 10000, why)
    return decided(seconds > 45, f"{EIGEN} takes {seconds:.1f} s at 10000 ({words})")


@CLAIMS.rule("cublas-10")
def _cublas_10_s(rows: Rows) -> Finding:
    seconds, words = _seconds_at(rows, CUBLAS, 26000)
    return decided(seconds < 10, f"{seconds:.2f} s at 26000 ({words})")


def exponent(times: Mapping[int, float]) -> float:
    """Return the slope of log time over log n by least squares.

    >>> round(exponent({10: 1.0, 100: 1000.0}), 3)
    3.0
    """
    n, t = np.log(list(times)), np.log(list(times.values()))
    return float(np.polyfit(n, t, 1)[0])


@CLAIMS.rule("naive-scales")
def _scales_alike(rows: Rows) -> Finding:
    cpu = {n: t for n, t in by_size(rows, CPU_LOOP).items() if n >= 256}
    naive = {n: t for n, t in by_size(rows, NAIVE, "kernel").items() if n >= 256}
    needed(min(len(cpu), len(naive)) > 1 or None, verdicts.NO_PAIR)
    left, right = exponent(cpu), exponent(naive)
    return decided(
        abs(left - right) < 0.3,
        f"time grows as n^{left:.2f} on the CPU and n^{right:.2f} in the naive kernel, from 256",
    )


@CLAIMS.rule("shared-gain")
def _shared_far_faster(rows: Rows) -> Finding:
    naive, shared = by_size(rows, NAIVE, "kernel"), by_size(rows, SHARED, "kernel")
    ratios = needed([naive[n] / shared[n] for n in set(naive) & set(shared) if n >= 512])
    words = f"kernel times, naive in blocks of one thread over shared: {verdicts.spread(ratios)}"
    return decided(geomean(ratios) >= 5, words)


@CLAIMS.rule("peak")
def _compute_peak(rows: Rows) -> Finding:
    fma = needed(rows.ceiling("fma float32", "cuda"))
    one = needed(rows.where(KERNELS, name="shared tile 32", temperature="warm").timed())
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


@CLAIMS.rule("banks")
def _bank_conflicts(rows: Rows) -> Finding:
    counted = rows.where("counters", backend="cuda")
    conflicts, stores = verdicts.counted(counted, f"{CONFLICTS}, stores", STORE_PASSES)
    loads, waves = (counted.figure(name) for name in (f"{CONFLICTS}, loads", LOAD_PASSES))
    requests = stores - conflicts  # a request is one pass, and one more for each conflict
    share = conflicts / requests if requests else 0.0
    words = f"{conflicts:,.0f} in {requests:,.0f} stores to shared memory, {100 * share:.1f} %"
    if loads is not None and waves is not None:
        words += f"; of loads {loads:,.0f} in {waves:,.0f} passes, {100 * loads / waves:.2f} %"
    words += "; by its addresses a warp meets each bank once: what is counted is arbitration"
    return decided(share < 0.01, words)


@CLAIMS.rule("barrier")
def _barrier(rows: Rows) -> Finding:
    (cycles,) = verdicts.counted(rows.where("counters", backend="cuda"), "barrier stall cycles")
    return decided(7 <= cycles <= 28, f"{cycles:.1f} cycles between instructions of a warp")


@CLAIMS.rule("fmaf")
def _fma(rows: Rows) -> Finding:
    warm = rows.where(KERNELS, backend="cuda", temperature="warm")
    found = verdicts.no_gain(warm, FMA_ON, FMA_OFF)
    words = "; compilers fuse unless told not to, so the document compared like with like"
    naive = verdicts.speedups(warm, "naive, fused", "naive, multiply and add apart")
    words += f"; of the naive kernel {verdicts.spread(list(naive.values()))}" if naive else ""
    return Finding(found.outcome, found.figure + words)


@CLAIMS.rule("tile-1")
def _tile_one(rows: Rows) -> Finding:
    warm = rows.where(KERNELS, backend="cuda", temperature="warm")
    ratios = needed(verdicts.speedups(warm, LONE_TILE, LONE_NAIVE))
    holds = 1 / ALIKE <= geomean(ratios.values()) <= ALIKE
    return verdicts.of_ratios(ratios, holds, f"{LONE_TILE} against {LONE_NAIVE}, times as fast:")


@CLAIMS.rule("equal-small")
def _equal_when_small(rows: Rows) -> Finding:
    loop = {n: us for n, us in by_size(rows, CPU_LOOP).items() if n <= SMALL}
    words, means = [], []
    for name in (NAIVE, SHARED):
        kernel = by_size(rows, name, "kernel")
        ratios = needed([kernel[n] / loop[n] for n in loop if n in kernel], verdicts.NO_PAIR)
        means.append(geomean(ratios))
        words.append(f"the {name} kernel over the CPU loop {verdicts.spread(ratios)}")
    words.append(f"n from {min(loop)} to {max(loop)}")
    return decided(all(0.5 <= mean <= 2 for mean in means), "; ".join(words))


@CLAIMS.rule("balanced")
def _balanced(rows: Rows) -> Finding:
    names = ("SM throughput percent", "memory throughput percent")
    known = verdicts.counted(rows.where("counters", backend="cuda"), *names)
    words = (
        f"multiprocessor at {known[0]:.0f} %, memory (shared memory included) at {known[1]:.0f} %"
    )
    return decided(max(known) <= BALANCED * min(known), words)


@CLAIMS.rule("kernel-1024", 1024, "kernel")
@CLAIMS.rule("malloc-64", 64, "allocate")
def _dominant(rows: Rows, n: int, part: str) -> Finding:
    row = needed(next(iter(totals_of(rows).where(name=SHARED, n=n)), None))
    timed = {k: us for k, us in row.figures.items() if not k.startswith("first") and k != "gflops"}
    words = ", ".join(f"{name} {us:.0f} us" for name, us in timed.items())
    first = rows.where("first call", n=n).figure("first cudaMalloc us")
    words += "" if first is None else f"; first cudaMalloc of a process {first:,.0f} us"
    return decided(max(timed, key=lambda k: timed[k]) == part, f"n = {n}: {words}")


@CLAIMS.rule("order")
def _order(rows: Rows) -> Finding:
    """Compute what a column-major library makes of row-major operands: no device is needed."""
    a, b = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.0, 1.0], [1.0, 1.0]])
    seen = (a.T @ b.T).T  # both read as their transposes, the result written as its transpose
    is_ab, is_ba = np.array_equal(seen, a @ b), np.array_equal(seen, b @ a)
    return decided(is_ab, f"it gives B A: {is_ba}; A^T B^T = (B A)^T, so swap the operands")


@CLAIMS.rule("epsilon")
def _epsilon(rows: Rows) -> Finding:
    """Apply the document's comparison to NaN, and to the rounding of a long sum."""
    passes = not abs(float("nan") - 1.0) > float(np.finfo(np.float32).eps)
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(4096).astype(np.float32) for _ in "xy")
    error = abs(float(np.float32(math.fsum(x * y))) - float(np.cumsum(x * y, dtype=np.float32)[-1]))
    words = f"NaN passes: {passes}; a right sum of 4,096 products is off by {error:.1e}"
    return decided(not passes and error <= float(np.finfo(np.float32).eps), words)


@CLAIMS.rule("memory-end")
def _memory_end(rows: Rows) -> Finding:
    found = rows.where("largest", name=REFUSED)
    n, _ = (needed(found.figure(name)) for name in ("largest n", "next n refused"))
    note = next(row.note for row in found)
    return decided(n == 26000, f"here {n:,.0f} fits; a product of the next thousand says: {note}")
