"""Ratios as dots on a logarithmic axis: a line for each product, a colour for each format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gemmule_lab.records.rows import Speedup
from gemmule_lab.report import svg

STEP, TOP, LABEL_ROOM, RIGHT = 22.0, 34.0, 250.0, 24.0
TICKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


def ratio_dots(
    lines: Mapping[str, Mapping[str, Speedup]], names: Sequence[str], *, title: str
) -> str:
    """Return the drawing; `names` are the keys of the dots, in the order of the legend.

    Whiskers are 95 % intervals; the line at 1 is emphasised. ValueError for no dots or a ratio that
    is not positive.
    """
    values = [v for dots in lines.values() for one in dots.values() for v in (one.low, one.high)]
    if not values or min(values) <= 0:
        raise ValueError("a drawing of ratios needs one or more, and positive ones.")
    axis = _Axis(min(0.8, *values), max(1.25, *values))
    bottom = TOP + STEP * len(lines)
    parts = _legend(names)
    for tick in (tick for tick in TICKS if axis.low <= tick <= axis.high):
        kind = "one" if tick == 1 else "grid"
        parts.append(svg.stroke(axis.x(tick), TOP, axis.x(tick), bottom, kind))
        parts.append(svg.words(axis.x(tick), bottom + 18, f"{tick:g}×", "middle"))
    note = "slower than NumPy in float32 ← 1 → faster; logarithmic axis"
    parts.append(svg.words(axis.x(1.0), bottom + 38, note, "middle", "label"))
    for index, (label, dots) in enumerate(lines.items()):
        y = TOP + STEP * (index + 0.5)
        parts.append(svg.words(LABEL_ROOM - 10, y + 4, svg.cut(label, LABEL_ROOM - 10), "end"))
        parts += [
            part for name in names if name in dots for part in _dot(axis, y, name, names, dots)
        ]
    summary = "; ".join(
        f"{label}: " + ", ".join(f"{name} {svg.number(one.value)}" for name, one in dots.items())
        for label, dots in lines.items()
    )
    return svg.drawing(bottom + 48, title, summary, parts)


class _Axis:
    """A logarithmic axis from `low` to `high`."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low / 1.05, high * 1.05

    def x(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return LABEL_ROOM + share * (svg.WIDTH - LABEL_ROOM - RIGHT)


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], LABEL_ROOM
    for index, name in enumerate(names):
        colour = f"s{index % svg.SERIES_COLOURS}"
        parts.append(f'<circle class="dot {colour}" cx="{x + 6:.1f}" cy="14" r="6"/>')
        parts.append(svg.words(x + 18, 18, name, "start"))
        x += 36 + len(name) * svg.CHARACTER
    return parts


def _dot(
    axis: _Axis, y: float, name: str, names: Sequence[str], dots: Mapping[str, Speedup]
) -> list[str]:
    one, index = dots[name], list(names).index(name)
    y += 2.2 * (index - (len(names) - 1) / 2)  # equal ones stay visible
    colour, tip = f"s{index % svg.SERIES_COLOURS}", f"{name}: {svg.number(one.value)} times"
    ends = (axis.x(one.low), axis.x(one.high))
    return [
        f"<g><title>{svg.escape(tip)}</title>",
        svg.stroke(ends[0], y, ends[1], y, f"line {colour}"),
        f'<circle class="dot {colour}" cx="{axis.x(one.value):.1f}" cy="{y:.1f}" r="5"/></g>',
    ]
