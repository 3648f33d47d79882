"""One writer for the charts of all studies, each of which is data.

A chart has ``kind``, ``file``, ``title``, ``experiment``, ``facts`` for below the title, and
``each`` (temperatures, a drawing for each), ``value`` (of `FIGURES`, or what takes a row) with its
``unit``, and what its kind needs: ``names``, ``pairs``, ``over`` (the size on the axis, or "name":
the numbers that end a name), ``at`` (sizes that are fixed; "most" is the largest), ``most`` (the
largest n), ``first`` (names before others), ``limit``, ``log``, ``axis``, ``axes``, ``key``,
``label``, ``called`` (other names), and ``marks`` (what gives marks of the rows) or ``beside``
(lines of others). What a name says in the words below is in `NAMES`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from gemmule_lab.records.results import geomean
from gemmule_lab.report.charts import (
    Axes,
    Bars,
    Cells,
    Chart,
    HeatMaps,
    Line,
    Lines,
    Mark,
    grouped,
    number,
)
from gemmule_lab.studies.grid import Study
from gemmule_lab.studies.records import Rows, StudyRow

Spec = Mapping[str, Any]
Picture = tuple[str, Chart]
"""The name of a file, less its ending, and what is drawn in it."""
Figure = Callable[[StudyRow], float | None]
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


def chart(kind: str, file: str, title: str, experiment: str, *facts: str, **look: Any) -> Spec:
    """Return a chart as data."""
    named = {"kind": kind, "file": file, "title": title, "experiment": experiment}
    return {**named, "facts": facts, **look}


def pictures(study: Study, rows: Rows) -> Iterator[Picture]:
    """Yield what is drawn of both back ends' rows."""
    for backend in ("cuda", "cpu"):
        for spec in study.charts:
            for kept in spec.get("each", [""]):
                yield from _drawn(study.number, spec, rows, backend, kept)
        yield from study.more(rows, backend)


def _drawn(study: str, spec: Spec, rows: Rows, backend: str, kept: str) -> Iterator[Picture]:
    """Yield a chart at one temperature, or at no one, where a back end has rows for it."""
    here = rows.where(spec["experiment"], backend=backend, temperature=kept or None)
    here = _chosen(spec, here)
    if here:
        several = len(spec.get("each", "")) > 1
        name = f"study-{study}-{backend}-{spec['file']}{f'-{kept}' if several else ''}"
        title = f"{spec['title']}, {kept}" if kept else spec["title"]
        head = head_of(name, title, here, *spec["facts"], kept=kept)
        yield from KINDS[spec["kind"]](spec, head, here, rows)


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


def _value(spec: Spec) -> Figure:
    value: Figure = FIGURES.get(spec["value"], spec["value"])
    return value


def _values(
    rows: Rows, value: Figure, key: Callable[[StudyRow], tuple[str, Any]]
) -> dict[str, dict[Any, list[float]]]:
    """Return a figure of timed rows, where it is positive, by what their key is made of."""
    found: dict[str, dict[Any, list[float]]] = {}
    for row in rows.timed():
        name, at = key(row)
        if (figure := value(row)) is not None and figure > 0:
            found.setdefault(name, {}).setdefault(at, []).append(figure)
    return found


def _place(row: StudyRow) -> tuple[str, tuple[int, int]]:
    return row.name, (int(row.case["m"]), int(row.case["n"]))


def _named_place(row: StudyRow) -> tuple[str, tuple[int, int]]:
    name, height, _, width = row.name.split()
    return name, (int(height), int(width))


def _maps(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield a heat map for each implementation: rows down, columns across, or numbers of names."""
    by_name = spec.get("over") == "name"
    values = _values(here, _value(spec), _named_place if by_name else _place)
    shown = {
        name: {at: one[0] if len(one) == 1 else geomean(one) for at, one in cells.items()}
        for name, cells in values.items()
    }
    if by_name:
        best = {
            name: min((value, at) for at, value in cells.items())[1]
            for name, cells in shown.items()
        }
        shown = {f"{n}, best {best[n][0]} x {best[n][1]}": cells for n, cells in shown.items()}
    key = spec.get("key", f"{spec['unit']}; darker is more")
    yield from maps(head, shown, key, axes=tuple(spec["axes"]))


def _gains(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield how many times as fast one implementation is as another, by rows and columns."""
    times, shown = _values(here, FIGURES["us"], _place), dict[str, Cells]()
    for ours, other in spec["pairs"]:
        mine, theirs = (times.get(name, {}) for name in (ours, other))
        cells = {at: theirs[at][-1] / us[-1] for at, us in mine.items() if at in theirs}
        shown |= {f"{ours} over {other}": cells} if cells else {}
    if shown:
        means = " and ".join(f"{geomean(cells.values()):.2f}" for cells in shown.values())
        every = [value for cells in shown.values() for value in cells.values()]
        won = f"{sum(value > 1 for value in every)} of {len(every)}"
        head = head._replace(title=head.title.format(means=means, won=won))
        yield from maps(head, shown, FASTER, axes=tuple(spec["axes"]), ratios=True)


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


def _lines(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield a line for each implementation over a size of its cases, or what ends its name."""
    over, called = spec["over"], spec.get("called", {})

    def place(row: StudyRow) -> tuple[str, float]:
        name, _, last = row.name.rpartition(" ") if over == "name" else (row.name, "", "")
        return called.get(name, name), float(last or row.case[over])

    values = _values(here, _value(spec), place)
    lines = [
        Line(name, sorted((x, statistics.fmean(ys)) for x, ys in points.items()))
        for name, points in values.items()
    ]
    if "names" not in spec:
        first = spec.get("first", ())
        lines.sort(key=lambda line: (line.name not in first, -line.points[-1][1]))
    lines += spec.get("beside", ()) if lines and WORDS["cold"] not in head.below else ()
    ceilings, head = _limit(spec, head, here, rows, [y for line in lines for _, y in line.points])
    axes = Axes(
        spec.get("axis") or SIZES[over],
        spec["unit"],
        spec.get("log", False),
        covers=[point for line in lines for point in line.points],
    )
    marks = (
        [mark for mark in spec["marks"](rows) if mark.at <= spec["most"]] if "marks" in spec else []
    )
    if marks:
        head = head._replace(below=f"{head.below}; grey: where the quartiles let the GPU overtake")
    yield from _line_charts(head, lines, axes, ceilings, marks)


def _line_charts(
    head: Head, lines: Sequence[Line], axes: Axes, ceilings: Sequence[Mark], marks: Sequence[Mark]
) -> Iterator[Picture]:
    """Yield charts of at most six lines; of several, each has the first line and the same axes."""
    most = len(lines) if marks else MOST_LINES
    rest = range(1, max(len(lines), 2), most - 1)
    parts = [[*lines[:1], *lines[at : at + most - 1]] for at in rest if lines]
    for (name, title, below), part in head.parts(parts, lambda line: line.name):
        yield name, Lines(title, below, part, axes, ceilings, marks)


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
    return [Mark(f"measured FMA ceiling, {number(fma)} {spec['unit']}", fma)], head


def _ratio_lines(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield how many times as fast each implementation is as its plain form, over a size."""
    over, lines = spec["over"], []
    values = _values(here, FIGURES["us"], lambda row: (row.name, float(row.case[over])))
    for tried, plain in spec["pairs"]:
        mine, theirs = (values.get(name, {}) for name in (tried, plain))
        points = sorted((n, theirs[n][-1] / us[-1]) for n, us in mine.items() if n in theirs)
        label = f"{tried} / {plain.removeprefix(tried.split()[0] + ' ')}"
        lines += [Line(label, points)] if points else []
    covers = [point for line in lines for point in line.points]
    axes = Axes(SIZES[over], "times as fast", covers=covers)
    yield from _line_charts(head, lines, axes, (), ())


def _bars(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield bars by label, warm and cold side by side; ``sorted`` has the longest first."""
    groups: dict[str, dict[str, float]] = {}
    for row in here.timed():
        if (value := _value(spec)(row)) is not None:
            label = spec["label"].format(name=row.name, shape=shape_of(row.case), **row.case)
            groups.setdefault(label, {})[row.temperature] = value
    if spec.get("sorted"):
        groups = dict(sorted(groups.items(), key=lambda item: -max(item[1].values())))
    values = [value for group in groups.values() for value in group.values()]
    marks, head = _limit(spec, head, here, rows, values)
    yield from bar_chart(head, groups, spec["unit"], limit=marks[0] if marks else None)


def _figures(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield counters or parts of each row as bars: `figures` names them, in `scale` of the unit."""
    groups: dict[str, dict[str, float]] = {}
    for row in here:
        for short, name in spec["figures"].items():
            if row.figures.get(name, 0) > 0:
                label, series = (short, row.name) if spec.get("parts") else (row.name, short)
                groups.setdefault(label, {})[series] = row.figures[name] * spec["scale"]
    yield from bar_chart(head, groups, spec["unit"])


def _ranges(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield the mean over the cases of each ``name #1``, ``name #2``: the middle one, and all."""
    values = _values(here, _value(spec), lambda row: (row.name.partition(" #")[0], row.name))
    means = {name: [*map(statistics.fmean, one.values())] for name, one in sorted(values.items())}
    groups = {name: {spec["unit"]: statistics.median(found)} for name, found in means.items()}
    ends = {name: (min(found), max(found)) for name, found in means.items()}
    yield from bar_chart(head, groups, spec["unit"], ends=ends)


def bar_chart(
    head: Head,
    groups: Mapping[str, Mapping[str, float]],
    unit: str,
    *,
    limit: Mark | None = None,
    ends: Mapping[str, tuple[float, float]] | None = None,
) -> Iterator[Picture]:
    """Yield a chart of bars in groups; nothing where there are no values."""
    for (name, title, below), _ in head.parts([list(groups)] if groups else [], str):
        drawn, series = grouped(groups, unit, ends)
        yield name, Bars(title, below, drawn, series, limit)


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


KINDS: Mapping[str, Callable[[Spec, Head, Rows, Rows], Iterator[Picture]]] = {
    "maps": _maps,
    "gains": _gains,
    "lines": _lines,
    "ratio lines": _ratio_lines,
    "bars": _bars,
    "figures": _figures,
    "ranges": _ranges,
}
