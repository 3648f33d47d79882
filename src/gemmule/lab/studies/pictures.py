"""What the pictures of several studies share: rows as heat maps, lines and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from gemmule.lab.report.charts import Stack, stacked_bars
from gemmule.lab.report.heat_maps import Panel, heat_maps
from gemmule.lab.report.line_chart import MOST_LINES, Axes, Line, Mark, line_chart
from gemmule.lab.report.tables import significant
from gemmule.lab.studies.records import Rows, StudyRow

Picture = tuple[str, str]
"""The name of a file, less its ending, and the drawing in it."""
Figure = Callable[[StudyRow], float | None]

WORDS = {"warm": "one matrix again and again", "cold": "matrices rotate past the cache"}
MANY_PANELS = 9


def figure(name: str) -> Figure:
    """Return what reads a figure of a row."""
    return lambda row: row.figures.get(name)


def microseconds(row: StudyRow) -> float | None:
    """Return the median time of a row, None where nothing was timed."""
    return None if row.times_us is None else row.us


def utilisation(row: StudyRow) -> float | None:
    """Return the bandwidth as percent of what the device's data sheet promises."""
    gbs, datasheet = row.figures.get("gbs"), row.figures.get("datasheet_gbs")
    return 100 * gbs / datasheet if gbs and datasheet else None


def device_of(rows: Rows) -> str:
    """Return where rows were measured, in words."""
    return ", ".join(dict.fromkeys(row.device for row in rows))


def subtitle(rows: Rows, unit: str, temperature: str = "") -> str:
    """Return the line below a title: device, unit, and how the operands were kept."""
    return "; ".join(filter(None, (device_of(rows), unit, WORDS.get(temperature, ""))))


def panels(rows: Rows, value: Figure, across: str = "n") -> list[Panel]:
    """Return a heat map for each implementation: m down, `across` across."""
    found = []
    for name in rows.names():
        cells = {
            (int(row.case["m"]), int(row.case[across])): number
            for row in rows.where(name=name).timed()
            if (number := value(row)) is not None and number > 0
        }
        if cells:
            found.append(Panel(name, cells))
    return found


def maps(
    name: str, shown: Sequence[Panel], title: str, below: str, *, ratios: bool = False
) -> Iterator[Picture]:
    """Yield drawings of heat maps: those over the finest grid first, at most nine in each."""
    most = max((len(panel.values) for panel in shown), default=0)
    fine = [panel for panel in shown if len(panel.values) == most]
    rest = [panel for panel in shown if len(panel.values) < most]
    drawn = [group[at : at + MANY_PANELS] for group in (fine, rest) for at in _starts(group)]
    for index, group in enumerate(drawn):
        part = f" ({index + 1} of {len(drawn)})" if len(drawn) > 1 else ""
        axes = ("rows", "columns")
        svg = heat_maps(group, title=title + part, subtitle=below, axes=axes, ratios=ratios)
        yield name + (f"-{index + 1}" if len(drawn) > 1 else ""), svg


def _starts(group: Sequence[Panel]) -> range:
    return range(0, len(group), MANY_PANELS)


def ratios(rows: Rows, ours: str, other: str) -> Panel | None:
    """Return how many times as fast one implementation is as another, by rows and columns."""
    times = {
        name: {(int(r.case["m"]), int(r.case["n"])): r.us for r in rows.where(name=name).timed()}
        for name in (ours, other)
    }
    common = {
        case: times[other][case] / us for case, us in times[ours].items() if case in times[other]
    }
    return Panel(ours, common) if common else None


def lines_of(rows: Rows, value: Figure, axis: str = "n") -> list[Line]:
    """Return a line for each implementation over a size of its cases."""
    found = []
    for name in rows.names():
        points = {
            float(row.case[axis]): number
            for row in rows.where(name=name).timed()
            if (number := value(row)) is not None and number > 0
        }
        if points:
            found.append(Line(name, sorted(points.items())))
    return found


def line_charts(
    name: str,
    lines: Sequence[Line],
    axes: Axes,
    words: tuple[str, str],
    ceilings: Sequence[Mark] = (),
) -> Iterator[Picture]:
    """Yield charts of at most six lines; where it takes several, the first line is in each.

    words: title and subtitle.
    """
    first, rest = lines[:1], list(lines[1:])
    groups = [rest[at : at + MOST_LINES - 1] for at in range(0, max(len(rest), 1), MOST_LINES - 1)]
    for index, group in enumerate(groups if lines else ()):
        part = f" ({index + 1} of {len(groups)})" if len(groups) > 1 else ""
        svg = line_chart(
            [*first, *group], axes, title=words[0] + part, subtitle=words[1], ceilings=ceilings
        )
        yield name + (f"-{index + 1}" if len(groups) > 1 else ""), svg


def ceiling_marks(rows: Rows, backend: str, datasheet: bool = True) -> list[Mark]:
    """Return the measured read ceiling, and the data sheet's bandwidth, as lines of a chart."""
    found = []
    read = rows.ceiling("read", backend)
    if read is not None:
        found.append(Mark(f"measured read ceiling, {read:,.0f} GB/s", read))
    sheet = rows.where(backend=backend).figure("datasheet_gbs") if datasheet else None
    if sheet is not None and (read is None or sheet > 1.08 * read):
        found.append(Mark(f"data sheet, {sheet:,.0f} GB/s", sheet))
    return found


def bars(
    name: str, values: Mapping[str, float], words: tuple[str, str], unit: str
) -> Iterator[Picture]:
    """Yield a chart of plain bars; nothing where there are no values. words: title, subtitle."""
    if values:
        stacks = [Stack(k, (v,), f"{significant(v)} {unit}".strip()) for k, v in values.items()]
        svg = stacked_bars(stacks, (unit,), title=words[0], subtitle=words[1], shares=False)
        yield name, svg


def counters(rows: Rows, backend: str, name: str, title: str) -> Iterator[Picture]:
    """Yield the profiler's balance: how busy each unit was, for every kernel it watched."""
    values = {}
    here = rows.where("counters", backend=backend)
    for row in here:
        for what in ("SM throughput", "memory throughput", "FMA pipe"):
            value = row.figures.get(f"{what} percent")
            if value is not None:
                values[f"{row.name}: {what}"] = value
    below = subtitle(here, "Nsight Compute, percent of each unit's peak")
    yield from bars(name, values, (title, below), "%")
