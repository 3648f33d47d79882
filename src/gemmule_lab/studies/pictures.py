"""What the pictures of several studies share: rows as heat maps, lines and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from gemmule_lab.report.charts import (
    Axes,
    Bars,
    Cells,
    Chart,
    Ends,
    HeatMaps,
    Line,
    Lines,
    Mark,
    grouped,
)
from gemmule_lab.studies.records import Rows, StudyRow

Picture = tuple[str, Chart]
"""The name of a file, less its ending, and what is drawn in it."""
Figure = Callable[[StudyRow], float | None]
Groups = Mapping[str, Mapping[str, float]]
T = TypeVar("T")

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
FASTER = "times as fast; blue above 1, orange below, pale is close to 1"
MANY_PANELS, MOST_LINES = 9, 6  # of one chart


def _use(row: StudyRow) -> float | None:
    gbs, datasheet = row.figures.get("gbs"), row.figures.get("datasheet_gbs")
    return 100 * gbs / datasheet if gbs and datasheet else None


FIGURES: Mapping[str, Figure] = {  # use: percent of the data sheet's bandwidth
    "us": lambda row: None if row.times_us is None else row.us,
    "ms": lambda row: None if row.times_us is None else row.us / 1e3,
    "use": _use,
    "TFLOP/s": lambda row: row.figures["gflops"] / 1e3 if "gflops" in row.figures else None,
    "gbs": lambda row: row.figures.get("gbs"),
    "gflops": lambda row: row.figures.get("gflops"),
}


class Head(NamedTuple):
    """The name of a drawing's file, less its ending, its title, and the words below that."""

    name: str
    title: str
    below: str

    def parts(
        self, parts: Sequence[Sequence[T]], names: Callable[[T], str]
    ) -> Iterator[tuple[Head, Sequence[T]]]:
        """Yield a head for each part of what is drawn, numbered where there are several.

        The words below say of some names in a part what they mean.
        """
        for index, part in enumerate(parts, 1):
            several = len(parts) > 1
            name = f"{self.name}-{index}" if several else self.name
            title = f"{self.title} ({index} of {len(parts)})" if several else self.title
            known = list(map(names, part))
            said = (said for words, said in NAMES.items() if any(words in one for one in known))
            yield Head(name, title, "; ".join((self.below, *said))), part


def head(name: str, title: str, rows: Rows, *facts: str, kept: str = "") -> Head:
    """Return a head; below stand the device, facts, and how the operands were kept.

    facts: dtype, shapes, unit, whatever the drawing needs to be read alone. kept: the temperature.
    """
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    return Head(name, title, "; ".join(filter(None, (devices, *facts, WORDS.get(kept, "")))))


def by_shape(rows: Rows, value: Figure) -> dict[tuple[int, int], float]:
    """Return a figure of timed rows by rows and columns, where it is positive."""
    values = (((int(r.case["m"]), int(r.case["n"])), value(r)) for r in rows.timed())
    return {case: number for case, number in values if number is not None and number > 0}


def panels(rows: Rows, value: Figure) -> dict[str, Cells]:
    """Return a heat map for each implementation, rows down, columns across."""
    found = {name: by_shape(rows.where(name=name), value) for name in rows.names()}
    return {name: cells for name, cells in found.items() if cells}


def ratios(rows: Rows, pairs: Iterable[tuple[str, str]]) -> dict[str, Cells]:
    """Return how many times as fast the first of each pair is, by rows and columns."""
    found = {}
    for ours, other in pairs:
        times, theirs = (by_shape(rows.where(name=n), FIGURES["us"]) for n in (ours, other))
        found[f"{ours} over {other}"] = {
            c: theirs[c] / us for c, us in times.items() if c in theirs
        }
    return {name: cells for name, cells in found.items() if cells}


def maps(head: Head, shown: Mapping[str, Cells], key: str, **look: Any) -> Iterator[Picture]:
    """Yield heat maps: those over the finest grid first, at most nine in each chart, of one scale.

    look: what of `HeatMaps` is not as usual.
    """
    most = max(map(len, shown.values()), default=0)
    grids = ([one for one in shown if (len(shown[one]) == most) == fine] for fine in (True, False))
    covers = [value for cells in shown.values() for value in cells.values()]
    parts = [
        grid[at : at + MANY_PANELS] for grid in grids for at in range(0, len(grid), MANY_PANELS)
    ]
    for (name, title, below), part in head.parts(parts, str):
        cells = {one: shown[one] for one in part}
        yield name, HeatMaps(title, below, cells, key, covers=covers, **look)


def lines_of(rows: Rows, value: Figure, axis: str = "n") -> list[Line]:
    """Return a line for each implementation over a size of its cases."""
    found = []
    for name in rows.names():
        points = {
            float(row.case[axis]): number
            for row in rows.where(name=name).timed()
            if (number := value(row)) is not None and number > 0
        }
        found += [Line(name, sorted(points.items()))] if points else []
    return found


def line_charts(
    head: Head, lines: Sequence[Line], axes: Axes, ceilings: Sequence[Mark] = ()
) -> Iterator[Picture]:
    """Yield charts of at most six lines; of several, each has the first line and the same axes."""
    rest = range(1, max(len(lines), 2), MOST_LINES - 1)
    parts = [[*lines[:1], *lines[at : at + MOST_LINES - 1]] for at in rest if lines]
    axes = replace(axes, covers=[point for line in lines for point in line.points])
    for (name, title, below), part in head.parts(parts, lambda line: line.name):
        yield name, Lines(title, below, part, axes, ceilings)


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
    head: Head,
    groups: Groups,
    unit: str,
    *,
    limit: Mark | None = None,
    ends: Mapping[str, Ends] | None = None,
) -> Iterator[Picture]:
    """Yield a chart of bars in groups; nothing where there are no values."""
    for (name, title, below), part in head.parts([list(groups)] if groups else [], str):
        drawn, series = grouped({label: groups[label] for label in part}, unit, ends)
        yield name, Bars(title, below, drawn, series, limit)


def by_temperature(
    rows: Iterable[StudyRow], value: Figure, label: Callable[[StudyRow], str]
) -> dict[str, dict[str, float]]:
    """Return a group of bars for each label, warm and cold side by side."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if (number := value(row)) is not None:
            found.setdefault(label(row), {})[row.temperature] = number
    return found


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


def shapes_of(rows: Rows) -> str:
    """Return the sizes of all cases in words."""
    return ", ".join(dict.fromkeys(shape_of(row.case) for row in rows))
