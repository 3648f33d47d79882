"""Plots as SVG text: bandwidth over size, speed-up bars, the ladder's waterfall.

Every plot is one ``<svg>`` with a title and a description for screen readers; colours are classes
that the page's style sheet fills, so one drawing serves light, dark and print. Texts are escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 920
SERIES_COLOURS = 8
CHARACTER = 6.6  # width of an average character at 12 px


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot: points (x, y, low, high) in order of x; `ours` draws it solid."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    ours: bool = True


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: label, value, the ends of its interval; `sure` if that is a 95 % interval."""

    label: str
    value: float
    low: float
    high: float
    sure: bool = True


def escape(text: str) -> str:
    """Return `text` safe inside SVG elements and attributes."""
    return html.escape(text, quote=True)


def number(value: float) -> str:
    """Return a value with three significant digits and no exponent, for labels.

    >>> number(1234.5), number(0.01234), number(12.34)
    ('1,234', '0.0123', '12.3')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def bandwidth_plot(
    series: Sequence[Series],
    *,
    title: str,
    ceiling: float | None,
    x_label: str,
    y_label: str = "GB/s",
    ceiling_label: str = "read ceiling",
) -> str:
    """Return lines over a logarithmic size axis, with quartile bands and the ceiling's line.

    ValueError for no points or a size that is not positive.
    """
    points = [p for s in series for p in s.points]
    if not points or min(p[0] for p in points) <= 0:
        raise ValueError("a plot over size needs at least one point, and positive sizes.")
    top = max([p[3] for p in points] + ([ceiling] if ceiling else []))
    frame = _Frame((min(p[0] for p in points), max(p[0] for p in points)), top * 1.08, len(series))
    parts = [*frame.axes(x_label, y_label)]
    for index, line in enumerate(series):
        parts += frame.line(line, index)
    if ceiling:
        parts += frame.ceiling(ceiling, f"{ceiling_label} {number(ceiling)} {y_label}")
    summary = "; ".join(
        f"{s.name}: {number(s.points[-1][1])} {y_label} at {number(s.points[-1][0])}"
        for s in series
        if s.points
    )
    return drawing(frame.height, title, f"{y_label} over {x_label}. {summary}.", parts)


class _Frame:
    """The axes of a plot over size, and the mapping from values to places."""

    left, right, top, plot = 62.0, 18.0, 14.0, 270.0

    def __init__(self, sizes: tuple[float, float], top: float, lines: int) -> None:
        low, high = sizes
        self.low, self.high = (low / 2, high * 2) if low == high else (low, high)
        self.y_step = _nice_step(top)
        self.y_max = self.y_step * math.ceil(top / self.y_step)
        self.legend_top = self.top + self.plot + 56
        self.height = self.legend_top + 20 * -(-lines // 2) + 4

    def x(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.left + share * (WIDTH - self.left - self.right)

    def y(self, value: float) -> float:
        return self.top + self.plot * (1 - value / self.y_max)

    def axes(self, x_label: str, y_label: str) -> list[str]:
        end, bottom = WIDTH - self.right, self.top + self.plot
        parts = []
        for step in range(round(self.y_max / self.y_step) + 1):
            value = step * self.y_step
            parts.append(stroke(self.left, self.y(value), end, self.y(value), "grid"))
            parts.append(words(self.left - 8, self.y(value) + 4, number(value), "end"))
        for value in _powers(self.low, self.high):
            parts.append(stroke(self.x(value), bottom, self.x(value), bottom + 5, "axis"))
            parts.append(words(self.x(value), bottom + 20, f"{value:,}", "middle"))
        middle = (self.left + end) / 2
        parts.append(stroke(self.left, bottom, end, bottom, "axis"))
        parts.append(words(middle, bottom + 40, x_label, "middle", "label"))
        place = self.top + self.plot / 2
        turned = f' transform="rotate(-90 14 {place:.1f})"'
        parts.append(words(14, place, y_label, "middle", "label", turned))
        return parts

    def ceiling(self, value: float, label: str) -> list[str]:
        end = WIDTH - self.right
        return [
            stroke(self.left, self.y(value), end, self.y(value), "ceiling"),
            words(self.left + 6, self.y(value) - 6, label, "start", "ceiling-label"),
        ]

    def line(self, series: Series, index: int) -> list[str]:
        colour = f"s{index % SERIES_COLOURS}"
        upper = [f"{self.x(p[0]):.1f},{self.y(p[3]):.1f}" for p in series.points]
        lower = [f"{self.x(p[0]):.1f},{self.y(p[2]):.1f}" for p in reversed(series.points)]
        middle = " ".join(f"{self.x(p[0]):.1f},{self.y(p[1]):.1f}" for p in series.points)
        kind = "ours" if series.ours else "peer"
        parts = []
        if series.points:
            parts.append(f'<polygon class="band {colour}" points="{" ".join(upper + lower)}"/>')
            parts.append(f'<polyline class="line {kind} {colour}" points="{middle}"/>')
        for x, y, low, high in series.points:
            tip = f"{series.name}, {number(x)}: {number(y)} ({number(low)} to {number(high)})"
            parts.append(
                f'<circle class="dot {colour}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3">'
                f"<title>{escape(tip)}</title></circle>"
            )
        across = (WIDTH - self.left - self.right) / 2
        x0 = self.left + (index % 2) * across
        y0 = self.legend_top + 20 * (index // 2)
        parts.append(stroke(x0, y0, x0 + 26, y0, f"line {kind} {colour}"))
        parts.append(words(x0 + 34, y0 + 4, cut(series.name, across - 40), "start"))
        return parts


def speedup_bars(bars: Sequence[Bar], *, title: str) -> str:
    """Return horizontal bars of speed-up with intervals and a line at 1.0; ValueError for none."""
    if not bars or min(b.low for b in bars) <= 0:
        raise ValueError("speed-up bars need at least one bar, and positive values.")
    label_width = min(430.0, max(len(b.label) for b in bars) * CHARACTER + 12)
    room = WIDTH - label_width - 70
    top = max(1.0, *(b.high for b in bars)) * 1.02
    one = label_width + room / top
    parts, y = [], 10.0
    for bar in bars:
        end = label_width + room * bar.value / top
        kind = "win" if bar.low > 1 else "loss" if bar.high < 1 else "even"
        kind = kind if bar.sure else "even"
        tip = f"{bar.label}: {number(bar.value)} times ({number(bar.low)} to {number(bar.high)})"
        low, high = (label_width + room * v / top for v in (bar.low, bar.high))
        parts += [
            f'<g><title>{escape(tip)}</title><rect class="bar {kind}" x="{label_width:.1f}" '
            f'y="{y:.1f}" width="{end - label_width:.1f}" height="18" rx="2"/>',
            stroke(low, y + 9, high, y + 9, "whisker"),
            "</g>",
            words(label_width - 8, y + 13, cut(bar.label, label_width - 8), "end"),
            words(max(end, high) + 8, y + 13, f"{number(bar.value)}×", "start", "value"),
        ]
        y += 26
    parts.append(stroke(one, 2, one, y, "one"))
    parts.append(words(one, y + 14, "1.0", "middle"))
    summary = "; ".join(f"{b.label} {number(b.value)} times" for b in bars)
    return drawing(y + 22, title, f"Speed-up, above 1 is faster than the peer. {summary}.", parts)


def ladder_waterfall(steps: Sequence[Bar], *, title: str, unit: str = "us") -> str:
    """Return each rung's time as a bar, and beside it how much faster it is than the one before.

    `steps` come in the order of the ladder; values are times, drawn on a logarithmic axis
    where they span more than a factor of 30. ValueError for none or a time that is not positive.
    """
    if not steps or min(b.value for b in steps) <= 0:
        raise ValueError("a ladder needs at least one rung, and positive times.")
    label_width = min(330.0, max(len(b.label) for b in steps) * CHARACTER + 12)
    room = WIDTH - label_width - 190
    slowest, fastest = max(b.value for b in steps), min(b.value for b in steps)
    logarithmic = slowest / fastest > 30
    parts, y = [], 8.0
    for index, step in enumerate(steps):
        share = step.value / slowest
        if logarithmic:
            share = math.log(2 * step.value / fastest) / math.log(2 * slowest / fastest)
        end = label_width + room * share
        gain = "" if index == 0 else f", {number(steps[index - 1].value / step.value)}× faster"
        if index and step.value > steps[index - 1].value:
            gain = f", {number(step.value / steps[index - 1].value)}× slower"
        parts += [
            f'<rect class="bar rung" x="{label_width:.1f}" y="{y:.1f}" '
            f'width="{end - label_width:.1f}" height="18" rx="2"/>',
            words(label_width - 8, y + 13, cut(step.label, label_width - 8), "end"),
            words(end + 8, y + 13, f"{number(step.value)} {unit}{gain}", "start", "value"),
        ]
        y += 26
    note = "logarithmic axis" if logarithmic else "axis from zero"
    parts.append(words(label_width, y + 10, f"time of one call, {note}", "start"))
    summary = "; ".join(f"{b.label} {number(b.value)} {unit}" for b in steps)
    return drawing(
        y + 18, title, f"Times of the rungs in the order of the ladder. {summary}.", parts
    )


def drawing(height: float, title: str, description: str, parts: Sequence[str]) -> str:
    """Return a whole plot with its title and a description for screen readers."""
    name = escape(title)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{name}</title>'
        f"<desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def stroke(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a straight line; `kind` is its class."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def words(
    x: float, y: float, text: str, anchor: str, kind: str = "tick", attributes: str = ""
) -> str:
    """Return a text whose `anchor` (start, middle, end) is at (x, y)."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}>'
        f"{escape(text)}</text>"
    )


def cut(text: str, width: float) -> str:
    """Return a text that is no wider, with an ellipsis where it had to be cut."""
    most = max(4, int(width / CHARACTER))
    return text if len(text) <= most else text[: most - 1] + "…"


def _nice_step(top: float) -> float:
    """Return a step of 1, 2 or 5 times a power of ten that cuts `top` into four to nine."""
    rough = top / 5 if top > 0 else 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * f for f in (1, 2, 5, 10) if power * f >= rough)


def _powers(low: float, high: float) -> list[int]:
    """Return the powers of two within the axis, thinned to at most ten."""
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    stride = max(1, -(-(last - first + 1) // 10))
    return [1 << e for e in range(max(0, first), last + 1, stride)]
