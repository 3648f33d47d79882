"""The pictures of studies 000 and 002: rows by columns, for every kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gemmule_lab.records.results import geomean
from gemmule_lab.report.charts import Mark
from gemmule_lab.report.heat_maps import Scale
from gemmule_lab.report.line_chart import Axes, Line
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.records import Rows

EXPERIMENT, BY_TYPE = "rows x columns", "dtypes"


DTYPE = "float32"  # of all but the experiment by dtype


@dataclass(frozen=True, slots=True)
class Grid:
    """What one of the two studies shows: the seed's kernels, its rate and its words.

    shape: what rows and columns are, in words; axes: the same, short.
    """

    seed: str
    what: str
    kernels: tuple[str, ...]
    rate: str
    unit: str
    ceiling: str
    shape: str
    axes: tuple[str, str]


def pictures(grid: Grid, rows: Rows, backend: str) -> Iterator[Picture]:
    """Yield heat maps of the rate, of the memory's use and of the gain, and lines with ceilings."""
    start = f"study-{grid.seed}-{backend}"
    for temperature in ("warm", "cold"):
        here = rows.where(EXPERIMENT, backend=backend, temperature=temperature).timed()
        if not here:
            continue
        facts = (DTYPE, f"{grid.unit} in each cell", grid.shape)
        words = (
            f"{grid.what}: {grid.unit} by rows and columns, {temperature}",
            draw.subtitle(here, *facts, temperature=temperature),
        )
        shown = draw.panels(here, draw.figure(grid.rate))
        scale = Scale(f"{grid.unit}; darker is more")
        yield from draw.maps(f"{start}-rates-{temperature}", shown, words, scale, grid.axes)
    warm = rows.where(EXPERIMENT, backend=backend, temperature="warm").timed()
    if not warm:
        return
    yield from _seed_kernels(grid, warm, start)
    yield from _at_the_ends(grid, rows, warm, backend)
    yield from _dtypes(grid, rows.where(BY_TYPE, backend=backend).timed(), start)
    title = f"{grid.what}: what the kernels keep busy"
    yield from draw.counters(rows, backend, f"{start}-balance", title)


def _dtypes(grid: Grid, here: Rows, start: str) -> Iterator[Picture]:
    """Yield the rate of the seed's kernels in each dtype, warm and cold side by side."""
    groups = draw.by_temperature(
        here, draw.figure(grid.rate), lambda row: f"{row.case['dtype']}, {row.name}"
    )
    dtypes = ", ".join(dict.fromkeys(str(row.case["dtype"]) for row in here))
    shapes = ", ".join(dict.fromkeys(draw.shape_of(row.case) for row in here))
    warmth = [draw.WORDS[t] for t in draw.WORDS if here.where(temperature=t)]
    words = (
        f"{grid.what}: {grid.unit} by dtype",
        draw.subtitle(here, dtypes, shapes, grid.unit, *warmth),
    )
    yield from draw.bars(f"{start}-dtypes", groups, words, grid.unit)


def _seed_kernels(grid: Grid, warm: Rows, start: str) -> Iterator[Picture]:
    """Yield the use of the memory by the seed's kernels, and the gain over its basic one."""
    own = Rows((row for row in warm if row.name in grid.kernels), warm.environments)
    title = f"{grid.what}: use of the memory's bandwidth, the document's kernels, warm"
    fact = "percent of the data sheet's bandwidth in each cell"
    words = (title, draw.subtitle(own, DTYPE, fact, grid.shape, temperature="warm"))
    shown = draw.panels(own, draw.utilisation)
    yield from draw.maps(f"{start}-use", shown, words, Scale("%; darker is more"), grid.axes)
    basic, *others = grid.kernels
    gains = [panel for name in others if (panel := draw.ratios(warm, name, basic)) is not None]
    if gains:
        means = (geomean(panel.values.values()) for panel in gains)
        found = " and ".join(f"{mean:.2f}" for mean in means)
        title = f"{grid.what}: tiles are {found} times as fast as the basic kernel, warm"
        fact = f"times as fast as {basic}"
        words = (title, draw.subtitle(own, DTYPE, fact, grid.shape, temperature="warm"))
        yield from draw.maps(f"{start}-gain", gains, words, draw.FASTER, grid.axes)


def _at_the_ends(grid: Grid, rows: Rows, warm: Rows, backend: str) -> Iterator[Picture]:
    """Yield the rate of every kernel over the rows of the widest matrices, with the ceiling."""
    cold = rows.where(EXPERIMENT, backend=backend, temperature="cold").timed() or warm
    widest = max(int(row.case["n"]) for row in cold)
    lines = draw.lines_of(cold.where(n=widest), draw.figure(grid.rate), "m")
    order = {name: index for index, name in enumerate(grid.kernels)}
    lines.sort(key=lambda line: (order.get(line.name, len(order)), -line.points[-1][1]))
    facts = [DTYPE, grid.unit, grid.shape]
    marks: list[Mark] = []
    if grid.rate == "gbs":
        marks = draw.ceiling_marks(rows, backend)
    elif (limit := rows.ceiling(grid.ceiling, backend)) is not None:
        marks = [Mark(f"measured FMA ceiling, {limit:,.0f} GFLOP/s", limit)]
        if any(rate > limit for line in lines for _, rate in line.points):
            facts.append("what is beyond the FMA ceiling runs on tensor cores")
    words = (
        f"{grid.what}: {grid.unit} over the rows, {widest:,} {grid.axes[1]}",
        draw.subtitle(cold, *facts, temperature=cold[0].temperature),
    )
    axes = Axes(grid.axes[0], grid.unit)
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
            draw.subtitle(warm, DTYPE, grid.unit, temperature="warm"),
        )
        name = f"study-{grid.seed}-{backend}-by-columns"
        yield from draw.line_charts(name, by_columns, Axes("columns", grid.unit), words)
