"""The pages of the CUDA ladders: an introduction by hand, and a section for each rung.

A section is made of the rung's own files (its words, some code), of its figure where it has one,
and of the evidence: times and counters. So a new rung is on its page without any edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from counters.counters import Counted
from gemmule.core.registry import OPS, Ladder, ladder
from gemmule.core.rung import RUNGS_FOLDER, Rung
from gemmule.storage.atomic import replace_text
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.report.ladder_gains import gains
from pages import ladder_tables, newest
from pages.excerpts import Excerpt, docstring, excerpt, telling
from pages.figures import of_ladder
from pages.figures.drawing import Figure
from pages.markdown import update_markers

FOLDER = Path("docs") / "ladder"
PICTURES = Path("docs") / "img" / "ladder"


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
    environments, rows = newest.ladder_rows(root / "evidence")
    counted = newest.counters(root / "evidence")
    for op in present:
        changed += draw(root, op, {"times": ladder_tables.times_figure(op, rows)})
        texts = {
            "conditions": ladder_tables.conditions(_of_op(op, environments, rows)),
            "measured": ladder_tables.all_times(op, rows),
            "counters": ladder_tables.all_counters(op, counted),
            "rungs": sections(op, rows, counted),
        }
        if op == "matmul":
            texts["story"] = ladder_tables.story(op, rows, counted)
        if update_markers(root / page(op), texts):
            changed.append(root / page(op))
    return changed


def _of_op(
    op: str, environments: Mapping[str, Environment], rows: Sequence[Row]
) -> Environment | None:
    """Return where a ladder was measured last."""
    known = ladder_tables.titles(op)
    used = [environments[row.environment] for row in rows if row.group in known]
    return max(used, key=lambda one: one.timestamp, default=None)


def draw(root: Path, op: str, made: Mapping[str, Figure]) -> list[Path]:
    """Draw the figures of a ladder, and those that are made already; return what changed."""
    drawings, changed = {name: figure() for name, figure in of_ladder(op).items()}, []
    for name, drawing in (drawings | dict(made)).items():
        target, text = root / picture(op, name), drawing.svg()
        if not target.is_file() or target.read_text(encoding="utf-8") != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_text(target, text)
            changed.append(target)
    return changed


def sections(op: str, rows: Sequence[Row], counted: Sequence[Counted]) -> str:
    """Return the sections of a ladder's rungs, in order."""

    def measured(rung: Rung, rungs: Ladder) -> tuple[str, str]:
        times = ladder_tables.rung_times(op, rung, rungs, rows)
        counts = ladder_tables.telling(op, rung, rungs, telling(rung), counted)
        return times or f"Not measured yet: {ladder_tables.COMMAND}.", counts

    return of_rungs(op, "cuda", rows, excerpt, measured)


def of_rungs(
    op: str,
    backend: str,
    rows: Sequence[Row],
    code: Callable[[Rung], Excerpt | None],
    measured: Callable[[Rung, Ladder], Sequence[str]],
) -> str:
    """Return a section for each rung of a ladder: its place, words, figure, code, and figures."""
    rungs, gained, found = ladder(op, backend), gains(op, backend, rows), []
    drawn, language = (op, "cuda") if backend == "cuda" else (f"cpu_{op}", "py")
    for rung in rungs:
        parts = [f"## {rungs.numbers[rung.name]} {rung.name}"]
        aside, gain = rungs.branch(rung), gained.get(rung.name)
        told = [f"Branch: {aside}."] * bool(aside) + [f"{gain}."] * (gain is not None)
        parts += [f"*{' '.join(told)}*" if told else "", docstring(rung)]
        if (draw := of_ladder(drawn).get(rung.name)) is not None:
            parts.append(f"![{draw().title}](../img/ladder/{drawn}-{rung.name}.svg)")
        if (shown := code(rung)) is not None:
            below = shown.path.relative_to(RUNGS_FOLDER).as_posix()
            link = f"[{shown.path.name}](../../src/gemmule/rungs/{below})"
            parts.append(f"From {link}:\n\n```{language}\n{shown.code}\n```")
        found.append("\n\n".join(part for part in (*parts, *measured(rung, rungs)) if part))
    return "\n\n".join(found)
