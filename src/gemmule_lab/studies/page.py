"""One self-contained page of studies: their verdicts, their pictures, every row.

It needs no network and no JavaScript; drawings are images inside it, so that none changes another.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmule_lab import studies
from gemmule_lab.report.plots import draw
from gemmule_lab.report.render import page
from gemmule_lab.report.tables import TableData
from gemmule_lab.studies import show, store
from gemmule_lab.studies.runner import of_last_devices

BACKENDS = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing as an address of its own content."""

    name: str
    data: str


@dataclass(frozen=True, slots=True)
class Section:
    """What the page says of one study."""

    seed: str
    title: str
    absent: str
    pictures: tuple[Picture, ...]
    tables: tuple[TableData, ...]


def section(path: Path, seed: str) -> Section:
    """Return the section of a study's file; ValueError for a file without rows."""
    study, rows = studies.load(seed), of_last_devices(store.read(path, seed))
    if not rows:
        raise ValueError(f"{path} holds no rows; `gemmule study {seed}` writes some.")
    drawn = (pair for backend in BACKENDS for pair in study.pictures(rows, backend))
    pictures = tuple(
        Picture(
            name, f"data:image/svg+xml;base64,{base64.b64encode(draw(chart).encode()).decode()}"
        )
        for name, chart in drawn
    )
    measured = (show.times_table(study, rows, backend) for backend in BACKENDS)
    tables = (show.verdict_table(study, rows), show.comparison_table(study, rows), *measured)
    kept = tuple(table for table in tables if table.rows)
    return Section(seed, study.title, show.absences(rows), pictures, kept)


def render(sections: Sequence[Section], title: str) -> str:
    """Return the page."""
    return page(title, studies=sections)
