"""The generated parts of ``docs/studies/``: verdicts and figures, from the evidence of each GPU."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from gemmule.core.registry import all_rungs
from gemmule.storage.atomic import replace_text
from gemmule_lab import studies
from gemmule_lab.records import study as store
from gemmule_lab.records.study import Rows
from gemmule_lab.report.against import TIMES_WITHIN, changes, within
from gemmule_lab.report.charts import Chart
from gemmule_lab.report.plots import draw
from gemmule_lab.report.sheet import drawn_of
from gemmule_lab.report.tables import markdown, text_of
from gemmule_lab.studies import charted, show
from gemmule_lab.studies.harness import CpuBench, GpuBench
from gemmule_lab.studies.rules import Finding, document
from gemmule_lab.studies.runner import DURATION
from pages.markdown import update_markers

REPEATED, LEAST_RUNS = "repeated", 3
DOCUMENTS = studies.NUMBERS
LANE_S = {one.backend: one.lane_s for one in (GpuBench, CpuBench)}


def update(root: Path) -> list[Path]:
    """Rewrite the tables and plots of every page below `root`; return the files that changed."""
    changed, found, records = [], {}, {}
    for number in DOCUMENTS:
        records[number] = devices = devices_on_record(root / "evidence", number)
        rows = next(iter(devices.values()), Rows(()))
        found[number] = show.findings(number, rows)
        charts = dict(charted.pictures(studies.load(number), rows))
        for others in [*devices.values()][1:]:  # what this device has no rows of
            lacking = others.only(r for r in others if not rows.where(r.experiment))
            charts |= dict(charted.pictures(studies.load(number), lacking)) | charts
        beside = show.device_chart(number, devices) if len(devices) > 1 else None
        page = root / "docs" / "studies" / f"{number}.md"
        tables = {
            "first": first_screen(root, number, devices, found[number]),
            "measured": "\n".join(
                [*_measured(devices), *_repeated(root / "evidence", number), *_spread(rows)]
            ),
            "devices": _devices(number, devices, beside),
            "plots": "\n\n".join(_image(name, chart) for name, chart in charts.items()) or "None.",
            "claims": markdown(show.verdict_table(number, rows)),
            "rules": markdown(show.rule_table(number)),
            "comparison": markdown(show.comparison_table(number, rows)),
        }
        if update_markers(page, tables):
            changed.append(page)
        charts |= dict([beside] if beside else [])
        changed += _draw(root / "docs" / "img", number, charts)
    for page, up in ((root / "docs" / "studies" / "index.md", ""), (root / "README.md", "docs/")):
        if page.is_file() and update_markers(page, {"studies": overview(found, records, up)}):
            changed.append(page)
    return changed


def _draw(folder: Path, number: str, charts: Mapping[str, Chart]) -> Iterator[Path]:
    """Draw what is not drawn yet, remove what is no more; yield what changed."""
    for name, chart in charts.items():
        target = folder / f"{name}.svg"
        if not target.is_file() or drawn_of(chart) not in target.read_text(encoding="utf-8"):
            replace_text(target, draw(chart))
            yield target
    for path in sorted(folder.glob(f"study-{number}-*.svg")):
        if path.stem not in charts:
            path.unlink()
            yield path


def _image(name: str, chart: Chart) -> str:
    return f"![{chart.title.replace(']', '')}](../img/{name}.svg)"


def first_screen(
    root: Path, number: str, devices: Mapping[str, Rows], found: Mapping[str, Finding]
) -> str:
    """Return what a page says first: the answer, the findings with their causes, the commands."""
    about = document(number)["study"]
    claims = {claim.id: claim for claim in studies.load(number).claims}
    lines = [f"**{about['question']}** {text_of(show.answer(number, found))}", ""]
    lines += [f"Of {len(found)} claims: {show.counts(found)}.", ""]
    for name in about["key"]:
        one = found[name]
        said = f"*{text_of(claims[name].text)}* **{one.outcome}**: {text_of(one.figure)}."
        lines += [f"- {said} {text_of(one.cause)}"]
    took = "; ".join(durations([*devices.values()]))
    lines += [
        "",
        "| to | command |",
        "| --- | --- |",
        f"| see the rows on record, without a GPU | `gemmule study {number} --show --times` |",
        f"| redo it here; `--full`: the document's whole grid | `gemmule study {number}` |",
        f"| compare with another machine | `gemmule study {number} --against FILE` |",
        "",
        f"It needs {about['needs']}. Duration: {took}. Its kernels: {_kernels(root, number)}.",
    ]
    return "\n".join(lines)


def durations(devices: Sequence[Rows]) -> Iterator[str]:
    """Yield how long runs took on each device, and what timing alone adds up to on the first."""
    took: dict[str, list[str]] = {}
    for row in (row for rows in devices for row in rows.where(DURATION)):
        of = row.case["experiments"] or ("whole" if row.case["full"] else "the usual grid")
        took.setdefault(row.device, []).append(f"{row.figures['seconds']:.0f} s ({of})")
    yield from (f"a run took {', '.join(runs)} on {device}" for device, runs in took.items())
    for rows in devices[:1]:
        seconds, count = _timed_seconds(rows), len(rows.timed())
        yield f"timing alone adds up to {seconds:.0f} s for the {count:,} times on record"


def _timed_seconds(rows: Rows) -> float:
    """Return what a cell's lanes may take, and what host times took, of all rows on file."""
    timed = rows.timed()
    host = [1e-6 * r.us * r.times_us.n for r in timed if r.temperature == "once" and r.times_us]
    return sum(host) + sum(LANE_S[r.backend] for r in timed if r.temperature != "once")


def whole_runs(found: Mapping[str, Mapping[str, Rows]]) -> str:
    """Return how long each study's whole grid took in one run, and all of them together."""
    told = []
    for backend, where in (("cuda", "On a GPU"), ("cpu", "On a CPU")):
        took: dict[str, tuple[float, str]] = {}
        for number, devices in found.items():
            steps = len(list(studies.load(number).steps(backend, True)))
            runs = (row for rows in devices.values() for row in rows.where(DURATION, full=True))
            whole = [r for r in runs if (r.backend, r.case["steps"]) == (backend, steps)]
            if whole:
                took[number] = max((r.figures["seconds"], r.device) for r in whole)
        each = (
            f"{number} {seconds:.0f} s ({device})" for number, (seconds, device) in took.items()
        )
        minutes = sum(seconds for seconds, _ in took.values()) / 60
        if took:
            told.append(
                f"{where} `--full` took, with compiling, operands and ceilings, {', '.join(each)}: "
                f"{minutes:.0f} minutes for {len(took)} of {len(found)}."
            )
    return " ".join(told) or "How long a whole run takes is on record from the next one on."


def _kernels(root: Path, number: str) -> str:
    """Return links to each kernel's page and source, of those that name the document."""
    links = []
    for rung in all_rungs("cuda"):
        if f"document {number}" in rung.source and not rung.source.startswith("the classic"):
            page = root / "docs" / "ladder" / f"cuda_{rung.folder}.md"
            heading = re.search(rf"^## (\w+ {rung.name})$", page.read_text("utf-8"), re.MULTILINE)
            anchor = heading[1].replace(" ", "-") if heading else ""
            source = f"../../src/gemmule/rungs/{rung.folder}/cuda/{rung.name}.cu"
            links.append(f"[{rung.name}](../ladder/{page.name}#{anchor}) ([source]({source}))")
    return ", ".join(links)


def overview(
    found: Mapping[str, Mapping[str, Finding]], devices: Mapping[str, Mapping[str, Rows]], up: str
) -> str:
    """Return the five documents in a table: question, our answer, verdicts, a chart of each."""
    lines = ["| document | it asks | our answer | of its claims |", "|---|---|---|---|"]
    images = []
    for number, one in found.items():
        about = document(number)["study"]
        page = f"{up and 'docs/studies/'}{number}.md"
        answer = f"{text_of(show.answer(number, one))} ({next(iter(devices[number]), 'no device')})"
        lines.append(
            f"| [{number}]({page}) | {about['question']} | {answer} | {show.counts(one)} |"
        )
        image = f"{up or '../'}img/study-{number}-cuda-{about['chart']}.svg"
        images += [f"[![{about['title']}]({image})]({page})", ""]
    return "\n".join([*lines, *(["", whole_runs(devices), "", *images] if not up else [])])


def devices_on_record(evidence: Path, number: str) -> dict[str, Rows]:
    """Return a study's rows by device, the one with the most experiments first, then rows."""
    files = [store.read(path, number) for path in sorted(evidence.glob(f"*/study-{number}.jsonl"))]

    def order(rows: Rows) -> tuple[bool, int, int]:
        experiments = {row.experiment for row in rows}
        return not any(row.backend == "cuda" for row in rows), -len(experiments), -len(rows)

    files.sort(key=order)
    return {show.device_of(rows): store.of_last_devices(rows) for rows in files if rows}


def _devices(number: str, devices: Mapping[str, Rows], beside: tuple[str, Chart] | None) -> str:
    if len(devices) < 2:
        return "No other device is on record yet; rows of one are compared by `--against`."
    parts = [markdown(show.device_verdicts(number, devices))]
    times = show.device_times(number, devices)
    parts += [markdown(times)] if times.rows else []
    return "\n\n".join([*parts, *([_image(*beside)] if beside else [])])


def _repeated(evidence: Path, number: str) -> Iterator[str]:
    """Yield how well a second recording of the same kernels agrees with the one on the page."""
    for again in sorted(evidence.glob(f"*/{REPEATED}/study-{number}.jsonl")):
        first = again.parents[1] / again.name
        apart = changes(first, again)
        share = within(apart, TIMES_WITHIN)
        yield (
            f"- recorded twice: {100 * share:.0f} % of {len(apart)} times of kernels agree "
            f"within {TIMES_WITHIN:.0%}"
        )


def _spread(rows: Rows) -> Iterator[str]:
    """Yield how far apart the quartiles of host times lie, which repeat less well than kernels."""
    times = [row.times_us for row in rows.where(temperature="once").timed()]
    apart = [(t.q3 - t.q1) / t.median for t in times if t is not None and t.n >= LEAST_RUNS]
    if apart:
        half, most = (100 * float(np.quantile(apart, share)) for share in (0.5, 0.9))
        yield (
            f"- {len(apart)} host times: the quartiles lie up to {half:.0f} % of the median apart "
            f"in half of them, up to {most:.0f} % in nine of ten"
        )


def _measured(devices: Mapping[str, Rows]) -> Iterator[str]:
    """Yield where and when the rows were measured, and by what."""
    for rows in devices.values():
        counts = collections.Counter(row.environment for row in rows)
        for one in rows.environments.values():
            where = [one.system, f"CPU {one.cpu}, {one.threads} threads"] if one.cpu else []
            where += ["taken over from another record"] if not one.ceilings else []
            when = one.timestamp[:10]
            yield f"- {', '.join([f'{one.device}: {counts[one.id]} rows', when, *where])}"
    if not devices:
        yield "Not measured yet: `gemmule study --evidence evidence/`."
