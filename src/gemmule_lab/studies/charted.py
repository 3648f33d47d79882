"""One writer for the charts of all studies, each of which is data.

A chart has ``kind``, ``file``, ``title``, ``experiment``, ``facts`` for below the title, and
``each`` (temperatures, a drawing for each), ``value`` (of `FIGURES`, or what takes a row) with its
``unit``, and what its kind needs: ``names``, ``pairs`` (draw how many times as fast one of each is
as the other), ``over`` (the size on the axis, or "name": the numbers that end a name), ``at``
(sizes that are fixed; "most" is the largest), ``most`` (the largest n), ``first`` (names before
others), ``limit``, ``log``, ``axis``, ``axes``, ``key``, ``label``, ``called`` (other names), and
``marks`` (what gives marks of the rows) or ``beside`` (lines of others). `NAMES` are words on
names.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from gemmule_lab.records.results import geomean
from gemmule_lab.records.study import Rows, StudyRow
from gemmule_lab.report import charts
from gemmule_lab.report.charts import Chart, Line, Mark
from gemmule_lab.studies.grid import Study

Spec = Mapping[str, Any]
Picture = tuple[str, Chart]
"""The name of a file, less its ending, and what is drawn in it."""
Figure = Callable[[StudyRow], float]  # 0 where there is none
Kind: TypeAlias = "Callable[[Spec, Head, Rows, Rows], Iterator[Picture]]"
Groups: TypeAlias = Mapping[str, Mapping[str, float]]
Ends: TypeAlias = Mapping[str, charts.Ends]
T = TypeVar("T")

SIZES = {"n": "n, of an n x n matrix", "m": "rows", "columns": "columns"}
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


FIGURES: Mapping[str, Figure] = {  # of a timed row; use: percent of the data sheet's bandwidth
    "us": lambda row: row.us,
    "ms": lambda row: row.us / 1e3,
    "use": lambda row: 100 * row.figures.get("gbs", 0) / row.figures.get("datasheet_gbs", math.inf),
    "TFLOP/s": lambda row: row.figures.get("gflops", 0) / 1e3,
    "gbs": lambda row: row.figures.get("gbs", 0),
    "gflops": lambda row: row.figures.get("gflops", 0),
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


def chart(
    kind: str | Kind, file: str, title: str, experiment: str, *facts: str, **look: Any
) -> Spec:
    """Return a chart as data; kind: one of `KINDS`, or what draws a single one."""
    draw = KINDS[kind] if isinstance(kind, str) else kind
    named = {"kind": draw, "file": file, "title": title, "experiment": experiment}
    return {**named, "facts": facts, **look}


def busy(title: str, shape: str) -> Spec:
    """Return a chart of the counters that say how busy a kernel keeps each unit."""
    units = ("SM throughput", "memory throughput", "FMA pipe")
    facts = ("float32", shape, "Nsight Compute, percent of each unit's peak")
    figures = {unit: f"{unit} percent" for unit in units}
    return chart("figures", "balance", title, "counters", *facts, figures=figures, unit="%")


def pictures(study: Study, rows: Rows) -> Iterator[Picture]:
    """Yield what is drawn of both back ends' rows, each chart at each of its temperatures."""
    for backend in ("cuda", "cpu"):
        for spec in study.charts:
            each = spec.get("each", [""])
            for kept in each:
                here = rows.where(spec["experiment"], backend=backend, temperature=kept or None)
                if here := _chosen(spec, here):
                    name = f"study-{study.number}-{backend}-{spec['file']}"
                    name += f"-{kept}" if len(each) > 1 else ""
                    title = f"{spec['title']}, {kept}" if kept else spec["title"]
                    head = head_of(name, title, here, *spec["facts"], kept=kept)
                    yield from spec["kind"](spec, head, here, rows)


def head_of(name: str, title: str, rows: Rows, *facts: str, kept: str = "") -> Head:
    """Return a head; below stand the devices, facts, and how the operands were kept.

    facts: dtype, shapes, unit, whatever the drawing needs to be read alone. kept: the temperature.
    """
    known = {
        "dtypes": ", ".join(dict.fromkeys(str(row.case.get("dtype", "")) for row in rows)),
        "cpus": ", ".join(sorted({e.cpu for e in rows.environments.values() if e.cpu})),
        "shapes": ", ".join(dict.fromkeys(shape_of(row.case) for row in rows)),
    }
    devices = ", ".join(dict.fromkeys(row.device for row in rows))
    warmth = [kept] if kept else {row.temperature for row in rows}
    words = (WORDS[one] for one in WORDS if one in warmth)
    told = (devices, *(fact.format(**known) for fact in facts), *words)
    return Head(name, title, "; ".join(filter(None, told)))


def _chosen(spec: Spec, here: Rows) -> Rows:
    """Return the rows that a chart is about: some names, in its order, at fixed sizes."""
    if "names" in spec:
        order = {name: index for index, name in enumerate(spec["names"])}
        kept = [row for row in here if row.name in order]
        here = here.only(sorted(kept, key=lambda row: order[row.name]))
    for size, value in spec.get("at", {}).items():
        sizes = [int(row.case[size]) for row in here.timed() if value == "most"]
        wanted: dict[str, Any] = {size: max(sizes, default=0) if value == "most" else value}
        here = here.where(**wanted)
    if spec.get("square"):
        here = here.only(row for row in here if row.case["m"] == row.case["n"])
    most = spec.get("most", float("inf"))
    return here.only(row for row in here if most >= int(row.case.get("n", 0)))


def _values(
    spec: Spec, rows: Rows, key: Callable[[StudyRow], tuple[str, Any]]
) -> dict[str, dict[Any, list[float]]]:
    """Return a figure of timed rows, where it is positive, by what their key is made of.

    Of pairs, how many times as fast one is as the other.
    """
    value: Figure = FIGURES.get(spec["value"], spec["value"])
    found: dict[str, dict[Any, list[float]]] = {}
    for row in rows.timed():
        name, at = key(row)
        if (figure := value(row)) > 0:
            found.setdefault(name, {}).setdefault(at, []).append(figure)
    ratios: dict[str, dict[Any, list[float]]] = {}
    for ours, plain in spec.get("pairs", ()):
        mine, theirs = (found.get(name, {}) for name in (ours, plain))
        cells = {at: [theirs[at][-1] / us[-1]] for at, us in mine.items() if at in theirs}
        label = f"{ours} over {plain.removeprefix(ours.split()[0] + ' ')}"
        ratios |= {label: cells} if cells else {}
    return ratios if "pairs" in spec else found


def _maps(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield a heat map for each implementation: rows down, columns across, or numbers of names."""
    by_name, ratios = spec.get("over") == "name", "pairs" in spec

    def place(row: StudyRow) -> tuple[str, tuple[int, int]]:
        name, height, _, width = row.name.split() if by_name else (row.name, "m", "", "n")
        return name, (int(row.case.get(height, height)), int(row.case.get(width, width)))

    shown = {
        name: {at: one[0] if len(one) == 1 else geomean(one) for at, one in cells.items()}
        for name, cells in _values(spec, here, place).items()
    }
    if by_name:
        best = {name: min(cells, key=lambda at: cells[at]) for name, cells in shown.items()}
        shown = {f"{n}, best {best[n][0]} x {best[n][1]}": cells for n, cells in shown.items()}
    key = FASTER if ratios else spec.get("key", f"{spec['unit']}; darker is more")
    if ratios and shown:
        means = " and ".join(f"{geomean(cells.values()):.2f}" for cells in shown.values())
        every = [value for cells in shown.values() for value in cells.values()]
        won = f"{sum(value > 1 for value in every)} of {len(every)}"
        head = head._replace(title=head.title.format(means=means, won=won))
    yield from maps(head, shown, key, axes=tuple(spec["axes"]), ratios=ratios)


def maps(head: Head, shown: Mapping[str, charts.Cells], key: str, **look: Any) -> Iterator[Picture]:
    """Yield heat maps: those over the finest grid first, at most nine in each chart, of one scale.

    look: what of `charts.HeatMaps` is not as usual.
    """
    most = max(map(len, shown.values()), default=0)
    grids = ([one for one in shown if (len(shown[one]) == most) == fine] for fine in (True, False))
    size = range(0, len(shown), MANY_PANELS)
    parts = [part for grid in grids for at in size if (part := grid[at : at + MANY_PANELS])]
    covers = [value for cells in shown.values() for value in cells.values()]
    for (name, title, below), names in head.parts(parts, str):
        cells = {one: shown[one] for one in names}
        yield name, charts.HeatMaps(title, below, cells, key, covers=covers, **look)


def _lines(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield a line for each implementation over a size of its cases, or what ends its name."""
    over, called = spec["over"], spec.get("called", {})

    def place(row: StudyRow) -> tuple[str, float]:
        name, _, last = row.name.rpartition(" ") if over == "name" else (row.name, "", "")
        return called.get(name, name), float(last or row.case[over])

    lines = [
        Line(name, sorted((x, statistics.fmean(ys)) for x, ys in points.items()))
        for name, points in _values(spec, here, place).items()
    ]
    if not {"names", "pairs"} & {*spec}:
        first = spec.get("first", ())
        lines.sort(key=lambda line: (line.name not in first, -line.points[-1][1]))
    lines += spec.get("beside", ()) if lines and WORDS["cold"] not in head.below else ()
    covers = [point for line in lines for point in line.points]
    ceilings, head = _limit(spec, head, here, rows, [y for _, y in covers])
    axis = spec.get("axis") or SIZES[over]
    axes = charts.Axes(axis, spec["unit"], spec.get("log", False), covers=covers)
    marks = [mark for mark in spec.get("marks", lambda _: ())(rows) if mark.at <= spec["most"]]
    if marks:
        head = head._replace(below=f"{head.below}; grey: where the quartiles let the GPU overtake")
    # Charts of at most six lines; of several, each has the first line and the same axes.
    most = len(lines) if marks else MOST_LINES
    rest = range(1, max(len(lines), 2), most - 1)
    parts = [[*lines[:1], *lines[at : at + most - 1]] for at in rest if lines]
    for (name, title, below), part in head.parts(parts, lambda line: line.name):
        yield name, charts.Lines(title, below, part, axes, ceilings, marks)


def _limit(
    spec: Spec, head: Head, here: Rows, rows: Rows, values: list[float]
) -> tuple[list[Mark], Head]:
    """Return the ceilings that a chart names, and its head, which tells what lies beyond them."""
    backend, limit = here[0].backend, spec.get("limit")
    if limit == "read":
        found, read = [], rows.ceiling("read", backend)
        if read is not None:
            found.append(Mark(f"measured read ceiling, {read:,.0f} GB/s", read))
        sheet = rows.where(backend=backend).figure("datasheet_gbs")
        if sheet is not None and (read is None or sheet > 1.08 * read):
            found.append(Mark(f"data sheet, {sheet:,.0f} GB/s", sheet))
        return found, head
    fma = rows.ceiling("fma float32", backend) if limit else None
    if fma is None:
        return [], head
    fma *= 1e-3 if spec["unit"] == "TFLOP/s" else 1.0
    if any(value > fma for value in values):
        below = f"{head.below}; what is beyond the FMA ceiling runs on tensor cores"
        head = head._replace(below=below)
    return [Mark(f"measured FMA ceiling, {charts.number(fma)} {spec['unit']}", fma)], head


def _bars(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield bars by label, warm and cold side by side; ``sorted`` has the longest first."""
    groups: dict[str, dict[str, float]] = {}
    for row in here.timed():
        if (value := FIGURES[spec["value"]](row)) > 0:
            label = spec["label"].format(name=row.name, shape=shape_of(row.case), **row.case)
            groups.setdefault(label, {})[row.temperature] = value
    if spec.get("sorted"):
        groups = dict(sorted(groups.items(), key=lambda item: -max(item[1].values())))
    values = [value for group in groups.values() for value in group.values()]
    marks, head = _limit(spec, head, here, rows, values)
    yield from bar_chart(head, groups, spec["unit"], limit=marks[0] if marks else None)


def _figures(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield counters or parts of each row as bars: ``figures`` names them, times ``scale``."""
    groups: dict[str, dict[str, float]] = {}
    for row in here:
        for short, name in spec["figures"].items():
            if row.figures.get(name, 0) > 0:
                label, series = (short, row.name) if spec.get("parts") else (row.name, short)
                groups.setdefault(label, {})[series] = row.figures[name] * spec.get("scale", 1)
    yield from bar_chart(head, groups, spec["unit"])


def _ranges(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield the mean over the cases of each ``name #1``, ``name #2``: the middle one, and all."""
    values = _values(spec, here, lambda row: (row.name.partition(" #")[0], row.name))
    means = {name: [*map(statistics.fmean, one.values())] for name, one in sorted(values.items())}
    groups = {name: {spec["unit"]: statistics.median(found)} for name, found in means.items()}
    ends = {name: (min(found), max(found)) for name, found in means.items()}
    yield from bar_chart(head, groups, spec["unit"], ends=ends)


def bar_chart(
    head: Head, groups: Groups, unit: str, limit: Mark | None = None, ends: Ends | None = None
) -> Iterator[Picture]:
    """Yield a chart of bars in groups; nothing where there are no values."""
    for (name, title, below), _ in head.parts([list(groups)] if groups else [], str):
        yield name, charts.Bars(title, below, *charts.grouped(groups, unit, ends), limit)


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


KINDS: Mapping[str, Kind] = {"maps": _maps, "lines": _lines, "bars": _bars}
KINDS = {**KINDS, "figures": _figures, "ranges": _ranges}
