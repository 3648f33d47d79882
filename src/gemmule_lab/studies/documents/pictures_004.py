"""The pictures of study 004 that are its own: widths and heights of blocks, five matrices."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from gemmule_lab.report.charts import Axes, Cells, HeatMaps, Line
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.documents.claims_004 import (
    ALGORITHMS,
    FIVE,
    HEIGHT_RUNS,
    ITS_WIDTH,
    WIDTH_RUNS,
    WIDTHS,
    block_means,
)
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.records import Rows
from gemmule_lab.studies.rules import published

DTYPE = "float32, matrix by columns"


def pictures(rows: Rows, backend: str) -> Iterator[Picture]:
    """Yield the drawings of what was measured on a back end."""
    start = f"study-004-{backend}"
    for temperature in ("warm", "cold"):
        here = rows.where(WIDTH_RUNS, backend=backend, temperature=temperature).timed()
        if here:
            yield from _widths(here, start, temperature)
    yield from _heights(rows.where(HEIGHT_RUNS, backend=backend).timed(), start)
    yield from _five(rows.where(FIVE, backend=backend).timed(), start)


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
