"""One writer for the charts of all studies, each of which is data.

A chart has ``kind``, ``file``, ``title``, ``experiment``, ``facts`` for below the title, and
``each`` (temperatures, a drawing for each), ``value`` (of `pictures.FIGURES`) with its ``unit``,
and what its kind needs: ``names``, ``pairs``, ``over`` (the size on the axis), ``at`` (sizes that
are fixed; "most" is the largest), ``first`` (names before others), ``limit``, ``log``, ``axes`` and
``label``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gemmule_lab.records.results import geomean
from gemmule_lab.report.charts import Axes, Line, Mark, number
from gemmule_lab.studies import pictures as draw
from gemmule_lab.studies.grid import Study
from gemmule_lab.studies.pictures import Head, Picture
from gemmule_lab.studies.records import Rows, StudyRow

Spec = Mapping[str, Any]
SIZES = {"n": "n, of an n x n matrix", "m": "rows", "columns": "columns"}


def chart(kind: str, file: str, title: str, experiment: str, *facts: str, **look: Any) -> Spec:
    """Return a chart as data."""
    named = {"kind": kind, "file": file, "title": title, "experiment": experiment}
    return {**named, "facts": facts, **look}


def pictures(study: Study, rows: Rows) -> Iterator[Picture]:
    """Yield the name of a file, less its ending, and what is drawn in it, of both back ends."""
    for backend in ("cuda", "cpu"):
        yield from _charts(study, rows, backend)
        yield from study.more(rows, backend)


def _charts(study: Study, rows: Rows, backend: str) -> Iterator[Picture]:
    """Yield the charts for which a back end has rows."""
    for spec in study.charts:
        each = spec.get("each", [""])
        for kept in each:
            asked = rows.where(spec["experiment"], backend=backend, temperature=kept or None)
            here = _chosen(spec, asked)
            if not here:
                continue
            several = len(each) > 1
            name = f"study-{study.number}-{backend}-{spec['file']}{f'-{kept}' if several else ''}"
            title = f"{spec['title']}, {kept}" if kept else spec["title"]
            dtypes = ", ".join(dict.fromkeys(str(row.case.get("dtype", "")) for row in here))
            facts = [fact.format(dtypes=dtypes) for fact in spec["facts"]]
            facts += [words for warm, words in draw.WORDS.items() if _both(here, warm, kept)]
            head = draw.head(name, title, here, *facts, kept=kept)
            yield from KINDS[spec["kind"]](spec, head, here, rows)


def _both(here: Rows, temperature: str, kept: str) -> bool:
    """Tell whether a drawing of no one temperature has rows of this one."""
    return not kept and bool(here.where(temperature=temperature))


def _chosen(spec: Spec, here: Rows) -> Rows:
    """Return the rows that a chart is about: some names, in its order, at fixed sizes."""
    if "names" in spec:
        order = {name: index for index, name in enumerate(spec["names"])}
        kept = [row for row in here if row.name in order]
        here = Rows(sorted(kept, key=lambda row: order[row.name]), here.environments)
    for size, value in spec.get("at", {}).items():
        sizes = [int(row.case[size]) for row in here.timed() if value == "most"]
        wanted: dict[str, Any] = {size: max(sizes, default=0) if value == "most" else value}
        here = here.where(**wanted)
    square = spec.get("square", False)
    return Rows((r for r in here if not square or r.case["m"] == r.case["n"]), here.environments)


def _maps(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    shown = draw.panels(here, draw.FIGURES[spec["value"]])
    yield from draw.maps(head, shown, f"{spec['unit']}; darker is more", axes=tuple(spec["axes"]))


def _gains(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield how many times as fast one implementation is as another, by rows and columns."""
    shown = draw.ratios(here, spec["pairs"])
    if not shown:
        return
    means = " and ".join(f"{geomean(cells.values()):.2f}" for cells in shown.values())
    every = [value for cells in shown.values() for value in cells.values()]
    won = f"{sum(value > 1 for value in every)} of {len(every)}"
    head = head._replace(title=head.title.format(means=means, won=won))
    yield from draw.maps(head, shown, draw.FASTER, axes=tuple(spec["axes"]), ratios=True)


def _lines(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    lines = draw.lines_of(here, draw.FIGURES[spec["value"]], spec["over"])
    if "names" not in spec:
        first = spec.get("first", ())
        lines.sort(key=lambda line: (line.name not in first, -line.points[-1][1]))
    marks, head = _limit(spec, head, here, rows, [y for line in lines for _, y in line.points])
    axes = Axes(spec.get("axis", SIZES[spec["over"]]), spec["unit"], log_y=spec.get("log", False))
    yield from draw.line_charts(head, lines, axes, marks)


def _limit(
    spec: Spec, head: Head, here: Rows, rows: Rows, values: list[float]
) -> tuple[list[Mark], Head]:
    """Return the ceilings that a chart names, and its head, which tells what lies beyond them."""
    if not here or "limit" not in spec:
        return [], head
    if spec["limit"] == "read":
        return draw.ceiling_marks(rows, here[0].backend), head
    scale = 1e-3 if spec["unit"] == "TFLOP/s" else 1.0
    fma = rows.ceiling("fma float32", here[0].backend)
    if fma is None:
        return [], head
    mark = Mark(f"measured FMA ceiling, {number(fma * scale)} {spec['unit']}", fma * scale)
    if any(value > mark.at for value in values):
        below = f"{head.below}; what is beyond the FMA ceiling runs on tensor cores"
        head = head._replace(below=below)
    return [mark], head


def _ratio_lines(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield how many times as fast each implementation is as its plain form, over a size."""
    lines = []
    for tried, plain in spec["pairs"]:
        times = {name: _by_size(here.where(name=name), spec["over"]) for name in (tried, plain)}
        points = [(n, times[plain][n] / us) for n, us in times[tried].items() if n in times[plain]]
        label = f"{tried} / {plain.removeprefix(tried.split()[0] + ' ')}"
        lines += [Line(label, sorted(points))] if points else []
    yield from draw.line_charts(head, lines, Axes(SIZES[spec["over"]], "times as fast"))


def _by_size(rows: Rows, size: str) -> dict[float, float]:
    return {float(row.case[size]): row.us for row in rows.timed()}


def _bars(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield bars by label, warm and cold side by side; ``sorted`` has the longest first."""

    def label(row: StudyRow) -> str:
        shape = draw.shape_of(row.case)
        return str(spec["label"].format(name=row.name, shape=shape, **row.case))

    groups = draw.by_temperature(here.timed(), draw.FIGURES[spec["value"]], label)
    if spec.get("sorted"):
        groups = dict(sorted(groups.items(), key=lambda item: -max(item[1].values())))
    values = [value for group in groups.values() for value in group.values()]
    marks, head = _limit(spec, head, here, rows, values)
    yield from draw.bars(head, groups, spec["unit"], limit=marks[0] if marks else None)


def _figures(spec: Spec, head: Head, here: Rows, rows: Rows) -> Iterator[Picture]:
    """Yield counters or parts of each row as bars: `figures` names them, in `scale` of the unit."""
    groups: dict[str, dict[str, float]] = {}
    for row in here:
        for short, name in spec["figures"].items():
            if row.figures.get(name, 0) > 0:
                found = groups.setdefault(short if spec.get("parts") else row.name, {})
                found[row.name if spec.get("parts") else short] = row.figures[name] * spec["scale"]
    yield from draw.bars(head, groups, spec["unit"])


KINDS: Mapping[str, Callable[[Spec, Head, Rows, Rows], Iterator[Picture]]] = {
    "maps": _maps,
    "gains": _gains,
    "lines": _lines,
    "ratio lines": _ratio_lines,
    "bars": _bars,
    "figures": _figures,
}
