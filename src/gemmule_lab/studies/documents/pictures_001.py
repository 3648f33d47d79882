"""The pictures of study 001: times over n with both break-evens, parts, kernels, the balance."""

from __future__ import annotations

from collections.abc import Iterator

from gemmule_lab.report.charts import Axes, Bar, Bars, Line, Lines, Mark, number
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.documents.claims_001 import (
    KERNELS,
    LONE_NAIVE,
    by_size,
    crossing,
    totals_of,
)
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.products.passes import (
    CPU_LOOP,
    CUBLAS,
    EIGEN,
    NAIVE,
    NUMPY,
    PARTS,
    PINNED,
    SHARED,
)
from gemmule_lab.studies.records import Rows, StudyRow

EVERY = (CPU_LOOP, EIGEN, NUMPY, NAIVE, SHARED, CUBLAS)
PAIRS = ((EIGEN, CUBLAS), (CPU_LOOP, SHARED))
CALLED = {NAIVE: LONE_NAIVE}  # from host to host it runs as the document has it
DTYPE, SHAPE = "float32", "n x n times n x n"
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
        n = row.case["n"]
        parts = {k.removesuffix(" us"): {"time": us / 1e3} for k, us in row.figures.items()}
        facts = (DTYPE, f"{SHAPE}, tiles in shared memory", "ms of host time")
        title = f"The first product of a process, n = {n}, part by part"
        head = draw.head(f"{start}-first-call-{n}", title, rows.where("first call"), *facts)
        yield from draw.bars(head, parts, "ms")


def _times(totals: Rows, start: str) -> Iterator[Picture]:
    """Yield times over all sizes, and over small ones, with the break-even sizes marked."""
    marks = []
    for cpu, gpu in PAIRS:
        found = crossing(totals, cpu, gpu)
        if found is not None:
            words = f"{gpu} overtakes {cpu} at n = {found.words}"
            marks.append(Mark(words, found.n, found.low, min(found.high, 1e6)))
    cpus = {environment.cpu for environment in totals.environments.values()}
    devices = dict.fromkeys((*(row.device for row in totals), *sorted(cpus)))
    below = (
        f"{', '.join(devices)}; {DTYPE}, {SHAPE}; ms from host array to host array, pageable memory"
    )
    below += "; grey: where the quartiles let the GPU overtake" if marks else ""
    axes = Axes("n, of n x n matrices", "ms", log_y=True)
    for name, most, title in (
        ("times", float("inf"), "Matrix product: time over size, CPU and GPU in turns"),
        ("times-small", SMALL, "Small products: where the GPU begins to pay"),
    ):
        lines = [_line(totals, who, most) for who in EVERY]
        lines = [line for line in lines if line.points]
        shown = marks if name == "times" else [mark for mark in marks if mark.at <= SMALL]
        yield f"{start}-{name}", Lines(title, below, lines, axes, marks=shown)


def _line(totals: Rows, name: str, most: float, part: str | None = None) -> Line:
    times = sorted(by_size(totals, name, part).items())
    return Line(CALLED.get(name, name), [(n, us / 1e3) for n, us in times if n <= most])


def _alone(totals: Rows, start: str) -> Iterator[Picture]:
    """Yield the processing alone: kernels by events, and the CPU's products."""
    lines = []
    for name in EVERY:
        part = "product" if name in (CPU_LOOP, EIGEN, NUMPY) else "kernel"
        lines.append(_line(totals, name, float("inf"), part))
    lines = [line for line in lines if line.points]
    title = "Processing alone: time over size, without any loading"
    facts = (DTYPE, SHAPE, "ms; kernels between two events, without copies")
    head = draw.head(f"{start}-alone", title, totals, *facts)
    yield from draw.line_charts(head, lines, Axes("n, of n x n matrices", "ms", log_y=True))


def _parts(totals: Rows, start: str) -> Iterator[Picture]:
    """Yield how the time of a product on the GPU divides, pageable and pinned memory apart."""
    bars = []
    for n in SPLIT:
        for name in (NAIVE, SHARED, SHARED + PINNED, CUBLAS, CUBLAS + PINNED):
            for row in totals.where(name=name, n=n):
                parts = {part: row.figures[part] for part in PARTS}
                load, unload = (sum(parts[p] for p in group) for group in (LOAD, UNLOAD))
                label = name if PINNED in name else f"{CALLED.get(name, name)}, pageable"
                note = f"{number(row.us / 1e3)} ms"
                lengths = (load, parts["launch"], parts["kernel"], unload)
                shares = [length / sum(lengths) for length in lengths]
                bars.append(Bar(f"n = {n}: {label}", shares, note))
    if bars:
        fact = "shares of each product's time, the whole time behind them"
        title = "Loading, kernel, unloading: the parts of a product from host to host"
        head = draw.head(f"{start}-parts", title, totals, DTYPE, SHAPE, fact)
        yield head.name, Bars(title, head.below, bars, GROUPS)


def _kernels(rows: Rows, backend: str, start: str) -> Iterator[Picture]:
    """Yield the rate of each kernel, the fastest first, with the ceiling of plain arithmetic."""
    here = rows.where(KERNELS, backend=backend).timed()
    ceiling = rows.ceiling("fma float32", backend)
    limit = None
    if ceiling is not None:
        limit = Mark(f"measured FMA ceiling, {number(ceiling / 1e3)} TFLOP/s", ceiling / 1e3)
    for n in sorted({int(row.case["n"]) for row in here}):
        groups = draw.by_temperature(here.where(n=n), _teraflops, _kernel)
        fastest = {name: max(values.values()) for name, values in groups.items()}
        groups = {name: groups[name] for name in sorted(groups, key=lambda one: -fastest[one])}
        facts = [DTYPE, SHAPE, "TFLOP/s", *draw.WORDS.values()]
        if any(name.startswith("naive ") for name in groups):
            facts.append("naive w x w: in blocks of w x w threads")
        if limit is not None and max(fastest.values(), default=0.0) > limit.at:
            facts.append("a bar beyond the FMA ceiling runs on tensor cores")
        title = f"Kernels alone, n = {n}, beside the ceiling of multiply-adds"
        head = draw.head(f"{start}-kernels-{n}", title, here, *facts)
        yield from draw.bars(head, groups, "TFLOP/s", limit=limit)


def _teraflops(row: StudyRow) -> float | None:
    gflops = row.figures.get("gflops")
    return None if gflops is None else gflops / 1e3


def _kernel(row: StudyRow) -> str:
    """Return a kernel's name, a naive one's with the width of its blocks, unless they are one."""
    width = row.params.get("width")
    if not row.name.startswith(NAIVE) or not width or row.name == LONE_NAIVE:
        return row.name
    rest = row.name.removeprefix(NAIVE).replace(f", blocks of {width} x {width}", ", fused")
    return f"{NAIVE} {width} x {width}{rest}"
