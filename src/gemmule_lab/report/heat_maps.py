"""Heat maps side by side: rows down, columns across, the number in each cell, one scale for all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemmule_lab.report.charts import document, head, short
from gemmule_lab.report.svg import WIDTH, cut, escape, number, words

Colour = tuple[int, int, int]
BLACK, WHITE = "#000000", "#ffffff"
READABLE = 4.5  # contrast of a number with its cell; one of black and white always has it
SWATCHES, SWATCH = 9, 24.0
LONG = 99_999.5  # a number too long for a cell
WIDE = 100.0  # a scale this many times as high as low has numbers with three digits each


@dataclass(frozen=True, slots=True)
class Panel:
    """One heat map: values by (row, column)."""

    title: str
    values: Mapping[tuple[int, int], float]


@dataclass(frozen=True, slots=True)
class Scale:
    """What colours mean. `key` says so in words: ``darker is more GB/s``.

    ratios: two sides, blue above 1 and orange below. covers: values that the scale spans as well,
    so that several drawings have one scale and one format of numbers.
    """

    key: str
    ratios: bool = False
    covers: Sequence[float] = ()


def heat_maps(
    panels: Sequence[Panel],
    scale: Scale,
    *,
    title: str,
    subtitle: str,
    axes: tuple[str, str],
) -> str:
    """Return heat maps side by side: rows down, columns across, the number in each cell.

    axes: what rows and columns are. All panels share the scale, which is logarithmic and drawn
    above them. ValueError where there is nothing to show.
    """
    values = [value for panel in panels for value in panel.values.values()]
    if not values or min(values) <= 0:
        raise ValueError("a heat map needs numbers, and positive ones.")
    tones = _Tones([*values, *scale.covers], scale.ratios)
    rows = sorted({row for panel in panels for row, _ in panel.values})
    columns = sorted({column for panel in panels for _, column in panel.values})
    across = max(1, min(len(panels), int((WIDTH - 20) // (76 + 38 * len(columns)))))
    wide = (WIDTH - 20) / across
    cell = min(64.0, (wide - 84) / len(columns))
    tall = 24 * len(rows) + 78
    full = len(panels) * len(rows) * len(columns) == len(values)
    start = head(subtitle)
    parts = tones.legend(scale.key + ("" if full else "; blank: not run"), start)
    start += 34
    for index, panel in enumerate(panels):
        place = (10 + wide * (index % across), start + tall * (index // across), cell)
        parts += _heat_map(panel, (rows, columns), place, tones, axes)
    height = start + tall * -(-len(panels) // across) + 4
    told = "; ".join(
        f"{panel.title}: {number(min(panel.values.values()))} to "
        f"{number(max(panel.values.values()))}"
        for panel in panels
        if panel.values
    )
    return document(height, title, subtitle, parts, f"{scale.key}. {told}")


def _heat_map(
    panel: Panel,
    sizes: tuple[Sequence[int], Sequence[int]],
    place: tuple[float, float, float],
    tones: _Tones,
    axes: tuple[str, str],
) -> list[str]:
    left, top, cell = place
    rows, columns = sizes
    begin, first = left + 66, top + 22
    parts = [words(begin, top + 12, cut(panel.title, cell * len(columns) + 10), "start", "name")]
    for i, row in enumerate(rows):
        parts.append(words(begin - 6, first + 24 * i + 16, short(row), "end"))
        for j, column in enumerate(columns):
            value = panel.values.get((row, column))
            if value is None:
                continue
            fill = tones.colour(value)
            x, y = begin + cell * j, first + 24 * i
            tip = f"{panel.title}, {row} x {column}: {number(value)}"
            parts.append(
                f'<g><title>{escape(tip)}</title><rect class="cell" x="{x:.1f}" y="{y:.1f}" '
                f'width="{cell:.1f}" height="24" style="fill:{_web(fill)}"/><text '
                f'x="{x + cell / 2:.1f}" y="{y + 16:.1f}" text-anchor="middle" '
                f'style="fill:{ink(fill)};font-size:11px">{tones.text(value)}</text></g>'
            )
    bottom = first + 24 * len(rows)
    for j, column in enumerate(columns):
        parts.append(words(begin + cell * (j + 0.5), bottom + 15, short(column), "middle"))
    middle = begin + cell * len(columns) / 2
    parts.append(words(middle, bottom + 33, axes[1], "middle", "sub"))
    turn, at = first + 12 * len(rows), left + 14
    turned = f' transform="rotate(-90 {at:.1f} {turn:.1f})"'
    return [*parts, words(at, turn, axes[0], "middle", "sub", turned)]


class _Tones:
    """The colours and the format of the numbers of all cells."""

    def __init__(self, values: Sequence[float], ratios: bool) -> None:
        self.low, self.high, self.ratios = min(values), max(values), ratios
        self.text = number_format(values)

    def colour(self, value: float) -> Colour:
        if self.ratios:
            reach = max(abs(math.log(self.low)), abs(math.log(self.high)), math.log(1.5))
            share, end = abs(math.log(value)) / reach, (0, 92, 158) if value >= 1 else (178, 70, 0)
        else:
            span = math.log(self.high / self.low)
            share, end = (math.log(value / self.low) / span if span else 1.0), (0, 68, 125)
        red, green, blue = (round(244 + (part - 244) * share) for part in end)
        return red, green, blue

    def legend(self, key: str, top: float) -> list[str]:
        """Return the least number, colours up to the most, and what they mean."""
        least, most = self.text(self.low), self.text(self.high)
        x = 24 + 8.0 * len(least)
        parts = [words(16, top + 12, least, "start")]
        for index in range(SWATCHES):
            value = self.low * (self.high / self.low) ** (index / (SWATCHES - 1))
            parts.append(
                f'<rect class="cell" x="{x:.1f}" y="{top:.1f}" width="{SWATCH:.0f}" height="15" '
                f'style="fill:{_web(self.colour(value))}"/>'
            )
            x += SWATCH
        return [*parts, words(x + 8, top + 12, f"{most}   {key}", "start")]


def number_format(values: Iterable[float]) -> Callable[[float], str]:
    """Return how to write all of these numbers: as many decimals each, or as many digits.

    Decimals are those that give the middle one three digits; numbers that lie a hundred times apart
    have three digits each. From 100,000 on all are in thousands.

    >>> [number_format((0.985, 1.0, 1.24))(value) for value in (0.985, 1.0)]
    ['0.98', '1.00']
    >>> [number_format((0.2, 110.0, 5000.0))(value) for value in (0.2, 1.0, 5000.0)]
    ['0.200', '1.00', '5,000']
    >>> [number_format((1457.0, 138106.0))(value) for value in (1457.0, 138106.0)]
    ['1.46k', '138k']
    """
    known = sorted(values)
    if known[-1] >= LONG:
        return lambda value: f"{number(value / 1000)}k"
    if known[-1] / known[0] >= WIDE:
        return number
    decimals = max(0, 2 - math.floor(math.log10(statistics.median(known))))
    return lambda value: f"{value:,.{decimals}f}"


def ink(cell: Colour) -> str:
    """Return the colour of a number on a cell: black wherever it can be read there.

    >>> ink((244, 244, 244)), ink((0, 68, 125))
    ('#000000', '#ffffff')
    """
    return BLACK if (brightness(cell) + 0.05) / 0.05 >= READABLE else WHITE


def brightness(colour: Colour) -> float:
    """Return the relative luminance of a colour, from 0 to 1, after the WCAG."""
    parts = [part / 255 for part in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _web(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
