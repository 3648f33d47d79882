"""The pictures of study 001 that are its own: times over n with both break-evens, and parts."""

from __future__ import annotations

from collections.abc import Iterator

from gemmule_lab.report.charts import Axes, Bar, Bars, Line, Lines, Mark, number
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.documents.claims_001 import LONE_NAIVE, by_size, crossing, totals_of
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.products import passes as ways
from gemmule_lab.studies.records import Rows

EVERY = (
    ways.CPU_LOOP,
    ways.EIGEN,
    ways.NUMPY,
    ways.NAIVE,
    ways.SHARED,
    ways.CUBLAS,
    ways.HIS_EIGEN,
)
PAIRS = ((ways.EIGEN, ways.CUBLAS), (ways.CPU_LOOP, ways.SHARED))
CALLED = {ways.NAIVE: LONE_NAIVE}  # from host to host it runs as the document has it
DTYPE, SHAPE = "float32", "n x n times n x n"
AXES = Axes("n, of n x n matrices", "ms", log_y=True)
SMALL = 256
SPLIT = (64, 256, 1024, 4096)
LOAD, UNLOAD = ("allocate", "host to device"), ("device to host", "free")
GROUPS = ("load: allocate, copy in", "launch", "kernel", "unload: copy out, free")


def pictures(rows: Rows, backend: str) -> Iterator[Picture]:
    """Yield the drawings of what was measured on a back end."""
    totals = totals_of(rows.where(backend=backend))
    if totals:
        start = f"study-001-{backend}"
        yield from _times(totals, start)
        yield from _alone(totals, start)
        yield from _parts(totals, start)


def _times(totals: Rows, start: str) -> Iterator[Picture]:
    """Yield times over all sizes, and over small ones, with the break-even sizes marked."""
    marks = []
    for cpu, gpu in PAIRS:
        found = crossing(totals, cpu, gpu)
        if found is not None:
            words = f"{gpu} overtakes {cpu} at n = {found.words}"
            marks.append(Mark(words, found.n, found.low, min(found.high, 1e6)))
    cpus = {environment.cpu for environment in totals.environments.values() if environment.cpu}
    devices = ", ".join(dict.fromkeys((*(row.device for row in totals), *sorted(cpus))))
    below = f"{devices}; {DTYPE}, {SHAPE}; ms from host array to host array, pageable memory"
    below += "; grey: where the quartiles let the GPU overtake" if marks else ""
    for name, most, title in (
        ("times", float("inf"), "Matrix product: time over size, CPU and GPU in turns"),
        ("times-small", SMALL, "Small products: where the GPU begins to pay"),
    ):
        lines = [line for who in EVERY if (line := _line(totals, who, most)).points]
        shown = [mark for mark in marks if mark.at <= most]
        yield f"{start}-{name}", Lines(title, below, lines, AXES, marks=shown)


def _line(totals: Rows, name: str, most: float, part: str | None = None) -> Line:
    times = sorted(by_size(totals, name, part).items())
    return Line(CALLED.get(name, name), [(n, us / 1e3) for n, us in times if n <= most])


def _alone(totals: Rows, start: str) -> Iterator[Picture]:
    """Yield the processing alone: kernels by events, and the CPU's products."""
    parts = {who: "product" if who in ways.HOST_NAMES else "kernel" for who in EVERY}
    lines = [_line(totals, who, float("inf"), part) for who, part in parts.items()]
    title = "Processing alone: time over size, without any loading"
    facts = (DTYPE, SHAPE, "ms; kernels between two events, without copies")
    head = draw.head(f"{start}-alone", title, totals, *facts)
    yield from draw.line_charts(head, [line for line in lines if line.points], AXES)


def _parts(totals: Rows, start: str) -> Iterator[Picture]:
    """Yield how the time of a product on the GPU divides, pageable and pinned memory apart."""
    bars = []
    for n in SPLIT:
        for name in (
            ways.NAIVE,
            ways.SHARED,
            ways.SHARED + ways.PINNED,
            ways.CUBLAS,
            ways.CUBLAS + ways.PINNED,
        ):
            for row in totals.where(name=name, n=n):
                parts = {part: row.figures[part] for part in ways.PARTS}
                load, unload = (sum(parts[p] for p in group) for group in (LOAD, UNLOAD))
                label = name if ways.PINNED in name else f"{CALLED.get(name, name)}, pageable"
                lengths = (load, parts["launch"], parts["kernel"], unload)
                shares = [length / sum(lengths) for length in lengths]
                bars.append(Bar(f"n = {n}: {label}", shares, f"{number(row.us / 1e3)} ms"))
    if bars:
        fact = "shares of each product's time, the whole time behind them"
        title = "Loading, kernel, unloading: the parts of a product from host to host"
        head = draw.head(f"{start}-parts", title, totals, DTYPE, SHAPE, fact)
        yield head.name, Bars(title, head.below, bars, GROUPS)
