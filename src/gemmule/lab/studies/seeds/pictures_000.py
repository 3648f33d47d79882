"""The pictures of studies 000 and 002: rows by columns, for every kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gemmule.lab.records.results import geomean
from gemmule.lab.report.line_chart import Axes, Line, Mark
from gemmule.lab.studies import pictures as draw
from gemmule.lab.studies.pictures import Picture
from gemmule.lab.studies.records import Rows

EXPERIMENT, BY_TYPE = "rows x columns", "dtypes"


@dataclass(frozen=True, slots=True)
class Grid:
    """What one of the two studies shows: the seed's kernels, its rate and its words."""

    seed: str
    what: str
    kernels: tuple[str, ...]
    rate: str
    unit: str
    ceiling: str


def pictures(grid: Grid, rows: Rows, backend: str) -> Iterator[Picture]:
    """Yield heat maps of the rate, of the memory's use and of the gain, and lines with ceilings."""
    start = f"study-{grid.seed}-{backend}"
    for temperature in ("warm", "cold"):
        here = rows.where(EXPERIMENT, backend=backend, temperature=temperature).timed()
        if not here:
            continue
        below = draw.subtitle(here, f"{grid.unit} in each cell", temperature)
        shown = draw.panels(here, draw.figure(grid.rate))
        title = f"{grid.what}: {grid.unit} by rows and columns, {temperature}"
        yield from draw.maps(f"{start}-rates-{temperature}", shown, title, below)
    warm = rows.where(EXPERIMENT, backend=backend, temperature="warm").timed()
    if not warm:
        return
    yield from _seed_kernels(grid, warm, start)
    yield from _at_the_ends(grid, rows, warm, backend)
    values = {
        f"{row.case['dtype']}, {row.name}, {row.temperature}": row.figures[grid.rate]
        for row in rows.where(BY_TYPE, backend=backend).timed()
    }
    words = (f"{grid.what}: {grid.unit} by dtype", draw.subtitle(rows.where(BY_TYPE), grid.unit))
    yield from draw.bars(f"{start}-dtypes", values, words, grid.unit)
    yield from draw.counters(
        rows, backend, f"{start}-balance", f"{grid.what}: what the kernels keep busy"
    )


def _seed_kernels(grid: Grid, warm: Rows, start: str) -> Iterator[Picture]:
    """Yield the use of the memory by the seed's kernels, and the gain over its basic one."""
    own = Rows((row for row in warm if row.name in grid.kernels), warm.environments)
    below = draw.subtitle(own, "percent of the data sheet's bandwidth in each cell", "warm")
    title = f"{grid.what}: use of the memory's bandwidth, the document's kernels, warm"
    yield from draw.maps(f"{start}-use", draw.panels(own, draw.utilisation), title, below)
    basic, *others = grid.kernels
    gains = [panel for name in others if (panel := draw.ratios(warm, name, basic)) is not None]
    if gains:
        below = draw.subtitle(own, "times as fast; blue above 1, orange below", "warm")
        means = (geomean(panel.values.values()) for panel in gains)
        found = " and ".join(f"{mean:.2f}" for mean in means)
        title = f"{grid.what}: tiles are {found} times as fast as the basic kernel, warm"
        yield from draw.maps(f"{start}-gain", gains, title, below, ratios=True)


def _at_the_ends(grid: Grid, rows: Rows, warm: Rows, backend: str) -> Iterator[Picture]:
    """Yield the rate of every kernel over the rows of the widest matrices, with the ceiling."""
    cold = rows.where(EXPERIMENT, backend=backend, temperature="cold").timed() or warm
    widest = max(int(row.case["n"]) for row in cold)
    lines = draw.lines_of(cold.where(n=widest), draw.figure(grid.rate), "m")
    order = {name: index for index, name in enumerate(grid.kernels)}
    lines.sort(key=lambda line: (order.get(line.name, len(order)), -line.points[-1][1]))
    marks: list[Mark] = []
    if grid.rate == "gbs":
        marks = draw.ceiling_marks(rows, backend)
    elif (limit := rows.ceiling(grid.ceiling, backend)) is not None:
        marks = [Mark(f"measured FMA ceiling, {limit:,.0f} GFLOP/s", limit)]
    words = (
        f"{grid.what}: {grid.unit} over the rows, {widest:,} columns",
        draw.subtitle(cold, grid.unit, cold[0].temperature),
    )
    axes = Axes("rows", grid.unit)
    name = f"study-{grid.seed}-{backend}-over-rows"
    yield from draw.line_charts(name, lines, axes, words, marks)
    if grid.rate == "gbs":
        basic = grid.kernels[0]
        by_columns = [
            Line(f"{m:,} rows", sorted((float(r.case["n"]), r.figures["gbs"]) for r in found))
            for m in sorted({int(row.case["m"]) for row in warm})[-6:]
            if (found := warm.where(name=basic, m=m).timed())
        ]
        words = (
            f"{basic}: {grid.unit} over the columns, a line for each number of rows",
            draw.subtitle(warm, grid.unit, "warm"),
        )
        name = f"study-{grid.seed}-{backend}-by-columns"
        yield from draw.line_charts(name, by_columns, Axes("columns", grid.unit), words)
