"""What document 001 says: times by size, where a GPU overtakes, and the rules of its claims."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from gemmule_lab.records.results import geomean
from gemmule_lab.records.study import Rows
from gemmule_lab.report.charts import Mark
from gemmule_lab.studies import rules
from gemmule_lab.studies.products import passes as ways
from gemmule_lab.studies.rules import Judged, counted, needed, spread

TOTAL, KERNELS, FIRST = "host to host", "kernels", "first call"
FMA_ON, FMA_OFF = "shared tile 32", "shared tile 32, multiply and add apart"
FULL_NAIVE, LONE_NAIVE, LONE_TILE = "naive, fused", "naive, blocks of one thread", "shared tile 1"
FIRST_SIZES = (64, 1024)
LOADING = ("allocate", "host to device", "device to host", "free")
CLAIMS = rules.Claims("001")


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


def crossing(rows: Rows, cpu: str, gpu: str) -> Mark | None:
    """Return where the GPU overtakes the CPU for good, between sizes by logarithms, or None.

    Its ends come from the quartiles of both times; its words are ``47 (45 to 52)``.
    """
    here = totals_of(rows)
    left, right = ({int(r.case["n"]): r.times_us for r in here.where(name=x)} for x in (cpu, gpu))
    both = [(n, left[n], right[n]) for n in sorted(set(left) & set(right))]
    middle = last_crossing({n: a.median / b.median for n, a, b in both if a and b})
    if middle is None:
        return None
    low = last_crossing({n: a.q3 / b.q1 for n, a, b in both if a and b}) or middle
    high = last_crossing({n: a.q1 / b.q3 for n, a, b in both if a and b}) or math.inf
    return Mark(f"{middle:.0f} ({low:.0f} to {high:.0f})", middle, low, high)


def last_crossing(ratios: Mapping[int, float]) -> float | None:
    """Return the size at which a ratio rises above 1 for good; None if it ends below.

    >>> last_crossing({1: 0.1, 10: 0.5, 40: 2.0, 50: 3.0})
    20.0
    """
    sizes = sorted(ratios)
    below = [n for n in sizes if ratios[n] <= 1]
    if not sizes or below[-1:] == sizes[-1:]:
        return None
    if not below:
        return float(sizes[0])
    n, after = below[-1], sizes[sizes.index(below[-1]) + 1]
    share = -math.log(ratios[n]) / math.log(ratios[after] / ratios[n])
    return round(math.exp(math.log(n) + share * math.log(after / n)), 6)


@CLAIMS.rule("break-even-library", ways.EIGEN, ways.CUBLAS, "eigen_cublas")
@CLAIMS.rule("break-even-own", ways.CPU_LOOP, ways.SHARED, "cpu_own")
def _break_even(rows: Rows, cpu: str, gpu: str, key: str) -> Judged:
    printed, substitute = rules.document("001")["printed"]["break_even"][key], ""
    if not by_size(rows, cpu) and cpu == ways.EIGEN:
        cpu, substitute = ways.NUMPY, " (Eigen is not installed here; NumPy's BLAS in its place)"
    needed(set(by_size(rows, cpu)) & set(by_size(rows, gpu)), rules.NO_PAIR)
    ours = crossing(rows, cpu, gpu)
    if ours is None:
        return Judged(False, f"{gpu} never overtakes {cpu} for good{substitute}")
    words = f"{gpu} is faster than {cpu} from n = {ours.label}{substitute}, {printed} printed"
    return Judged(printed / 2 <= ours.at <= 2 * printed, words, ours.at)


@CLAIMS.rule("loading")
def _loading(rows: Rows) -> Judged:
    found = [r for r in totals_of(rows).where(name=ways.SHARED) if int(r.case["n"]) <= 101]
    ms = float(np.median([sum(r.figures[p] for p in LOADING) for r in needed(found)])) / 1000
    words = f"{ms:.3f} ms to allocate, copy both ways and free, median over n <= 101"
    return Judged(0.125 <= ms <= 0.5, words, ms)


@CLAIMS.rule("cpu-slow")
def _cpu_slow(rows: Rows) -> Judged:
    cpu, gpu = by_size(rows, ways.CPU_LOOP), by_size(rows, ways.SHARED)
    near = [n for n in sorted(set(cpu) & set(gpu)) if 900 <= n <= 1100]
    n = min(needed(near, rules.NO_PAIR), key=lambda n: abs(n - 1000))
    told = (
        f"n = {m}: CPU loop {cpu[m] / 1e6:.2f} s, GPU {gpu[m] / 1e3:.2f} ms"
        for m in dict.fromkeys((n, max(near)))
    )
    return Judged(cpu[n] > 10 * gpu[n] and cpu[n] > 1e5, "; ".join(told), cpu[n] / 1e6)


@CLAIMS.rule("exponential")
def _exponential(rows: Rows) -> Judged:
    """Hold the times against a power of n and against an exponential, by what a line leaves."""
    words, holds, last = [], [], 0.0
    for name in (ways.EIGEN, ways.CUBLAS):
        times = {n: us for n, us in by_size(rows, name).items() if n >= 1000}
        needed([*times][2:], rules.NO_PAIR)
        n, t = (np.array([*values], float) for values in (times, times.values()))
        left = [float(np.polyfit(x, np.log(t), 1, full=True)[1][0]) for x in (np.log(n), n)]
        last = exponent(times)
        holds.append(left[1] < left[0])
        words.append(f"{name} grows as n^{last:.2f} ({left[0] / left[1]:.2f})")
    told = f"{', '.join(words)}; in brackets a power's squared error, an exponential's being 1"
    return Judged(all(holds), told, last)


@CLAIMS.rule("eigen-45", ways.EIGEN, 10000, 45, "Eigen's headers or a compiler are not installed")
@CLAIMS.rule("cublas-10", ways.CUBLAS, 26000, -10, rules.NO_GPU)
def _seconds(rows: Rows, name: str, n: int, limit: float, why: str) -> Judged:
    """Judge the seconds at n, by n^3 where only smaller ones are on file; limit < 0: below it."""
    words, seconds = [], []
    for one in (name, ways.HIS_EIGEN) if name == ways.EIGEN else (name,):
        if times := by_size(rows, one):
            last = max(times)
            seconds.append(1e-6 * times.get(n, times[last] * max(1.0, (n / last) ** 3)))
            told = "measured" if last >= n else f"n^3 from n = {last}"
            words.append(f"{one} takes {seconds[-1]:.2f} s at {n} ({told})")
    took = needed(seconds, why)[0]
    return Judged(took > limit if limit > 0 else took < -limit, "; ".join(words), took)


def exponent(times: Mapping[int, float]) -> float:
    """Return the slope of log time over log n by least squares.

    >>> round(exponent({10: 1.0, 100: 1000.0}), 3)
    3.0
    """
    n, t = np.log(list(times)), np.log(list(times.values()))
    return float(np.polyfit(n, t, 1)[0])


@CLAIMS.rule("naive-scales")
def _scales_alike(rows: Rows) -> Judged:
    kernels = (by_size(rows, name, "kernel") for name in (ways.NAIVE, ways.SHARED))
    every = (by_size(rows, ways.CPU_LOOP), *kernels)
    large = [{n: t for n, t in times.items() if n >= 256} for times in every]
    needed([*large[0]][1:] and [*large[1]][1:], rules.NO_PAIR)
    left, right, *shared = (exponent(times) for times in large if len(times) > 1)
    words = (
        f"from 256 on time grows as n^{left:.2f} on the CPU and n^{right:.2f} in the naive kernel"
    )
    if shared:
        full = exponent({n: t for n, t in large[2].items() if n >= 1000} or large[2])
        words += f", n^{shared[0]:.2f} in the shared one (n^{full:.2f} from 1000 on)"
    return Judged(abs(left - right) < 0.3, words, right)


@CLAIMS.rule("peak")
def _profilers_peak(rows: Rows) -> Judged:
    busiest, fma = _counters(rows, "SM throughput percent", "FMA pipe percent")
    return Judged(busiest > 80, f"{busiest:.0f} %, of the FMA pipe {fma:.0f} %", busiest)


def _counters(rows: Rows, *names: str) -> list[float]:
    return counted(rows.where("counters", backend="cuda"), *names)


@CLAIMS.rule("computing")
def _computing(rows: Rows) -> Judged:
    fma = needed(rows.ceiling("fma float32", "cuda"))
    one = needed(rows.where(KERNELS, name=FMA_ON, temperature="warm").timed())
    gflops = max(one, key=lambda r: int(r.case["n"])).figures["gflops"]
    words = f"{gflops:,.0f} of {fma:,.0f} GFLOP/s: {100 * gflops / fma:.0f} %"
    return Judged(gflops / fma > 0.8, words, gflops / fma)


@CLAIMS.rule("banks")
def _bank_conflicts(rows: Rows) -> Judged:
    """Count the words that a warp wants of one bank at once, by address and by the profiler."""
    counts = (f"bank conflicts, {what}" for what in ("loads", "stores"))
    passes = (f"shared {what} wavefronts" for what in ("load", "store"))
    loads, stores, load_passes, store_passes = _counters(rows, *counts, *passes)
    asked = ([32 * 5 + lane for lane in range(32)], [32 * 5 + 7] * 32, [*range(32)])
    banks = [len({w for w in words if w % 32 == bank}) for words in asked for bank in range(32)]
    words = (
        f"by addresses {max(banks)} word a bank at most; counted {100 * loads / load_passes:.2f} % "
        f"of load passes, {100 * stores / (store_passes - stores):.1f} % of stores"
    )
    return Judged(max(banks) == 1 and loads < 0.01 * load_passes, words, loads / load_passes)


@CLAIMS.rule("barrier")
def _barrier(rows: Rows) -> Judged:
    (cycles,) = _counters(rows, "barrier stall cycles")
    return Judged(7 <= cycles <= 28, f"{cycles:.1f} cycles between a warp's instructions", cycles)


@CLAIMS.rule("other-approach")
def _other_approach(rows: Rows) -> Judged:
    here = rows.where("barriers", backend="cuda") or rows.where("counters", backend="cuda")
    names = ("rectangular_tile", "shared_tile")
    wide, square = (counted(here.where(name=one), "barrier stall cycles")[0] for one in names)
    words = f"{wide:.2f} cycles with rectangular tiles for {square:.2f} with square ones"
    return Judged(wide < square, words, wide)


@CLAIMS.rule("equal-small")
def _equal_when_small(rows: Rows) -> Judged:
    loop = {n: us for n, us in by_size(rows, ways.CPU_LOOP).items() if n <= 64}
    words, means = [], []
    for name in (ways.NAIVE, ways.SHARED):
        kernel = by_size(rows, name, "kernel")
        ratios = needed([kernel[n] / loop[n] for n in loop if n in kernel], rules.NO_PAIR)
        means.append(geomean(ratios))
        words.append(f"the {name} kernel over the CPU loop {spread(ratios)}")
    words.append(f"n from {min(loop)} to {max(loop)}")
    return Judged(all(0.5 <= mean <= 2 for mean in means), "; ".join(words), means[-1])


@CLAIMS.rule("balanced")
def _balanced(rows: Rows) -> Judged:
    busy = _counters(rows, "SM throughput percent", "memory throughput percent")
    words = f"multiprocessor {busy[0]:.0f} %, memory (shared memory included) {busy[1]:.0f} %"
    return Judged(max(busy) <= 1.25 * min(busy), words, busy[1])


@CLAIMS.rule("kernel-1024", 1024, "kernel")
@CLAIMS.rule("malloc-64", 64, "allocate")
def _dominant(rows: Rows, n: int, part: str) -> Judged:
    row = needed(next(iter(totals_of(rows).where(name=ways.SHARED, n=n)), None))
    timed = {k: us for k, us in row.figures.items() if not k.startswith("first") and k != "gflops"}
    words = ", ".join(f"{name} {us:.0f} us" for name, us in timed.items())
    holds = max(timed, key=lambda k: timed[k]) == part
    first = next((r.figures for r in rows.where(FIRST, n=n) if r.figures), None)
    if first is not None and part == "allocate":
        making = first["context us"] + first["first cudaMalloc us"]
        rest = first["load us"] + first["first launch us"]
        holds = holds or making > rest
        told = f"context and cudaMalloc {making:,.0f} us, load and launch {rest:,.0f}"
        words = f"first call: {told}; later: {words}"
    return Judged(holds, f"n = {n}: {words}", timed[part])


@CLAIMS.rule("memory-end")
def _memory_end(rows: Rows) -> Judged:
    found = rows.where("largest", name="the next size")
    n = needed(found.figure("largest n"))
    note = next(row.note for row in found).partition(". ")[0]
    return Judged(n == 26000, f"here {n:,.0f} fits; the next thousand says: {note}", n)
