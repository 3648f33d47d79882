"""The pages of the CUDA ladders: words by hand; figures, code, times and counters from their files.

Each rung has a section in its page: a heading, some sentences, and a pair of markers with its name,
between which its `block` goes. A rung without a section is left out here and named by the tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemmule.core.registry import OPS, ladder
from gemmule.core.rung import RUNGS_FOLDER, Rung
from gemmule.lab.bench import ladder_times
from gemmule.lab.profile import counters
from gemmule.lab.profile.counters import Counted
from gemmule.lab.records.rows import Row
from gemmule.lab.report.tables import update_markers
from gemmule.storage.atomic import replace_text
from pages import ladder_tables
from pages.excerpts import SECTIONS, Section, heart
from pages.figures import matmul, matvec, quantized, streams, vecmat
from pages.figures.drawing import Drawings

FOLDER = Path("docs") / "ladder"
PICTURES = Path("docs") / "img" / "ladder"
FIGURES: Mapping[str, Drawings] = {
    "matvec": {**matvec.FIGURES, **streams.FIGURES},
    "vecmat": vecmat.FIGURES,
    "matmul": matmul.FIGURES,
    "quantized": quantized.FIGURES,
}


def page(op: str) -> Path:
    """Return where the page of a CUDA ladder lies in a source tree."""
    return FOLDER / f"cuda_{op}.md"


def picture(op: str, name: str) -> Path:
    """Return where a figure lies in a source tree."""
    return PICTURES / f"{op}-{name}.svg"


def update(root: Path) -> list[Path]:
    """Rewrite figures and blocks of every page that exists; return the files that changed."""
    changed: list[Path] = []
    present = [op for op in OPS if (root / page(op)).is_file()]
    if not present:
        return changed
    environment, rows = ladder_times.read(root / "evidence")
    counted = counters.read(root / "evidence")
    for op in present:
        changed += _draw(root, op, rows)
        texts = {
            "conditions": ladder_tables.conditions(environment),
            "measured": ladder_tables.all_times(op, rows),
            "counters": ladder_tables.all_counters(op, counted),
            **_sections(root / page(op), op, rows, counted),
        }
        if update_markers(root / page(op), texts):
            changed.append(root / page(op))
    return changed


def _draw(root: Path, op: str, rows: Sequence[Row]) -> list[Path]:
    drawings = {name: draw() for name, draw in FIGURES[op].items()}
    drawings["times"] = ladder_tables.times_figure(op, rows)
    changed = []
    for name, drawing in drawings.items():
        target, text = root / picture(op, name), drawing.svg()
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_text(target, text)
            changed.append(target)
    return changed


def _sections(
    path: Path, op: str, rows: Sequence[Row], counted: Sequence[Counted]
) -> dict[str, str]:
    """Return the blocks of the rungs that a page has markers for."""
    text = path.read_text(encoding="utf-8")
    rungs = ladder(op, "cuda")
    return {
        rung.name: block(op, rung, rungs, rows, counted)
        for rung in rungs
        if f"<!-- table:{rung.name} -->" in text
    }


def block(
    op: str, rung: Rung, rungs: Sequence[Rung], rows: Sequence[Row], counted: Sequence[Counted]
) -> str:
    """Return a rung's figure, the heart of its code, its times and its telling counters."""
    section = SECTIONS[op].get(rung.name, Section("", ""))
    parts = []
    if rung.name in FIGURES[op]:
        title = FIGURES[op][rung.name]().title
        parts.append(f"![{title}](../img/ladder/{op}-{rung.name}.svg)")
    found = heart(rung, section) if section.first else None
    if found is not None:
        place = found.path.relative_to(RUNGS_FOLDER).as_posix()
        link = f"[{found.path.name}](../../src/gemmule/rungs/{place})"
        parts.append(f"From {link}:\n\n```cuda\n{found.code}\n```")
    times = ladder_tables.rung_times(op, rung, rungs, rows)
    parts.append(times or f"Not measured yet: {ladder_tables.COMMAND}.")
    parts.append(ladder_tables.telling(op, rung, rungs, section.counters, counted))
    return "\n\n".join(part for part in parts if part)


def copy_sources(root: Path, copy: Path) -> None:
    """Copy the pages, their figures and their data to another tree."""
    names = [page(op) for op in OPS]
    names += [path.relative_to(root) for path in (root / PICTURES).glob("*.svg")]
    for file in (ladder_times.FILE, counters.FILE):
        names += [path.relative_to(root) for path in (root / "evidence").glob(f"*/{file}")]
    for name in names:
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, copy / name)
