"""The README's chart: the main line of every ladder, and how many times as fast each step is."""

from __future__ import annotations

import math
from pathlib import Path

from gemmule.core.registry import OPS, ladder
from gemmule.storage.atomic import replace_text
from gemmule_lab.report.ladder_gains import gains, newest
from pages.figures.drawing import Figure

PICTURE = Path("docs") / "img" / "ladders.svg"
STEP, TOP, BAR, WIDTH = 19, 84, 110, 380
MACHINES = {"cpu": "on a CPU", "cuda": "on a GPU"}


def climb(op: str, backend: str, evidence: Path) -> dict[str, float]:
    """Return how many times as fast as its first step every step of a main line is, on record.

    Steps may have been timed at other products; the factors are those of one step over another.
    """
    run = newest(backend, evidence)
    gained = gains(op, backend, () if run is None else run.rows)
    steps = ladder(op, backend).steps
    times = {steps[0].name: 1.0}
    for rung in steps[1:]:
        gain = gained.get(rung.name)
        if gain is not None and gain.over in times:
            times[rung.name] = times[gain.over] * gain.times
    return times


def chart(evidence: Path) -> Figure:
    """Draw the ladders: those of a CPU on the left, those of a GPU on the right."""
    climbs = {(op, b): climb(op, b, evidence) for op in OPS for b in MACHINES}
    most = max(value for times in climbs.values() for value in times.values())
    blocks = {op: max(len(climbs[op, b]) for b in MACHINES) + 2 for op in OPS}
    told = "; ".join(
        f"{op} {MACHINES[b]}: " + ", ".join(f"{n} {v:.3g}" for n, v in times.items())
        for (op, b), times in climbs.items()
    )
    height = TOP + STEP * sum(blocks.values())
    f = Figure("Times as fast as the first step", told, height)
    for side, (backend, words) in enumerate(MACHINES.items()):
        left, y = 10 + WIDTH * side, TOP
        f.text(left + 10, 60, words, bold=True)
        for op in OPS:
            f.soft(left + 10, y, op)
            for row, (name, value) in enumerate(climbs[op, backend].items(), 1):
                base = y + STEP * row
                f.text(left + 170, base, name, anchor="end", size=13)
                length = 4 + BAR * math.log(value) / math.log(most)
                f.box(left + 178, base - 12, round(length, 1), 15, "a" if backend == "cpu" else "y")
                f.text(round(left + 184 + length, 1), base, f"{value:.3g}", size=13)
            y += STEP * blocks[op]
    f.soft(WIDTH + 178, 60, "logarithmic")
    return f


def update(root: Path) -> list[Path]:
    """Draw the chart anew where there is a folder for it; return it if it changed."""
    path = root / PICTURE
    if not path.parent.is_dir():
        return []
    text = chart(root / "evidence").svg()
    if path.is_file() and path.read_text("utf-8") == text:
        return []
    replace_text(path, text)
    return [path]
