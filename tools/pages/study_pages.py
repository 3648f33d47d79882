"""The generated parts of ``docs/studies/``: verdicts and figures, from the evidence of each GPU."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gemmule.storage.atomic import replace_text
from gemmule_lab import studies
from gemmule_lab.report.against import TIMES_WITHIN, changes, within
from gemmule_lab.report.plots import draw
from gemmule_lab.report.sheet import drawn_of
from gemmule_lab.report.tables import markdown
from gemmule_lab.studies import show, store
from gemmule_lab.studies.records import Rows
from gemmule_lab.studies.runner import of_last_devices
from pages.markdown import update_markers

REPEATED, LEAST_RUNS = "repeated", 3
DOCUMENTS = ("000", "001", "002", "003", "004")


def update(root: Path) -> list[Path]:
    """Rewrite the tables and plots of every page below `root`; return the files that changed."""
    changed = []
    for number in DOCUMENTS:
        page = root / "docs" / "studies" / f"{number}.md"
        study = studies.load(number)
        rows = evidence_rows(root / "evidence", number)
        charts = {
            name: chart
            for backend in ("cuda", "cpu")
            for name, chart in study.pictures(rows, backend)
        }
        tables = {
            "measured": "\n".join(
                [_measured(rows), *_repeated(root / "evidence", number), *_spread(rows)]
            ),
            "plots": "\n\n".join(
                f"![{chart.title.replace(']', '')}](../img/{name}.svg)"
                for name, chart in charts.items()
            )
            or "None yet.",
            "claims": markdown(show.verdict_table(study, rows)),
            "comparison": markdown(show.comparison_table(study, rows)),
        }
        if update_markers(page, tables):
            changed.append(page)
        for name, chart in charts.items():
            target = root / "docs" / "img" / f"{name}.svg"
            if not target.is_file() or drawn_of(chart) not in target.read_text(encoding="utf-8"):
                replace_text(target, draw(chart))
                changed.append(target)
        for path in sorted((root / "docs" / "img").glob(f"study-{number}-*.svg")):
            if path.stem not in charts:
                path.unlink()
                changed.append(path)
    return changed


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


def evidence_rows(evidence: Path, number: str) -> Rows:
    """Return a study's rows of the first device on record, those of GPUs before those of CPUs."""
    files = [store.read(path, number) for path in sorted(evidence.glob(f"*/study-{number}.jsonl"))]
    files.sort(key=lambda rows: not any(row.backend == "cuda" for row in rows))
    return of_last_devices(files[0] if files else Rows(()))


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


def _measured(rows: Rows) -> str:
    """Return where and when the rows were measured."""
    lines, counts = [], collections.Counter(row.environment for row in rows)
    for environment in rows.environments.values():
        count, when = counts[environment.id], environment.timestamp[:10]
        lines.append(f"- {environment.device}: {count} rows, {when}, {environment.system}")
    return "\n".join(lines) or "Not measured yet: `gemmule study --evidence evidence/`."
