"""What the pictures of several studies share: rows as heat maps, lines and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gemmule_lab.report.bars import Group, grouped_bars
from gemmule_lab.report.charts import Mark
from gemmule_lab.report.heat_maps import Panel, Scale, heat_maps
from gemmule_lab.report.line_chart import MOST_LINES, Axes, Line, line_chart
from gemmule_lab.studies.records import Rows, StudyRow

Picture = tuple[str, str]
"""The name of a file, less its ending, and the drawing in it."""
Figure = Callable[[StudyRow], float | None]

WORDS = {
    "warm": "warm: one matrix again and again, of which the cache serves what fits",
    "cold": "cold: matrices rotate past the cache",
}
NAMES = {  # parts of names that need a word wherever they occur
    "gemmule's choice": "gemmule's choice: what a call takes by itself",
    "fp16 two_step": "fp16 two_step: at the document's launch parameters for its RTX 3090",
    "P100 table": "P100 table: at the document's launch parameters for its P100",
    ", printed": "printed: the document's own times on its own GPU",
    "the transpose alone": "the transpose alone: a part of transpose_then, no product",
}
FASTER = Scale("times as fast; blue above 1, orange below, pale is close to 1", ratios=True)
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


def subtitle(rows: Rows, *facts: str, temperature: str = "") -> str:
    """Return what stands below a title: device, facts, and how the operands were kept.

    facts: dtype, shapes, unit, whatever the drawing needs to be read alone.
    """
    return "; ".join(filter(None, (device_of(rows), *facts, WORDS.get(temperature, ""))))


def explained(below: str, names: Iterable[str]) -> str:
    """Return a subtitle with a word on those of the names that need one."""
    known = list(names)
    said = (said for words, said in NAMES.items() if any(words in name for name in known))
    return "; ".join((below, *said))


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
    name: str,
    shown: Sequence[Panel],
    words: tuple[str, str],
    scale: Scale,
    axes: tuple[str, str] = ("rows", "columns"),
) -> Iterator[Picture]:
    """Yield drawings of heat maps: those over the finest grid first, at most nine in each.

    words: title and subtitle. All drawings have one scale.
    """
    most = max((len(panel.values) for panel in shown), default=0)
    fine = [panel for panel in shown if len(panel.values) == most]
    rest = [panel for panel in shown if len(panel.values) < most]
    drawn = [group[at : at + MANY_PANELS] for group in (fine, rest) for at in _starts(group)]
    scale = replace(scale, covers=[value for one in shown for value in one.values.values()])
    for index, group in enumerate(drawn):
        part = f" ({index + 1} of {len(drawn)})" if len(drawn) > 1 else ""
        below = explained(words[1], (panel.title for panel in group))
        svg = heat_maps(group, scale, title=words[0] + part, subtitle=below, axes=axes)
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
    return Panel(f"{ours} over {other}", common) if common else None


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
    """Yield charts of at most six lines; of several, each has the first line and the same axes.

    words: title and subtitle.
    """
    first, rest = lines[:1], list(lines[1:])
    groups = [rest[at : at + MOST_LINES - 1] for at in range(0, max(len(rest), 1), MOST_LINES - 1)]
    axes = replace(axes, covers=[point for line in lines for point in line.points])
    for index, group in enumerate(groups if lines else ()):
        part = f" ({index + 1} of {len(groups)})" if len(groups) > 1 else ""
        shown = [*first, *group]
        below = explained(words[1], (line.name for line in shown))
        title = words[0] + part
        svg = line_chart(shown, axes, title=title, subtitle=below, ceilings=ceilings)
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
    name: str,
    groups: Sequence[Group],
    words: tuple[str, str],
    unit: str,
    limit: Mark | None = None,
) -> Iterator[Picture]:
    """Yield a chart of bars; nothing where there are no values. words: title, subtitle."""
    if groups:
        below = explained(words[1], (group.label for group in groups))
        yield name, grouped_bars(groups, title=words[0], subtitle=below, unit=unit, limit=limit)


def by_temperature(
    rows: Iterable[StudyRow], value: Figure, label: Callable[[StudyRow], str]
) -> list[Group]:
    """Return a group of bars for each label, warm and cold side by side."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if (number := value(row)) is not None:
            found.setdefault(label(row), {})[row.temperature] = number
    return [Group(name, values) for name, values in found.items()]


def shape_of(case: Mapping[str, object]) -> str:
    """Return the sizes of a case in words: ``1,024 x 1,024 times 1,024 x 1,024``.

    >>> shape_of({"m": 16384, "n": 1024}), shape_of({"n": 64})
    ('16,384 x 1,024', 'n = 64')
    """
    sizes = {k: f"{case[k]:,}" for k in ("m", "n", "columns") if k in case}
    if "m" not in sizes:
        return f"n = {sizes['n']}" if sizes else ""
    left = f"{sizes['m']} x {sizes['n']}"
    return f"{left} times {sizes['n']} x {sizes['columns']}" if "columns" in sizes else left


def counters(
    rows: Rows, backend: str, name: str, title: str, dtype: str = "float32"
) -> Iterator[Picture]:
    """Yield the profiler's balance: how busy each unit was, for every kernel it watched."""
    here = rows.where("counters", backend=backend)
    groups = []
    for row in here:
        values = {
            what: value
            for what in ("SM throughput", "memory throughput", "FMA pipe")
            if (value := row.figures.get(f"{what} percent")) is not None
        }
        groups += [Group(row.name, values)] if values else []
    shapes = ", ".join(dict.fromkeys(shape_of(row.case) for row in here))
    below = subtitle(here, dtype, shapes, "Nsight Compute, percent of each unit's peak")
    yield from bars(name, groups, (title, below), "%")
