"""A study's outcome in words: the comparison with what was printed, and the verdicts."""

from __future__ import annotations

from collections.abc import Iterator

from gemmule.lab.report.svg import Series, bandwidth_plot
from gemmule.lab.report.tables import TableData, significant, without_empty_columns
from gemmule.lab.studies.grid import Study
from gemmule.lab.studies.records import Rows

MOST_SERIES = 8
MOST_NAMED = 6
UNITS = {"gbs": "GB/s", "gflops": "GFLOP/s"}


def comparison_table(study: Study, rows: Rows) -> TableData:
    """Return the printed figures beside ours; columns that nothing stands in are left out."""
    header = study.comparison_header
    numeric = tuple(i > 0 for i in range(len(header)))
    body = tuple(study.comparison(rows))
    title = f"Document {study.seed}: printed figures and ours"
    return without_empty_columns(TableData(title, header, body, numeric))


def verdict_table(study: Study, rows: Rows) -> TableData:
    """Return each claim with its verdict, our figure and the rule that decided."""
    body = []
    for claim in study.claims:
        finding = claim.judge(rows)
        body.append((claim.text, finding.outcome, finding.figure, claim.rule))
    header = ("the document says", "verdict", "our figure", "rule")
    return TableData(f"Document {study.seed}: claims", header, tuple(body), (False,) * 4)


def times_table(study: Study, rows: Rows, backend: str) -> TableData:
    """Return every timed row of a back end: what was measured, in microseconds."""
    header = ("experiment", "case", "implementation", "temperature", "us", "q1 to q3", "note")
    body = []
    for row in rows.where(backend=backend):
        times = row.times_us
        case = ", ".join(f"{k}={v}" for k, v in row.case.items())
        words = ["", ""]
        if times is not None:
            words = [
                significant(times.median),
                f"{significant(times.q1)} to {significant(times.q3)}",
            ]
        note = row.note or ", ".join(f"{k} {significant(v)}" for k, v in row.figures.items() if v)
        body.append((row.experiment, case, row.name, row.temperature, *words, note))
    return TableData(
        f"Document {study.seed}: measured on {backend}",
        header,
        tuple(body),
        (False, False, False, False, True, True, False),
    )


def absences(rows: Rows) -> Iterator[str]:
    """Yield one line a reason: who was not timed, on how many cases, and why."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note and row.times_us is None and not row.figures:
            by_reason.setdefault((row.backend, row.note), []).append(row.name)
    merged: dict[tuple[str, str], int] = {}
    for (backend, note), names in by_reason.items():
        distinct = list(dict.fromkeys(names))
        title = ", ".join(distinct[:MOST_NAMED])
        title += f" and {len(distinct) - MOST_NAMED} more" if len(distinct) > MOST_NAMED else ""
        merged[f"{backend}: {title}", note] = len(names)
    for (title, note), count in merged.items():
        yield f"{title} ({count} rows): {note}"


def plots(study: Study, rows: Rows, backend: str) -> Iterator[tuple[str, str]]:
    """Yield (name, SVG) of the study's plots: times over size, one line an implementation."""
    for experiment, temperature, axis in study.plots:
        chosen = rows.where(experiment, backend=backend, temperature=temperature).timed()
        series = []
        for name in chosen.names()[: 2 * MOST_SERIES]:
            points = _points(chosen.where(name=name), axis, study.rate)
            ours = all(row.kind != "peer" for row in chosen.where(name=name))
            if points:
                series.append(Series(name, points, ours))
        if not series:
            continue
        drawing = bandwidth_plot(
            series,
            title=f"Document {study.seed}, {experiment}, {temperature}, {backend}",
            ceiling=None,
            x_label=axis,
            y_label=UNITS[study.rate],
        )
        place = experiment.replace(" ", "-")
        yield f"study-{study.seed}-{backend}-{place}-{temperature}", standalone(drawing)


def _points(rows: Rows, axis: str, rate: str) -> list[tuple[float, float, float, float]]:
    """Return (size, rate, low, high) in order of size; squares where a case has two sizes."""
    found = {}
    for row in rows:
        times, value = row.times_us, row.figures.get(rate)
        if times is None or value is None:
            continue
        size = float(row.case[axis])
        if row.case.get("m", size) != size:
            continue
        amount = value * times.median
        found[size] = tuple(amount / us for us in (times.median, times.q3, times.q1))
    return [(size, *found[size]) for size in sorted(found)]  # type: ignore[misc]


STYLE = (
    "svg{font:12px system-ui,sans-serif;background:#fdfdfb}text{fill:#1d2429}.tick{fill:#5b6670}"
    ".grid{stroke:#dfe3e6}.axis{stroke:#5b6670}.line{fill:none;stroke-width:2}"
    ".peer{stroke-dasharray:5 4}.band{opacity:.16}"
) + "".join(
    f".s{i}.line{{stroke:{c}}}.s{i}.band,.s{i}.dot{{fill:{c}}}"
    for i, c in enumerate(
        ("#1f6fb4", "#c65a11", "#1a7f5a", "#8e44ad", "#b8860b", "#c2185b", "#00838f", "#6d4c41")
    )
)


def standalone(drawing: str) -> str:
    """Return a drawing as a file of its own, with its colours inside."""
    head, rest = drawing.split(">", 1)
    return f"{head}><style>{STYLE}</style>{rest}\n"
