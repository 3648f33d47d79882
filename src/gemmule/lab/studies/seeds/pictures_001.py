"""The pictures of study 001: times over n with both break-evens, parts, kernels, the balance."""

from __future__ import annotations

from collections.abc import Iterator

from gemmule.lab.report.charts import Stack, stacked_bars
from gemmule.lab.report.line_chart import Axes, Line, Mark, line_chart
from gemmule.lab.report.tables import significant
from gemmule.lab.studies import pictures as draw
from gemmule.lab.studies.pictures import Picture
from gemmule.lab.studies.products.passes import (
    CPU_LOOP,
    CUBLAS,
    EIGEN,
    NAIVE,
    NUMPY,
    PARTS,
    PINNED,
    SHARED,
)
from gemmule.lab.studies.records import Rows
from gemmule.lab.studies.seeds.claims_001 import KERNELS
from gemmule.lab.studies.seeds.crossings import by_size, crossing, totals_of

EVERY = (CPU_LOOP, EIGEN, NUMPY, NAIVE, SHARED, CUBLAS)
PAIRS = ((EIGEN, CUBLAS), (CPU_LOOP, SHARED))
SMALL = 256
SPLIT = (64, 256, 1024, 4096)
LOAD, UNLOAD = ("allocate", "host to device"), ("device to host", "free")
GROUPS = ("load: allocate, copy in", "launch", "kernel", "unload: copy out, free")


def pictures(rows: Rows, backend: str) -> Iterator[Picture]:
    """Yield the drawings of what was measured on a back end."""
    totals = totals_of(rows.where(backend=backend))
    start = f"study-001-{backend}"
    if totals:
        yield from _times(totals, start)
        yield from _alone(totals, start)
        yield from _parts(totals, start)
    yield from _kernels(rows, backend, start)
    yield from draw.counters(
        rows, backend, f"{start}-balance", "The shared kernel: what it keeps busy"
    )
    for row in rows.where("first call", backend=backend):
        name = f"{start}-first-call-{row.case['n']}"
        parts = {k.removesuffix(" us"): us / 1e3 for k, us in row.figures.items()}
        title = f"The first product of a process, n = {row.case['n']}, part by part"
        words = (title, draw.subtitle(rows.where("first call"), "milliseconds"))
        yield from draw.bars(name, parts, words, "ms")


def _times(totals: Rows, start: str) -> Iterator[Picture]:
    """Yield times over all sizes, and over small ones, with the break-even sizes marked."""
    marks = []
    for cpu, gpu in PAIRS:
        found = crossing(totals, cpu, gpu)
        if found is not None:
            words = f"{gpu} overtakes {cpu} at n = {found.words}"
            marks.append(Mark(words, found.n, found.low, min(found.high, 1e6)))
    cpus = {environment.cpu for environment in totals.environments.values()}
    device = ", ".join(dict.fromkeys((draw.device_of(totals), *sorted(cpus))))
    below = f"{device}; milliseconds from host array to host array, pageable memory"
    axes = Axes("n, of n x n matrices", "ms", log_y=True)
    for name, most, title in (
        ("times", float("inf"), "Matrix product: time over size, CPU and GPU in turns"),
        ("times-small", SMALL, "Small products: where the GPU begins to pay"),
    ):
        lines = [
            Line(
                who, [(n, us / 1e3) for n, us in sorted(by_size(totals, who).items()) if n <= most]
            )
            for who in EVERY
        ]
        lines = [line for line in lines if line.points]
        shown = marks if name == "times" else [mark for mark in marks if mark.at <= SMALL]
        drawn = line_chart(lines, axes, title=title, subtitle=below, marks=shown)
        yield f"{start}-{name}", drawn


def _line(totals: Rows, name: str, most: float, part: str | None = None) -> Line:
    times = sorted(by_size(totals, name, part).items())
    return Line(name, [(n, us / 1e3) for n, us in times if n <= most])


def _alone(totals: Rows, start: str) -> Iterator[Picture]:
    """Yield the processing alone: kernels by events, and the CPU's products."""
    lines = []
    for name in EVERY:
        part = "product" if name in (CPU_LOOP, EIGEN, NUMPY) else "kernel"
        lines.append(_line(totals, name, float("inf"), part))
    lines = [line for line in lines if line.points]
    below = draw.subtitle(totals, "milliseconds; kernels between two events, without copies")
    axes = Axes("n, of n x n matrices", "ms", log_y=True)
    words = ("Processing alone: time over size, without any loading", below)
    yield from draw.line_charts(f"{start}-alone", lines, axes, words)


def _parts(totals: Rows, start: str) -> Iterator[Picture]:
    """Yield how the time of a product on the GPU divides, pageable and pinned memory apart."""
    stacks = []
    for n in SPLIT:
        for name in (NAIVE, SHARED, SHARED + PINNED, CUBLAS, CUBLAS + PINNED):
            for row in totals.where(name=name, n=n):
                parts = {part: row.figures[part] for part in PARTS}
                load, unload = (sum(parts[p] for p in group) for group in (LOAD, UNLOAD))
                label = name if PINNED in name else f"{name}, pageable"
                note = f"{significant(row.us / 1e3)} ms"
                lengths = (load, parts["launch"], parts["kernel"], unload)
                stacks.append(Stack(f"n = {n}: {label}", lengths, note))
    if stacks:
        below = draw.subtitle(totals, "share of each product's time, the whole time behind it")
        title = "Loading, kernel, unloading: the parts of a product from host to host"
        yield (
            f"{start}-parts",
            stacked_bars(stacks, GROUPS, title=title, subtitle=below, shares=True),
        )


def _kernels(rows: Rows, backend: str, start: str) -> Iterator[Picture]:
    """Yield the rate of each kernel as its share of the arithmetic ceiling."""
    here = rows.where(KERNELS, backend=backend).timed()
    limit = rows.ceiling("fma float32", backend)
    for n in sorted({int(row.case["n"]) for row in here}):
        values = {
            f"{row.name}, {row.temperature}": row.figures["gflops"] / 1e3
            for row in here.where(n=n)
            if "gflops" in row.figures
        }
        if limit is not None:
            values["measured FMA ceiling"] = limit / 1e3
        title = f"Kernels alone, n = {n}, beside the ceiling of multiply-adds"
        words = (title, draw.subtitle(here, "TFLOP/s; warm and cold apart"))
        yield from draw.bars(f"{start}-kernels-{n}", values, words, "TFLOP/s")
