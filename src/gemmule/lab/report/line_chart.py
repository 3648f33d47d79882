"""Lines over a logarithmic axis, named at their ends, with ceilings and marked places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gemmule.lab.report.charts import HEAD, LETTER, document, short
from gemmule.lab.report.svg import WIDTH, cut, escape, number, stroke, words

MOST_LINES = 6
LEFT, PLOT = 88.0, 320.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart: points (x, y) in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on an axis: a vertical line at `at` with what lies between `low` and `high` shaded.

    Of a ceiling, `at` is the height of a horizontal line and the ends are not used.
    """

    label: str
    at: float
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Axes:
    """What the two axes show; `log_y` for a logarithmic height. Widths are always logarithmic."""

    x_label: str
    y_label: str
    log_y: bool = False


def line_chart(
    lines: Sequence[Line],
    axes: Axes,
    *,
    title: str,
    subtitle: str,
    ceilings: Sequence[Mark] = (),
    marks: Sequence[Mark] = (),
) -> str:
    """Return lines over a logarithmic axis, their names at their ends.

    ValueError for no points, more than six lines, or a number that a logarithm does not take.
    """
    points = [point for line in lines for point in line.points]
    if not points or min(x for x, _ in points) <= 0 or min(y for _, y in points) <= 0:
        raise ValueError("a chart of lines needs points, and positive ones.")
    if len(lines) > MOST_LINES:
        raise ValueError(f"{len(lines)} lines in a chart; at most {MOST_LINES} can be told apart.")
    room = min(320.0, LETTER * max(len(line.name) for line in lines) + 34)
    top = HEAD + 20 * len(marks)
    frame = _Frame(points, [mark.at for mark in ceilings], axes, (top, room))
    parts = frame.grid(axes)
    parts += [part for index, mark in enumerate(marks) for part in frame.mark(mark, index)]
    parts += [part for mark in ceilings for part in frame.ceiling(mark)]
    parts += [part for index, line in enumerate(lines) for part in frame.line(line, index)]
    parts += frame.names(lines)
    told = "; ".join(
        f"{line.name}: {number(line.points[-1][1])} at {number(line.points[-1][0])}"
        for line in lines
        if line.points
    )
    height = top + PLOT + 66
    return document(height, title, subtitle, parts, f"{axes.y_label} over {axes.x_label}. {told}.")


class _Frame:
    """The axes of a chart of lines, and the mapping from values to places."""

    def __init__(
        self,
        points: Sequence[tuple[float, float]],
        levels: Sequence[float],
        axes: Axes,
        margins: tuple[float, float],
    ) -> None:
        self.top, self.right = margins[0], WIDTH - margins[1]
        self.bottom = self.top + PLOT
        xs, ys = [x for x, _ in points], [*(y for _, y in points), *levels]
        self.x_ends = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) / 2, max(xs) * 2)
        self.log_y = axes.log_y
        if self.log_y:
            self.y_ends = (10 ** math.floor(math.log10(min(ys))), max(ys) * 1.3)
        else:
            self.y_ends = (0.0, max(ys) * 1.08)

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

    def mark(self, mark: Mark, index: int) -> list[str]:
        low, high = (min(max(v, self.x_ends[0]), self.x_ends[1]) for v in (mark.low, mark.high))
        width = max(self.x(high) - self.x(low), 1.0)
        x, y = self.x(mark.at), HEAD + 14 + 20 * index
        anchor, away = ("start", 6) if x < WIDTH / 2 else ("end", -6)
        return [
            f'<rect class="span" x="{self.x(low):.1f}" y="{self.top:.1f}" width="{width:.1f}" '
            f'height="{PLOT:.1f}"/>',
            stroke(x, y - 12, x, self.bottom, "limit"),
            words(x + away, y, mark.label, anchor, "halo"),
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
        if len(line.points) > 60:  # dots would hide the dashes
            return parts
        for x, y in line.points:
            tip = escape(f"{line.name}, {number(x)}: {number(y)}")
            parts.append(
                f'<circle class="f{index}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3">'
                f"<title>{tip}</title></circle>"
            )
        return parts

    def names(self, lines: Sequence[Line]) -> list[str]:
        """Return the names beside the last points, moved apart where they would meet."""
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
        parts = []
        for place, (y, x, index, name) in zip(places, ends, strict=True):
            at = self.right + 6
            parts.append(stroke(x + 4, y, at, place, "lead"))
            parts.append(stroke(at, place, at + 14, place, f"line l{index} d{index}"))
            parts.append(words(at + 18, place + 4, cut(name, WIDTH - at - 20), "start"))
        return parts


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
