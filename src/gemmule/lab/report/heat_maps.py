"""Heat maps side by side: rows down, columns across, the number in each cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemmule.lab.report.charts import HEAD, document, short
from gemmule.lab.report.svg import WIDTH, cut, escape, number, words

Span = tuple[float, float, bool]  # the smallest and largest value, and whether they are ratios


@dataclass(frozen=True, slots=True)
class Panel:
    """One heat map: values by (row, column)."""

    title: str
    values: Mapping[tuple[int, int], float]


def heat_maps(
    panels: Sequence[Panel],
    *,
    title: str,
    subtitle: str,
    axes: tuple[str, str],
    ratios: bool = False,
) -> str:
    """Return heat maps side by side: rows down, columns across, the number in each cell.

    axes: what rows and columns are. All panels share one scale, logarithmic; of `ratios` it has two
    sides, blue above 1 and orange below. ValueError where there is nothing to show.
    """
    values = [value for panel in panels for value in panel.values.values()]
    if not values or min(values) <= 0:
        raise ValueError("a heat map needs numbers, and positive ones.")
    low, high = min(values), max(values)
    rows = sorted({row for panel in panels for row, _ in panel.values})
    columns = sorted({column for panel in panels for _, column in panel.values})
    across = max(1, min(len(panels), int((WIDTH - 20) // (76 + 38 * len(columns)))))
    wide = (WIDTH - 20) / across
    cell = min(64.0, (wide - 84) / len(columns))
    tall = 24 * len(rows) + 78
    parts = []
    for index, panel in enumerate(panels):
        left, top = 10 + wide * (index % across), HEAD + tall * (index // across)
        parts += _heat_map(panel, rows, columns, (left, top, cell), (low, high, ratios), axes)
    height = HEAD + tall * -(-len(panels) // across) + 4
    told = "; ".join(
        f"{panel.title}: {number(min(panel.values.values()))} to "
        f"{number(max(panel.values.values()))}"
        for panel in panels
        if panel.values
    )
    return document(height, title, subtitle, parts, told)


def _heat_map(
    panel: Panel,
    rows: Sequence[int],
    columns: Sequence[int],
    place: tuple[float, float, float],
    scale: Span,
    axes: tuple[str, str],
) -> list[str]:
    left, top, cell = place
    begin, first = left + 66, top + 22
    parts = [words(begin, top + 12, cut(panel.title, cell * len(columns) + 10), "start", "name")]
    for i, row in enumerate(rows):
        parts.append(words(begin - 6, first + 24 * i + 16, short(row), "end"))
        for j, column in enumerate(columns):
            value = panel.values.get((row, column))
            if value is None:
                continue
            fill, ink = _tone(value, *scale)
            x, y = begin + cell * j, first + 24 * i
            tip = f"{panel.title}, {row} x {column}: {number(value)}"
            parts.append(
                f'<g><title>{escape(tip)}</title><rect class="cell" x="{x:.1f}" y="{y:.1f}" '
                f'width="{cell:.1f}" height="24" style="fill:{fill}"/><text x="{x + cell / 2:.1f}" '
                f'y="{y + 16:.1f}" text-anchor="middle" style="fill:{ink};font-size:11px">'
                f"{_cell(value)}</text></g>"
            )
    bottom = first + 24 * len(rows)
    for j, column in enumerate(columns):
        parts.append(words(begin + cell * (j + 0.5), bottom + 15, short(column), "middle"))
    middle = begin + cell * len(columns) / 2
    parts.append(words(middle, bottom + 33, axes[1], "middle", "sub"))
    turn, at = first + 12 * len(rows), left + 14
    turned = f' transform="rotate(-90 {at:.1f} {turn:.1f})"'
    return [*parts, words(at, turn, axes[0], "middle", "sub", turned)]


def _tone(value: float, low: float, high: float, ratios: bool) -> tuple[str, str]:
    """Return a cell's colour and that of its number."""
    if ratios:
        reach = max(abs(math.log(low)), abs(math.log(high)), math.log(1.5))
        share, end = abs(math.log(value)) / reach, (0, 92, 158) if value >= 1 else (178, 70, 0)
    else:
        share = math.log(value / low) / math.log(high / low) if high > low else 1.0
        end = (0, 68, 125)
    tone = [round(244 + (part - 244) * share) for part in end]
    return f"#{tone[0]:02x}{tone[1]:02x}{tone[2]:02x}", "#ffffff" if share > 0.55 else "#10202c"


def _cell(value: float) -> str:
    """Return a number that fits a narrow cell."""
    if value >= 99_999.5:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}" if value < 10 else f"{value:.1f}"
