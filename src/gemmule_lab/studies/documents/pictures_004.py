"""The pictures of study 004: widths and heights of blocks, and where each algorithm wins."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from gemmule_lab.report.charts import Axes, Cells, HeatMaps, Line
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.documents.claims_004 import (
    ALGORITHMS,
    HEIGHT_RUNS,
    ITS_WIDTH,
    NAIVE,
    TRANSPOSE_NAME,
    WIDTH_RUNS,
    WIDTHS,
    block_means,
)
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.records import Rows
from gemmule_lab.studies.verdicts import published

DTYPE = "float32, matrix by columns"
ACROSS = {
    "A x": ("naive", f"block_multiply {ITS_WIDTH}", "gemmule's choice", "torch"),
    "A^T x": (
        "naive transposed",
        f"block_multiply_transposed {ITS_WIDTH}",
        f"transpose_then {ITS_WIDTH}",
        TRANSPOSE_NAME,
        "gemmule's choice transposed",
        "torch transposed",
    ),
}


def pictures(rows: Rows, backend: str) -> Iterator[Picture]:
    """Yield the drawings of what was measured on a back end."""
    start = f"study-004-{backend}"
    for temperature in ("warm", "cold"):
        here = rows.where(WIDTH_RUNS, backend=backend, temperature=temperature).timed()
        if here:
            yield from _widths(here, start, temperature)
            yield from _wins(here, start, temperature)
            yield from _squares(here, start, temperature)
    yield from _heights(rows.where(HEIGHT_RUNS, backend=backend).timed(), start)
    yield from _five(rows.where("five algorithms", backend=backend).timed(), start)
    yield from _cpu(rows.where("cpu", backend=backend).timed(), start)


def _widths(here: Rows, start: str, temperature: str) -> Iterator[Picture]:
    """Yield the mean time over the width of a block, with what the document printed."""
    lines = []
    for algorithm in ALGORITHMS:
        points = []
        for width in WIDTHS:
            us = list(here.where(name=f"{algorithm} {width}").us().values())
            if us:
                points.append((float(width), sum(us) / len(us)))
        if points:
            lines.append(Line(f"{algorithm}", points))
    printed = published("004")["width_ms"]
    if temperature == "warm":
        lines += [
            Line(f"{name}, printed", [(w, 1e3 * ms) for w, ms in zip(WIDTHS, table, strict=True)])
            for name, table in printed.items()
        ]
    fact = "mean us over all shapes, 1,024 rows a block"
    title = f"The width of a block, {temperature}"
    head = draw.head(f"{start}-widths-{temperature}", title, here, DTYPE, fact, kept=temperature)
    yield from draw.line_charts(head, lines, Axes("BLOCK_WIDTH", "us", log_y=True))


def _wins(here: Rows, start: str, temperature: str) -> Iterator[Picture]:
    shown = draw.ratios(here, ((f"{name} {ITS_WIDTH}", NAIVE[name]) for name in ALGORITHMS))
    won = sum(value > 1 for cells in shown.values() for value in cells.values())
    cases = sum(map(len, shown.values()))
    fact = "times as fast as the baseline: naive for A x, naive transposed for A^T x"
    title = (
        f"Where width {ITS_WIDTH} beats the naive kernels, {temperature}: {won} of {cases} cases"
    )
    head = draw.head(f"{start}-wins-{temperature}", title, here, DTYPE, fact, kept=temperature)
    axes = ("rows of A", "columns of A")
    yield from draw.maps(head, shown, draw.FASTER, axes=axes, ratios=True)


def _squares(here: Rows, start: str, temperature: str) -> Iterator[Picture]:
    square = Rows((row for row in here if row.case["m"] == row.case["n"]), here.environments)
    for what, names in ACROSS.items():
        chosen = Rows((row for row in square if row.name in names), here.environments)
        lines = draw.lines_of(chosen, draw.microseconds)
        title = f"{what}: the algorithms over n, {temperature}"
        name = f"{start}-{'product' if what == 'A x' else 'transposed'}-{temperature}"
        head = draw.head(name, title, here, DTYPE, "us; square matrices", kept=temperature)
        yield from draw.line_charts(head, lines, Axes("n, of an n x n matrix", "us", log_y=True))


def _heights(here: Rows, start: str) -> Iterator[Picture]:
    shown: dict[str, Cells] = {}
    for algorithm in ALGORITHMS:
        values = block_means(here, algorithm)
        if values:
            height, width = min(values, key=lambda pair: values[pair])
            shown[f"{algorithm}, best {height} x {width}"] = values
    if shown:
        fact = f"geometric mean us over the matrices {draw.shapes_of(here)}"
        title = "Height x width of a block: the times of each algorithm, and its best"
        head = draw.head(f"{start}-heights", title, here, DTYPE, fact, kept="warm")
        axes = ("BLOCK_HEIGHT", "BLOCK_WIDTH")
        yield head.name, HeatMaps(title, head.below, shown, "us; darker is slower", axes)


def _five(here: Rows, start: str) -> Iterator[Picture]:
    """Yield the mean over the shapes for each algorithm, its middle and its range of matrices."""
    means: dict[str, list[float]] = {}
    for name in here.names():
        us = list(here.where(name=name).us().values())
        means.setdefault(name.partition(" #")[0], []).append(sum(us) / len(us))
    means = dict(sorted(means.items()))
    groups = {name: {"us": statistics.median(found)} for name, found in means.items()}
    ends = {name: (min(found), max(found)) for name, found in means.items()}
    count = max(map(len, means.values()), default=0)
    fact = f"mean us over all shapes: the middle one of {count} random matrices and their range"
    title = f"Five algorithms at width {ITS_WIDTH} on five random matrices"
    head = draw.head(f"{start}-five", title, here, DTYPE, fact, kept="warm")
    yield from draw.bars(head, groups, "us", ends=ends)


def _cpu(here: Rows, start: str) -> Iterator[Picture]:
    """Yield the times of every product on the CPU, warm and cold side by side."""
    groups = draw.by_temperature(
        here, draw.microseconds, lambda row: f"{draw.shape_of(row.case)}, {row.name}"
    )
    title = "Column-major products on the CPU"
    head = draw.head(f"{start}-products", title, here, DTYPE, "us", *draw.WORDS.values())
    yield from draw.bars(head, groups, "us")
