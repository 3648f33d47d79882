"""Document 001: matmul from host to host, by CPU loops, own kernels, cuBLAS and Eigen, in parts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gemmule_lab.profile.single_launch import counting
from gemmule_lab.records.study import Rows, Value
from gemmule_lab.report.charts import Bar, Bars, Mark, number
from gemmule_lab.report.tables import significant
from gemmule_lab.studies.charted import Head, Picture, Spec, busy, chart
from gemmule_lab.studies.documents import claims_001 as said
from gemmule_lab.studies.grid import Cell, Lane, Names, Step, Study, Task
from gemmule_lab.studies.products import first_call, totals
from gemmule_lab.studies.products import passes as ways
from gemmule_lab.studies.rules import document

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
    Lane(said.FULL_NAIVE, "naive"),
    Lane("naive, multiply and add apart", "naive", {"fma": False}),
    Lane("naive, sums in C", "naive", {"accumulate": "global"}),
    Lane("naive, blocks of 16 x 16", "naive", {"width": 16}),
    *(Lane(f"shared tile {t}", "shared_tile", {"tile": t}) for t in (8, 16)),
    Lane(said.FMA_ON, "shared_tile", {"tile": 32}),
    Lane(said.FMA_OFF, "shared_tile", {"tile": 32, "fma": False}),
    *(Lane(name.replace("_", " "), name) for name in ("register_tile", "vector_tile")),
    Lane("gemmule's choice", "auto"),
    Lane("torch", None, peer="torch"),
)
LONE_LANES = (
    Lane(said.LONE_NAIVE, "naive", {"width": 1}),
    Lane(said.LONE_TILE, "shared_tile", {"tile": 1}),
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
            yield Task(said.TOTAL, names, {"n": n}, totals.totals)


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
    for n in said.FIRST_SIZES:
        yield Task(said.FIRST, ("shared_tile",), {"n": n}, first_call.first_call)
    for n in KERNEL_SIZES:
        for temperature in ("warm", "cold"):
            lone = (n, temperature) == (KERNEL_SIZES[0], "warm")
            lanes = (*KERNEL_LANES, *LONE_LANES) if lone else KERNEL_LANES
            yield Cell(said.KERNELS, "matmul", n, n, lanes, temperature, n, case={"n": n})
    tiles = tuple(Lane(name, name) for name in ("shared_tile", "rectangular_tile"))
    yield counting("matmul", tiles, {"n": COUNTED})
    yield Task("largest", (totals.FITS, totals.REFUSED), {}, totals.largest)


def comparison(rows: Rows) -> Iterator[tuple[str, ...]]:
    """Yield totals and parts by size, then the break-even sizes beside the printed ones."""
    none = [""] * len(ways.PARTS)
    printed = document("001")["printed"]["break_even"]
    for words, cpu, gpu, theirs in (
        ("Eigen and cuBLAS", ways.EIGEN, ways.CUBLAS, printed["eigen_cublas"]),
        ("NumPy and cuBLAS", ways.NUMPY, ways.CUBLAS, ""),
        ("CPU loop and own kernels", ways.CPU_LOOP, ways.SHARED, printed["cpu_own"]),
    ):
        ours = said.crossing(rows, cpu, gpu)
        yield (f"break-even n: {words}", str(theirs), "" if ours is None else ours.label, *none)
    for row in rows.where("ladder", temperature="cold"):
        where = f"the ladder's {row.name}, kernel alone, n = {row.case['n']}"
        yield (where, "", significant(row.us), *none)
    sizes = sorted({int(r.case["n"]) for r in said.totals_of(rows)})
    for n in [n for n in sizes if n in SHOWN or n == sizes[-1]]:
        for row in said.totals_of(rows).where(n=n):
            parts = [significant(row.figures[p]) if p in row.figures else "" for p in ways.PARTS]
            yield (f"{row.name}, n = {n}", "", significant(row.us), *parts)


def _overtaken(rows: Rows) -> list[Mark]:
    """Return the sizes from which a GPU pays, with what the quartiles leave open."""
    ours = ((ways.EIGEN, ways.CUBLAS), (ways.CPU_LOOP, ways.SHARED))
    at = {f"{gpu} overtakes {cpu}": said.crossing(rows, cpu, gpu) for cpu, gpu in ours}
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
CALLED = {ways.NAIVE: said.LONE_NAIVE}  # from host to host it runs as the document has it
_RATE = {"value": "TFLOP/s", "unit": "TFLOP/s", "label": "{name}", "sorted": True, "limit": "fma"}
_FIRST = {part: f"{part} us" for part in first_call.PARTS}
_OWN = (ways.NAIVE, ways.SHARED, ways.CUBLAS)
_OVER = {
    "names": [ways.CPU_LOOP, ways.EIGEN, ways.NUMPY, *_OWN, ways.HIS_EIGEN], "called": CALLED,
    "over": "n", "axis": "n, of n x n matrices", "unit": "ms", "log": True,
}  # fmt: skip
CHARTS = (
    *(
        chart("bars", f"kernels-{n}", f"Kernels alone, n = {n}", said.KERNELS, "float32",
              SHAPE, "TFLOP/s", "naive and shared tile 32: in 32 x 32 threads",
              at={"n": n}, **_RATE)
        for n in KERNEL_SIZES
    ),
    chart("bars", "ladder", "The next question: from his tile to cuBLAS, step by step", "ladder",
          "float32", "2,048 cubed", "ms, as he charts it", label="{name}", value="ms", unit="ms",
          sorted=True),
    *(
        chart("figures", f"first-call-{n}", f"The first product of a process, n = {n}, in parts",
              said.FIRST, "float32", "tiles in shared memory", "ms of host time", at={"n": n},
              figures=_FIRST, parts=True, scale=1e-3, unit="ms")
        for n in said.FIRST_SIZES
    ),
    busy("The shared kernel: what it keeps busy", "1,024 cubed"),
    *(
        chart("lines", file, title, said.TOTAL, "{cpus}", "float32", SHAPE,
              "ms from host array to host array, pageable memory", value="ms", most=most,
              marks=_overtaken, **_OVER)
        for file, most, title in (
            ("times", 1 << 20, "Matrix product: time over size, CPU and GPU in turns"),
            ("times-small", 256, "Small products: where the GPU begins to pay"),
        )
    ),
    chart("lines", "alone", "Processing alone: time over size, without any loading", said.TOTAL,
          "float32", SHAPE, "ms; kernels between two events, without copies",
          value=lambda row: row.figures.get("kernel", row.figures.get("product", 0)) / 1e3,
          **_OVER),
    chart(_parts, "parts", "Loading, kernel, unloading: the parts of a product from host to host",
          said.TOTAL, "float32", SHAPE,
          "shares of each product's time, the whole time behind them"),
)  # fmt: skip
STUDY = Study(
    "001", steps, said.CLAIMS.all(),
    (("what", "printed", "ours, us or n", *(f"{part} us" for part in ways.PARTS)), comparison),
    CHARTS, together=True,
)  # fmt: skip
