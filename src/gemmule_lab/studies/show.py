"""A study's outcome: the answer, verdicts, printed figures beside ours, rows, pictures, pages."""

from __future__ import annotations

import base64
import collections
import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from gemmule.storage.atomic import replace_text
from gemmule.storage.evidence import slug
from gemmule_lab import studies
from gemmule_lab.records import study as store
from gemmule_lab.records.results import geomean
from gemmule_lab.records.study import Rows
from gemmule_lab.report.charts import Bar, Bars, Chart, Mark
from gemmule_lab.report.plots import draw
from gemmule_lab.report.render import print_table
from gemmule_lab.report.tables import TableData, significant, without_empty_columns
from gemmule_lab.studies import charted
from gemmule_lab.studies.rules import NOT_MEASURABLE, Finding, document

BACKENDS = ("cuda", "cpu")
MOST_NAMED = 6
FIELDS = ("seed", "experiment", "device", "backend", "name", "kind", "temperature")
TIMES = ("median", "q1", "q3", "min", "n")
UNKNOWN, LACKS = "?", "no rows of it on record"
Cells = tuple[str, ...]


def findings(number: str, rows: Rows) -> dict[str, Finding]:
    """Return what rows say of each claim of a document, by its name."""
    return {claim.id: claim.judge(rows) for claim in studies.load(number).claims}


def answer(number: str, found: Mapping[str, Finding]) -> str:
    """Return a document's question answered, with our figures; UNKNOWN for what has none."""

    def value(match: re.Match[str]) -> str:
        number = found[match[1]].value
        return UNKNOWN if number != number else format(number, match[2])

    return re.sub(r"\{([^}:]+):([^}]+)\}", value, document(number)["study"]["answer"])


def counts(found: Mapping[str, Finding]) -> str:
    """Return how many claims have which outcome: ``3 confirmed, 2 differ on this device``."""
    outcomes = collections.Counter(finding.outcome for finding in found.values())
    told = (f"{count} {outcome}" for outcome, count in outcomes.most_common())
    return ", ".join(one if one[:2] == "1 " else one.replace("differs", "differ") for one in told)


def comparison_table(number: str, rows: Rows) -> TableData:
    """Return the printed figures beside ours; columns that nothing stands in are left out."""
    study = studies.load(number)
    header, body = study.table[0], tuple(study.table[1](rows))
    columns = zip(*body, strict=True) if body else [()] * len(header)
    numeric = tuple(all(cell[:1] in ("", *"0123456789") for cell in one) for one in columns)
    title = f"Document {number}: printed figures and ours"
    return without_empty_columns(TableData(title, header, body, numeric))


def _claims(number: str, what: str, header: Sequence[str], body: Iterable[Cells]) -> TableData:
    """Return a table of words, whose first column is what the document says."""
    header = ("the document says", *header)
    title = f"Document {number}: {what}"
    return TableData(title, header, tuple(body), (False,) * len(header))


def verdict_table(number: str, rows: Rows) -> TableData:
    """Return each claim with its verdict, our figure and why it is so."""
    found = findings(number, rows)
    told = ((one.text, *found[one.id][:3]) for one in studies.load(number).claims)
    return _claims(number, "claims", ("verdict", "our figure", "why"), told)


def rule_table(number: str) -> TableData:
    """Return how each claim is decided."""
    told = ((claim.text, claim.rule) for claim in studies.load(number).claims)
    return _claims(number, "how claims are decided", ("the verdict",), told)


def device_of(rows: Rows) -> str:
    """Return the GPU that rows are of, else the CPU."""
    return max((row.backend, row.device) for row in rows)[1]


def device_verdicts(number: str, by_device: Mapping[str, Rows]) -> TableData:
    """Return each claim's verdict and figure on several devices, side by side.

    A device whose file lacks a claim's rows could still have it.
    """
    found = [findings(number, rows) for rows in by_device.values()]

    def told(one: Finding) -> str:
        return LACKS if one.outcome == NOT_MEASURABLE else f"{one.outcome}: {one.figure}"

    claims = studies.load(number).claims
    lines = ((claim.text, *(told(one[claim.id]) for one in found)) for claim in claims)
    some = (line for line in lines if {*line[1:]} != {LACKS})
    return _claims(number, "claims by device", tuple(by_device), some)


def _device_ratios(by_device: Mapping[str, Rows]) -> dict[tuple[str, ...], list[list[float]]]:
    """Return how many times as fast the first device is as each other, by implementation.

    For each case that both have, by back end, experiment, temperature and name; what has no case,
    such as the largest product that fits, is another one on each.
    """
    asked, every = ("backend", "experiment", "temperature", "name"), list(by_device.values())
    found = {}
    here = (row for row in every[0].timed() if row.case)
    for key in dict.fromkeys(tuple(getattr(row, one) for one in asked) for row in here):
        first, *rest = (rows.where(**dict(zip(asked, key, strict=True))).us() for rows in every)
        found[key] = [
            [there[case] / us for case, us in first.items() if case in there] for there in rest
        ]
    return found


def device_times(number: str, by_device: Mapping[str, Rows]) -> TableData:
    """Return how the first device's times relate to the others', by implementation.

    Geometric means over the cases that both have, of one experiment and temperature.
    """
    first, *others = by_device
    body = tuple(
        (*key[1:], *(f"{geomean(one):.2f} ({len(one)})" if one else "" for one in each))
        for key, each in _device_ratios(by_device).items()
        if any(each)
    )
    each = (f"times as fast as on {device} (cases)" for device in others)
    header = ("experiment", "temperature", "implementation", *each)
    title = f"Document {number}: {first} beside other devices"
    return TableData(title, header, body, (False,) * 3 + (True,) * len(others))


def device_chart(number: str, by_device: Mapping[str, Rows]) -> tuple[str, Chart] | None:
    """Return `device_times` as bars, for each implementation over all experiments."""
    first, *others = by_device
    found: dict[tuple[str, int], list[float]] = {}
    for (backend, *_, name), each in _device_ratios(by_device).items():
        for index, ratios in enumerate(each):
            if backend == "cuda" and ratios:
                found.setdefault((name, index), []).extend(ratios)
    means = {key: (geomean(ratios), len(ratios)) for key, ratios in found.items()}
    bars = [
        Bar(name, (mean,), f"{mean:.2f}, {count} cases, against {others[index]}", index)
        for (name, index), (mean, count) in means.items()
    ]
    if not bars:
        return None
    title = f"Document {number}: times as fast as on other devices"
    below = f"{first}; float32 or float16, as the study has it; geometric means over common cases"
    head = charted.Head(f"study-{number}-devices", title, below)
    ((head, drawn),) = head.parts([bars], lambda bar: bar.label)
    return head.name, Bars(title, head.below, drawn, limit=Mark("alike", 1.0))


def times_table(number: str, rows: Rows, backend: str) -> TableData:
    """Return every timed row of a back end: what was measured, in microseconds."""
    header = ("experiment", "case", "implementation", "temperature", "us", "q1 to q3", "note")
    numeric, body = tuple(name in ("us", "q1 to q3") for name in header), []
    for row in rows.where(backend=backend):
        ends = ("median", "q1", "q3")
        us = [significant(getattr(row.times_us, end)) for end in ends if row.times_us is not None]
        case = ", ".join(f"{k}={v}" for k, v in row.case.items())
        note = row.note or ", ".join(f"{k} {significant(v)}" for k, v in row.figures.items() if v)
        words = ("".join(us[:1]), " to ".join(us[1:]), note)
        body.append((row.experiment, case, row.name, row.temperature, *words))
    return TableData(f"Document {number}: measured on {backend}", header, tuple(body), numeric)


def absences(rows: Rows) -> str:
    """Return in one line who was not timed, on how many cases, and why; empty if all were."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in (row for row in rows if row.note and not row.measured):
        by_reason.setdefault((row.backend, reason(row.note)), []).append(row.name)
    parts = []
    for (backend, why), names in by_reason.items():
        distinct = list(dict.fromkeys(names))
        title, more = ", ".join(distinct[:MOST_NAMED]), len(distinct) - MOST_NAMED
        title += f" and {more} more" if more > 0 else ""
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
    lines = []
    for row in rows:
        times = {"runs" if t == "n" else f"{t}_us": getattr(row.times_us, t, "") for t in TIMES}
        params = {f"param {name}": value for name, value in row.params.items()}
        about = {name: getattr(row, name) for name in FIELDS}
        lines.append({**about, **row.case, **params, **times, **row.figures, "note": row.note})
    out = io.StringIO()
    names = dict.fromkeys(key for line in lines for key in line)
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def print_tables(number: str, rows: Rows, *, times: bool) -> None:
    """Print the answer, the printed figures and the verdicts; times: every row as well."""
    found = findings(number, rows)
    recorded = [path.parent.name for path in store.on_record(number)][:1]
    said = [document(number)["study"]["question"]]
    # The answer is in words of what is on record, which another device may not bear out.
    said += [answer(number, found)] if rows and [slug(device_of(rows))] == recorded else []
    click.echo("\n".join([*said, counts(found)]))
    measured = [times_table(number, rows, backend) for backend in BACKENDS] if times else []
    tables = (*measured, comparison_table(number, rows), verdict_table(number, rows))
    print_all(tables)
    if absent := absences(rows):
        click.echo(f"not timed: {absent}")


def print_all(tables: Iterable[TableData]) -> None:
    """Print the tables that have rows."""
    for table in tables:
        if table.rows:
            print_table(table)


def write_plots(number: str, rows: Rows, folder: Path) -> None:
    """Write every picture into a folder."""
    for name, chart in charted.pictures(studies.load(number), rows):
        write(folder / f"{name}.svg", draw(chart))


def write(path: Path, text: str) -> None:
    """Write a file, whose folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


class Section(NamedTuple):
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
    rows = store.of_last_devices(store.read(path, number))
    if not rows:
        raise ValueError(f"{path} holds no rows; `gemmule study {number}` writes some.")
    drawn = ((name, draw(one)) for name, one in charted.pictures(studies.load(number), rows))
    base = "data:image/svg+xml;base64,"
    pictures = tuple((k, base + base64.b64encode(svg.encode()).decode()) for k, svg in drawn)
    tables = [verdict_table(number, rows), rule_table(number), comparison_table(number, rows)]
    tables += [times_table(number, rows, backend) for backend in BACKENDS]
    filled = tuple(table for table in tables if table.rows)
    return Section(number, document(number)["study"]["title"], absences(rows), pictures, filled)
