"""Document 001: matmul from host to host, by CPU loops, own kernels, cuBLAS and Eigen, in parts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from gemmule_lab.profile.single_launch import counting
from gemmule_lab.records.results import geomean
from gemmule_lab.records.study import Rows, Value
from gemmule_lab.report.charts import Bar, Bars, Mark, number
from gemmule_lab.report.tables import significant
from gemmule_lab.studies import rules
from gemmule_lab.studies.charted import Head, Picture, Spec, busy, chart
from gemmule_lab.studies.grid import Cell, Lane, Names, Step, Study, Task
from gemmule_lab.studies.products import first_call, totals
from gemmule_lab.studies.products import passes as ways
from gemmule_lab.studies.rules import Judged, counted, needed, spread

TOTAL, KERNELS, FIRST = "host to host", "kernels", "first call"
FMA_ON, FMA_OFF = "shared tile 32", "shared tile 32, multiply and add apart"
FULL_NAIVE, LONE_NAIVE, LONE_TILE = "naive, fused", "naive, blocks of one thread", "shared tile 1"
FIRST_SIZES = (64, 1024)
LOADING = ("allocate", "host to device", "device to host", "free")
CLAIMS = rules.Claims("001")
LARGEST = {ways.CPU_LOOP: 1024, ways.NAIVE: 2048, ways.SHARED: 4096}
DOUBLING = tuple(32 << i for i in range(8))
OWN_SIZES = (*range(1, 1000, 10), *range(1000, 4001, 100), *DOUBLING)
PEER_SIZES = (*range(1, 5002, 10), *range(5000, 10001, 1000))
CUBLAS_SIZES = (*PEER_SIZES, *range(10000, 26001, 1000))
FEW = (151, 201, 301, 501, 701, 991, 1000, 1001, 2000, 2001, 3000, 4000, 4001, 5001, 10000, 26000)
THIN_SIZES = frozenset((*range(1, 102, 10), *FEW, *DOUBLING))
PINNED_SIZES = (11, 64, 101, 256, 1024, 2048, 4096, 10000)
SHOWN = (11, 41, 64, 101, 256, 1024, 2048, 4096, 10000, 26000)
PROOF_RUNS, COUNTED = 10, 1024
KERNEL_SIZES = (1024, 2048)

KERNEL_LANES = (
    Lane(FULL_NAIVE, "naive"),
    Lane("naive, multiply and add apart", "naive", {"fma": False}),
    Lane("naive, sums in C", "naive", {"accumulate": "global"}),
    Lane("naive, blocks of 16 x 16", "naive", {"width": 16}),
    *(Lane(f"shared tile {t}", "shared_tile", {"tile": t}) for t in (8, 16)),
    Lane(FMA_ON, "shared_tile", {"tile": 32}),
    Lane(FMA_OFF, "shared_tile", {"tile": 32, "fma": False}),
    *(Lane(name.replace("_", " "), name) for name in ("register_tile", "vector_tile")),
    Lane("gemmule's choice", "auto"),
    Lane("torch", None, peer="torch"),
)
LONE_LANES = (
    Lane(LONE_NAIVE, "naive", {"width": 1}),
    Lane(LONE_TILE, "shared_tile", {"tile": 1}),
)


def steps(backend: str, full: bool) -> Iterable[Step]:
    """Return the grid: proofs and checks, times by size, kernels, counters, where memory ends.

    The sizes of the default grid come first, so that a full run that is stopped has them.
    """
    gpu, usual = backend == "cuda", sorted(THIN_SIZES)
    runs: dict[str, Value] = {"runs": PROOF_RUNS, "largest": totals.LARGEST_PROOF}
    yield Task("proof", ("all implementations",), runs, totals.proof)
    libraries = _here((ways.EIGEN, ways.HIS_EIGEN, ways.NUMPY, ways.CUBLAS), gpu)
    yield Task("check of 32 x 32", libraries, {"n": 32}, totals.small_check)
    for n, *names in (
        (1024, ways.CPU_LOOP, ways.EIGEN, ways.NUMPY),
        (2048, ways.NAIVE),
        (4096, ways.SHARED, ways.CUBLAS, ways.EIGEN, ways.HIS_EIGEN),
    ):
        if here := _here(names, gpu):
            yield Task("warm-up", here, {"n": n}, functools.partial(totals.totals, repeats=0))
    yield from _totals((n for n in usual if n <= LARGEST[ways.SHARED]), gpu)
    if gpu:
        yield from _kernels()
    yield from _totals((n for n in usual if n > LARGEST[ways.SHARED]), gpu)
    if full:
        # The largest first, whose numbers the smaller ones have too.
        yield from _totals(sorted({*OWN_SIZES, *CUBLAS_SIZES} - THIN_SIZES, reverse=True), gpu)
    if gpu and full:
        yield Task("largest", (totals.WHOLE,), {}, totals.largest)


def _here(names: Iterable[str], gpu: bool) -> Names:
    return tuple(name for name in names if gpu or name in ways.HOST_NAMES)


def _totals(sizes: Iterable[int], gpu: bool) -> Iterator[Step]:
    for n in sizes:
        if names := _here(_names(n), gpu):
            yield Task(TOTAL, names, {"n": n}, totals.totals)


def _names(n: int) -> Iterator[str]:
    """Yield who is timed at a size; what the document has not, at the default ones only."""
    if n in OWN_SIZES:
        yield from (name for name in (ways.CPU_LOOP, ways.NAIVE, ways.SHARED) if n <= LARGEST[name])
    yield ways.CUBLAS
    if n in PEER_SIZES or n in DOUBLING:
        yield ways.EIGEN
        if n in THIN_SIZES:
            yield ways.HIS_EIGEN
            yield from [ways.NUMPY] * (n <= LARGEST[ways.SHARED])
    if n in PINNED_SIZES:
        yield from (
            f"{name}{ways.PINNED}"
            for name in (ways.SHARED, ways.CUBLAS)
            if n <= LARGEST.get(name, n)
        )


def _kernels() -> Iterator[Step]:
    for n in FIRST_SIZES:
        yield Task(FIRST, ("shared_tile",), {"n": n}, first_call.first_call)
    for n in KERNEL_SIZES:
        for temperature in ("warm", "cold"):
            lone = (n, temperature) == (KERNEL_SIZES[0], "warm")
            lanes = (*KERNEL_LANES, *LONE_LANES) if lone else KERNEL_LANES
            yield Cell(KERNELS, "matmul", n, n, lanes, temperature, n, case={"n": n})
    tiles = tuple(Lane(name, name) for name in ("shared_tile", "rectangular_tile"))
    yield counting("matmul", tiles, {"n": COUNTED})
    yield Task("largest", (totals.FITS, totals.REFUSED), {}, totals.largest)


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


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield totals and parts by size, then the break-even sizes beside the printed ones."""
    none = [""] * len(ways.PARTS)
    printed = rules.document("001")["printed"]["break_even"]
    for words, cpu, gpu, theirs in (
        ("Eigen and cuBLAS", ways.EIGEN, ways.CUBLAS, printed["eigen_cublas"]),
        ("NumPy and cuBLAS", ways.NUMPY, ways.CUBLAS, ""),
        ("CPU loop and own kernels", ways.CPU_LOOP, ways.SHARED, printed["cpu_own"]),
    ):
        ours = crossing(rows, cpu, gpu)
        yield (f"break-even n: {words}", str(theirs), "" if ours is None else ours.label, *none)
    for row in rows.where("ladder", temperature="cold"):
        where = f"the ladder's {row.name}, kernel alone, n = {row.case['n']}"
        yield (where, "", significant(row.us), *none)
    sizes = sorted({int(r.case["n"]) for r in totals_of(rows)})
    for n in [n for n in sizes if n in SHOWN or n == sizes[-1]]:
        for row in totals_of(rows).where(n=n):
            parts = [significant(row.figures[p]) if p in row.figures else "" for p in ways.PARTS]
            yield (f"{row.name}, n = {n}", "", significant(row.us), *parts)


def _overtaken(rows: Rows) -> list[Mark]:
    """Return the sizes from which a GPU pays, with what the quartiles leave open."""
    ours = ((ways.EIGEN, ways.CUBLAS), (ways.CPU_LOOP, ways.SHARED))
    at = {f"{gpu} overtakes {cpu}": crossing(rows, cpu, gpu) for cpu, gpu in ours}
    found = ((words, one) for words, one in at.items() if one is not None)
    return [
        replace(one, label=f"{w} at n = {one.label}", high=min(one.high, 1e6)) for w, one in found
    ]


def _parts(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield how the time of a product on the GPU divides, pageable and pinned memory apart."""
    load, unload = ("allocate", "host to device"), ("device to host", "free")
    divided, bars = ("load: allocate, copy in", "launch", "kernel", "unload: copy out, free"), []
    names = (ways.NAIVE, *(n + p for n in (ways.SHARED, ways.CUBLAS) for p in ("", ways.PINNED)))
    for n, name in itertools.product(SPLIT, names):
        for row in here.where(name=name, n=n).timed():
            ends = [sum(row.figures[part] for part in group) for group in (load, unload)]
            lengths = [ends[0], row.figures["launch"], row.figures["kernel"], ends[1]]
            shares = [length / sum(lengths) for length in lengths]
            label = name if ways.PINNED in name else f"{CALLED.get(name, name)}, pageable"
            bars.append(Bar(f"n = {n}: {label}", shares, f"{number(row.us / 1e3)} ms"))
    if bars:
        yield head.name, Bars(head.title, head.below, bars, divided)


SPLIT, SHAPE = (64, 256, 1024, 4096), "n x n times n x n"
CALLED = {ways.NAIVE: LONE_NAIVE}  # from host to host it runs as the document has it
_RATE = {"value": "TFLOP/s", "unit": "TFLOP/s", "label": "{name}", "sorted": True, "limit": "fma"}
_FIRST = {part: f"{part} us" for part in first_call.PARTS}
_OWN = (ways.NAIVE, ways.SHARED, ways.CUBLAS)
_OVER = {"over": "n", "axis": "n, of n x n matrices", "unit": "ms", "log": True}
_OVER |= {"names": [ways.CPU_LOOP, ways.EIGEN, ways.NUMPY, *_OWN, ways.HIS_EIGEN], "called": CALLED}
CHARTS = (
    *(
        chart("bars", f"kernels-{n}", f"Kernels alone, n = {n}", KERNELS, "float32",
              SHAPE, "TFLOP/s", "naive and shared tile 32: in 32 x 32 threads",
              at={"n": n}, **_RATE)
        for n in KERNEL_SIZES
    ),
    chart("bars", "ladder", "The next question: from his tile to cuBLAS, step by step", "ladder",
          "float32", "2,048 cubed", "ms, as he charts it", label="{name}", value="ms", unit="ms",
          sorted=True),
    *(
        chart("figures", f"first-call-{n}", f"The first product of a process, n = {n}, in parts",
              FIRST, "float32", "tiles in shared memory", "ms of host time", at={"n": n},
              figures=_FIRST, parts=True, scale=1e-3, unit="ms")
        for n in FIRST_SIZES
    ),
    busy("The shared kernel: what it keeps busy", "1,024 cubed"),
    *(
        chart("lines", file, title, TOTAL, "{cpus}", "float32", SHAPE,
              "ms from host array to host array, pageable memory", value="ms", most=most,
              marks=_overtaken, **_OVER)
        for file, most, title in (
            ("times", 1 << 20, "Matrix product: time over size, CPU and GPU in turns"),
            ("times-small", 256, "Small products: where the GPU begins to pay"),
        )
    ),
    chart("lines", "alone", "Processing alone: time over size, without any loading", TOTAL,
          "float32", SHAPE, "ms; kernels between two events, without copies",
          value=lambda row: row.figures.get("kernel", row.figures.get("product", 0)) / 1e3,
          **_OVER),
    chart(_parts, "parts", "Loading, kernel, unloading: the parts of a product from host to host",
          TOTAL, "float32", SHAPE,
          "shares of each product's time, the whole time behind them"),
)  # fmt: skip
HEADER = ("what", "printed", "ours, us or n", *(f"{part} us" for part in ways.PARTS))
STUDY = Study("001", steps, CLAIMS.all(), (HEADER, comparison), CHARTS, together=True)
