"""The pictures of studies 000 and 002: rows by columns, for every kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gemmule_lab.records.results import geomean
from gemmule_lab.report.charts import Axes, Mark
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.pictures import Picture
from gemmule_lab.studies.records import Rows

EXPERIMENT, BY_TYPE = "rows x columns", "dtypes"
DTYPE = "float32"  # of all but the experiment by dtype


@dataclass(frozen=True, slots=True)
class Grid:
    """What one of the two studies shows: the document's kernels, its rate and its words.

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
    start, rate = f"study-{grid.seed}-{backend}", draw.figure(grid.rate)
    key = f"{grid.unit}; darker is more"
    for temperature in ("warm", "cold"):
        here = rows.where(EXPERIMENT, backend=backend, temperature=temperature).timed()
        facts = (DTYPE, f"{grid.unit} in each cell", grid.shape)
        title = f"{grid.what}: {grid.unit} by rows and columns, {temperature}"
        below = draw.subtitle(here, *facts, temperature=temperature)
        shown, name = draw.panels(here, rate), f"{start}-rates-{temperature}"
        yield from draw.maps(name, title, below, shown, key, axes=grid.axes)
    warm = rows.where(EXPERIMENT, backend=backend, temperature="warm").timed()
    if not warm:
        return
    yield from _own_kernels(grid, warm, start)
    yield from _over_rows(grid, rows, warm, backend)
    if grid.rate == "gbs":
        yield from _over_columns(grid, warm, start)
    here = rows.where(BY_TYPE, backend=backend).timed()
    groups = draw.by_temperature(here, rate, lambda row: f"{row.case['dtype']}, {row.name}")
    dtypes = ", ".join(dict.fromkeys(str(row.case["dtype"]) for row in here))
    shapes = ", ".join(dict.fromkeys(draw.shape_of(row.case) for row in here))
    warmth = [draw.WORDS[t] for t in draw.WORDS if here.where(temperature=t)]
    below = draw.subtitle(here, dtypes, shapes, grid.unit, *warmth)
    title = f"{grid.what}: {grid.unit} by dtype"
    yield from draw.bars(f"{start}-dtypes", title, below, groups, grid.unit)
    title = f"{grid.what}: what the kernels keep busy"
    yield from draw.counters(rows, backend, f"{start}-balance", title)


def _own_kernels(grid: Grid, warm: Rows, start: str) -> Iterator[Picture]:
    """Yield the use of the memory by the document's kernels, and the gain over its basic one."""
    own = Rows((row for row in warm if row.name in grid.kernels), warm.environments)
    title = f"{grid.what}: use of the memory's bandwidth, the document's kernels, warm"
    fact = "percent of the data sheet's bandwidth in each cell"
    below = draw.subtitle(own, DTYPE, fact, grid.shape, temperature="warm")
    shown = draw.panels(own, draw.utilisation)
    yield from draw.maps(f"{start}-use", title, below, shown, "%; darker is more", axes=grid.axes)
    basic, *others = grid.kernels
    gains = draw.ratios(warm, ((name, basic) for name in others))
    found = " and ".join(f"{geomean(cells.values()):.2f}" for cells in gains.values())
    title = f"{grid.what}: tiles are {found} times as fast as the basic kernel, warm"
    fact = f"times as fast as {basic}"
    below = draw.subtitle(own, DTYPE, fact, grid.shape, temperature="warm")
    look = {"axes": grid.axes, "ratios": True}
    yield from draw.maps(f"{start}-gain", title, below, gains, draw.FASTER, **look)


def _over_rows(grid: Grid, rows: Rows, warm: Rows, backend: str) -> Iterator[Picture]:
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
    title = f"{grid.what}: {grid.unit} over the rows, {widest:,} {grid.axes[1]}"
    below = draw.subtitle(cold, *facts, temperature=cold[0].temperature)
    name, axes = f"study-{grid.seed}-{backend}-over-rows", Axes(grid.axes[0], grid.unit)
    yield from draw.line_charts(name, title, below, lines, axes, marks)


def _over_columns(grid: Grid, warm: Rows, start: str) -> Iterator[Picture]:
    """Yield the basic kernel's rate over the columns, a line for each of the last heights."""
    basic = warm.where(name=grid.kernels[0])
    lines = [
        replace(line, name=f"{m:,} rows")
        for m in sorted({int(row.case["m"]) for row in warm})[-draw.MOST_LINES :]
        for line in draw.lines_of(basic.where(m=m), draw.figure(grid.rate))
    ]
    title = f"{grid.kernels[0]}: {grid.unit} over the columns, a line for each number of rows"
    below = draw.subtitle(warm, DTYPE, grid.unit, temperature="warm")
    axes = Axes("columns", grid.unit)
    yield from draw.line_charts(f"{start}-by-columns", title, below, lines, axes)
