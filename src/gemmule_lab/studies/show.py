"""A study's outcome: what was printed beside ours, the verdicts, all rows, pictures, pages."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from gemmule.storage.atomic import replace_text
from gemmule_lab import studies
from gemmule_lab.report.plots import draw
from gemmule_lab.report.render import terminal_table
from gemmule_lab.report.tables import TableData, significant, without_empty_columns
from gemmule_lab.studies import store
from gemmule_lab.studies.grid import Study
from gemmule_lab.studies.records import Rows
from gemmule_lab.studies.runner import of_last_devices

BACKENDS = ("cuda", "cpu")

MOST_NAMED = 6
FIRST = ("seed", "experiment", "device", "backend")
THEN = ("name", "kind", "temperature")
TIMES = ("median", "q1", "q3", "min", "n")


def comparison_table(study: Study, rows: Rows) -> TableData:
    """Return the printed figures beside ours; columns that nothing stands in are left out."""
    header = study.comparison_header
    numeric = tuple(i > 0 for i in range(len(header)))
    body = tuple(study.comparison(rows))
    title = f"Document {study.number}: printed figures and ours"
    return without_empty_columns(TableData(title, header, body, numeric))


def verdict_table(study: Study, rows: Rows) -> TableData:
    """Return each claim with its verdict, our figure and the rule that decided."""
    body = []
    for claim in study.claims:
        finding = claim.judge(rows)
        body.append((claim.text, finding.outcome, finding.figure, claim.rule))
    header = ("the document says", "verdict", "our figure", "rule")
    return TableData(f"Document {study.number}: claims", header, tuple(body), (False,) * 4)


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
        f"Document {study.number}: measured on {backend}",
        header,
        tuple(body),
        (False, False, False, False, True, True, False),
    )


def absences(rows: Rows) -> str:
    """Return in one line who was not timed, on how many cases, and why; empty if all were."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note and not row.measured:
            by_reason.setdefault((row.backend, reason(row.note)), []).append(row.name)
    parts = []
    for (backend, why), names in by_reason.items():
        distinct = list(dict.fromkeys(names))
        title = ", ".join(distinct[:MOST_NAMED])
        title += f" and {len(distinct) - MOST_NAMED} more" if len(distinct) > MOST_NAMED else ""
        parts.append(f"on {backend} {title} ({len(names)} rows: {why})")
    return "; ".join(parts)


def reason(note: str) -> str:
    """Return why in words that do not depend on the size of a case.

    >>> reason("rung naive cannot compute matmul A 4 x 4. matmul/naive: it takes no float8.")
    'it takes no float8'
    """
    why = note.rstrip(".").rpartition(". ")[2] if note.startswith("rung ") else note.rstrip(".")
    why = why.partition(": ")[2] if note.startswith("rung ") and ": " in why else why
    return re.sub(r"\b\d[\d,]*", "N", why)


def as_csv(rows: Rows) -> str:
    """Return all rows, times in microseconds; empty cells where a row has nothing to say."""
    cases, params, figures = (
        _keys(getattr(row, part) for row in rows) for part in ("case", "params", "figures")
    )
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    times = ["runs" if name == "n" else f"{name}_us" for name in TIMES]
    marked = [f"param {name}" for name in params]
    writer.writerow([*FIRST, *cases, *THEN, *marked, *times, *figures, "note"])
    for row in rows:
        timed = [getattr(row.times_us, name, "") for name in TIMES]
        writer.writerow(
            [
                *(getattr(row, name) for name in FIRST),
                *(row.case.get(name, "") for name in cases),
                *(getattr(row, name) for name in THEN),
                *(row.params.get(name, "") for name in params),
                *timed,
                *(row.figures.get(name, "") for name in figures),
                row.note,
            ]
        )
    return out.getvalue()


def _keys(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def print_tables(study: Study, rows: Rows, *, times: bool) -> None:
    """Print the comparison, the verdicts and who was not timed; times: every row as well."""
    console = Console()
    measured = [times_table(study, rows, backend) for backend in BACKENDS] if times else []
    for table in (
        *filter(_filled, measured),
        comparison_table(study, rows),
        verdict_table(study, rows),
    ):
        console.print(terminal_table(table))
    if absent := absences(rows):
        click.echo(f"not timed: {absent}")


def _filled(table: TableData) -> bool:
    return bool(table.rows)


def drawings(study: Study, rows: Rows) -> Iterator[tuple[str, str]]:
    """Yield the name and the SVG document of every picture."""
    for backend in BACKENDS:
        for name, chart in study.pictures(rows, backend):
            yield name, draw(chart)


def write_plots(study: Study, rows: Rows, folder: Path) -> None:
    """Write every picture into a folder."""
    for name, text in drawings(study, rows):
        write(folder / f"{name}.svg", text)


def write(path: Path, text: str) -> None:
    """Write a file, whose folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


@dataclass(frozen=True, slots=True)
class Section:
    """What a page says of one study. pictures: names, and images as addresses of their content."""

    number: str
    title: str
    absent: str
    pictures: tuple[tuple[str, str], ...]
    tables: tuple[TableData, ...]


def section(path: Path, number: str) -> Section:
    """Return the section of a study's file; ValueError for a file without rows.

    Drawings are images, so that none changes another.
    """
    study, rows = studies.load(number), of_last_devices(store.read(path, number))
    if not rows:
        raise ValueError(f"{path} holds no rows; `gemmule study {number}` writes some.")
    pictures = tuple(
        (name, f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}")
        for name, text in drawings(study, rows)
    )
    measured = (times_table(study, rows, backend) for backend in BACKENDS)
    tables = (verdict_table(study, rows), comparison_table(study, rows), *measured)
    return Section(number, study.title, absences(rows), pictures, tuple(filter(_filled, tables)))
