"""Lines over a logarithmic axis, named at their ends, with ceilings and marked places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gemmule_lab.report.charts import LETTER, Mark, document, head, short
from gemmule_lab.report.svg import WIDTH, cut, escape, number, stroke, words

Point = tuple[float, float]
MOST_LINES = 6
LEFT, PLOT = 88.0, 320.0
ROW = 20.0  # of the words above the plot
CLOSE = 6.0  # a dot's width; dots of points nearer than this to both neighbours would hide dashes
DOTS = "dots are what was measured"
DENSE = "; points without one lie closer than a dot is wide"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart: points (x, y) in order of x."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axes:
    """What the two axes show; `log_y` for a logarithmic height. Widths are always logarithmic.

    covers: points that the axes have room for as well, so that several drawings have one scale.
    """

    x_label: str
    y_label: str
    log_y: bool = False
    covers: Sequence[Point] = ()


def line_chart(
    lines: Sequence[Line],
    axes: Axes,
    *,
    title: str,
    subtitle: str,
    ceilings: Sequence[Mark] = (),
    marks: Sequence[Mark] = (),
) -> str:
    """Return lines over a logarithmic axis, their names at their ends, dots where points are.

    ceilings are lines across, marks places on the axis of widths. ValueError for no points, more
    than six lines, or a number that a logarithm does not take.
    """
    points = [point for line in lines for point in line.points]
    if not points or min(x for x, _ in points) <= 0 or min(y for _, y in points) <= 0:
        raise ValueError("a chart of lines needs points, and positive ones.")
    if len(lines) > MOST_LINES:
        raise ValueError(f"{len(lines)} lines in a chart; at most {MOST_LINES} can be told apart.")
    room = min(320.0, LETTER * max(len(line.name) for line in lines) + 34)
    levels = [mark.at for mark in ceilings]
    frame = _Frame([*points, *axes.covers], levels, axes, WIDTH - room)
    below = f"{subtitle}; {DOTS}"
    below += DENSE if any(len(frame.dotted(line)) < len(line.points) for line in lines) else ""
    frame.begin(head(below), len(marks))
    parts = frame.grid(axes)
    parts += [part for mark, place in frame.placed(marks) for part in frame.mark(mark, *place)]
    leads, names = frame.names(lines)
    parts += leads
    parts += [part for index, line in enumerate(lines) for part in frame.line(line, index)]
    parts += [part for mark in ceilings for part in frame.ceiling(mark)]
    parts += names
    told = "; ".join(
        f"{line.name}: {number(line.points[-1][1])} at {number(line.points[-1][0])}"
        for line in lines
        if line.points
    )
    return document(
        frame.bottom + 66, title, below, parts, f"{axes.y_label} over {axes.x_label}. {told}."
    )


class _Frame:
    """The axes of a chart of lines, and the mapping from values to places."""

    def __init__(
        self,
        points: Sequence[Point],
        levels: Sequence[float],
        axes: Axes,
        right: float,
    ) -> None:
        self.right = right
        self.begin(0.0, 0)
        xs, ys = [x for x, _ in points], [*(y for _, y in points), *levels]
        self.x_ends = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) / 2, max(xs) * 2)
        self.log_y = axes.log_y
        if self.log_y:
            self.y_ends = (10 ** math.floor(math.log10(min(ys))), max(ys) * 1.3)
        else:
            self.y_ends = (0.0, max(ys) * 1.08)

    def begin(self, top: float, rows: int) -> None:
        """Put the drawing below `top`, the plot itself below rows of words on marks."""
        self.rows_top, self.top = top, top + ROW * rows
        self.bottom = self.top + PLOT

    def x(self, value: float) -> float:
        low, high = self.x_ends
        return LEFT + math.log(value / low) / math.log(high / low) * (self.right - LEFT)

    def y(self, value: float) -> float:
        low, high = self.y_ends
        share = math.log(value / low) / math.log(high / low) if self.log_y else value / high
        return self.bottom - share * PLOT

    def grid(self, axes: Axes) -> list[str]:
        parts = []
        for value in _ticks(*self.y_ends, logarithmic=self.log_y):
            parts.append(stroke(LEFT, self.y(value), self.right, self.y(value), "grid"))
            parts.append(words(LEFT - 8, self.y(value) + 4, short(value), "end"))
        for value in _x_ticks(*self.x_ends):
            parts.append(stroke(self.x(value), self.bottom, self.x(value), self.bottom + 5, "axis"))
            parts.append(words(self.x(value), self.bottom + 21, f"{value:,.0f}", "middle"))
        middle, place = (LEFT + self.right) / 2, self.top + PLOT / 2
        parts.append(stroke(LEFT, self.bottom, self.right, self.bottom, "axis"))
        parts.append(words(middle, self.bottom + 46, axes.x_label, "middle", "label"))
        turned = f' transform="rotate(-90 18 {place:.1f})"'
        parts.append(words(18, place, axes.y_label, "middle", "label", turned))
        return parts

    def placed(self, marks: Sequence[Mark]) -> list[tuple[Mark, tuple[int, str]]]:
        """Return each mark with a row and an anchor at which no other mark's line crosses it.

        A mark's line begins at its own row, so that it crosses the words in the rows below only.
        """
        xs = [self.x(mark.at) for mark in marks]
        wide = [6 + LETTER * len(mark.label) for mark in marks]
        best: tuple[int, list[tuple[int, str]]] | None = None
        for rows in itertools.permutations(range(len(marks))):
            for anchors in itertools.product(("start", "end"), repeat=len(marks)):
                spans = [
                    (x, x + w) if anchor == "start" else (x - w, x)
                    for x, w, anchor in zip(xs, wide, anchors, strict=True)
                ]
                faults = sum(low < 0 or high > WIDTH for low, high in spans) + sum(
                    rows[other] < rows[one] and low < xs[other] < high
                    for one, (low, high) in enumerate(spans)
                    for other in range(len(marks))
                )
                if best is None or faults < best[0]:
                    best = faults, list(zip(rows, anchors, strict=True))
        return list(zip(marks, best[1], strict=True)) if best is not None else []

    def mark(self, mark: Mark, row: int, anchor: str) -> list[str]:
        low, high = (min(max(v, self.x_ends[0]), self.x_ends[1]) for v in (mark.low, mark.high))
        width = max(self.x(high) - self.x(low), 1.0)
        x, y = self.x(mark.at), self.rows_top + 14 + ROW * row
        return [
            f'<rect class="span" x="{self.x(low):.1f}" y="{self.top:.1f}" width="{width:.1f}" '
            f'height="{PLOT:.1f}"/>',
            stroke(x, y - 12, x, self.bottom, "limit"),
            words(x + (6 if anchor == "start" else -6), y, mark.label, anchor, "halo"),
        ]

    def ceiling(self, mark: Mark) -> list[str]:
        y = self.y(mark.at)
        return [
            stroke(LEFT, y, self.right, y, "limit"),
            words(LEFT + 6, y - 5, mark.label, "start", "halo"),
        ]

    def line(self, line: Line, index: int) -> list[str]:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in line.points)
        parts = [f'<polyline class="line l{index} d{index}" points="{path}"/>']
        for x, y in self.dotted(line):
            tip = escape(f"{line.name}, {number(x)}: {number(y)}")
            parts.append(
                f'<circle class="f{index}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3">'
                f"<title>{tip}</title></circle>"
            )
        return parts

    def dotted(self, line: Line) -> list[Point]:
        """Return the points that have dots: all but those close to both of their neighbours."""
        at = [self.x(x) for x, _ in line.points]
        gaps = [after - before for before, after in itertools.pairwise(at)]
        return [
            point
            for place, point in enumerate(line.points)
            if max(gaps[max(place - 1, 0) : place + 1], default=CLOSE) >= CLOSE
        ]

    def names(self, lines: Sequence[Line]) -> tuple[list[str], list[str]]:
        """Return thin lines from the last points to names beside them, and the names.

        Names are moved apart where they would meet.
        """
        ends = sorted(
            (self.y(line.points[-1][1]), self.x(line.points[-1][0]), index, line.name)
            for index, line in enumerate(lines)
            if line.points
        )
        places: list[float] = []
        for y, *_ in ends:
            places.append(max(y, places[-1] + 16) if places else max(y, self.top + 6))
        over = places[-1] - self.bottom if places else 0.0
        if over > 0:
            places = [place - over for place in places]
        leads, parts = [], []
        for place, (y, x, index, name) in zip(places, ends, strict=True):
            at = self.right + 6
            leads.append(stroke(x + 4, y, at, place, "lead"))
            parts.append(stroke(at, place, at + 14, place, f"line l{index} d{index}"))
            parts.append(words(at + 18, place + 4, cut(name, WIDTH - at - 20), "start"))
        return leads, parts


def _ticks(low: float, high: float, *, logarithmic: bool) -> list[float]:
    if logarithmic:
        first, last = round(math.log10(low)), math.floor(math.log10(high))
        return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 8))]
    power = 10.0 ** math.floor(math.log10(high / 5))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= high / 6)
    return [step * i for i in range(int(high / step) + 1)]


def _x_ticks(low: float, high: float) -> list[float]:
    """Return powers of two for a short axis, of ten for a long one."""
    if high / low > 2000:
        return [10.0**e for e in range(math.ceil(math.log10(low)), int(math.log10(high)) + 1)]
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    return [2.0**e for e in range(first, last + 1, max(1, -(-(last - first + 1) // 10)))]
