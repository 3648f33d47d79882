"""What a chart shows, as data: lines over sizes, bars, heat maps, ratios as dots.

A chart names what was measured, where and in what unit, and is read without its page.
`gemmule_lab.report.plots` draws it; `told` is its description for those who do not see it. Each
raises ValueError where there is nothing to show, or a number that a logarithm does not take.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
Ends = tuple[float, float]
Cells = Mapping[tuple[int, int], float]
LONG = 99_999.5  # a number too long for a cell of a heat map
WIDE = 100.0  # a scale this many times as high as low has numbers with three digits each


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on an axis and its words: a line at `at`, what lies from `low` to `high` shaded.

    Of a ceiling, `at` is a value that a line stands at, and the ends are not used.
    """

    label: str
    at: float
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart: points (x, y) in order of x, and for each the ends of a range of y."""

    name: str
    points: Sequence[Point]
    band: Sequence[Ends] = ()


@dataclass(frozen=True, slots=True)
class Axes:
    """What the two axes show; `log_y` for a logarithmic height. Widths are always logarithmic.

    covers: points that the axes have room for as well, so that several drawings have one scale.
    """

    x_label: str
    y_label: str
    log_y: bool = False
    covers: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines with dots where points are; ceilings are lines across, marks places on the x axis."""

    title: str
    subtitle: str
    lines: Sequence[Line]
    axes: Axes
    ceilings: Sequence[Mark] = ()
    marks: Sequence[Mark] = ()

    def __post_init__(self) -> None:
        _check([number for line in self.lines for point in line.points for number in point])

    @property
    def told(self) -> str:
        """Where each line ends."""
        ends = [(line.name, *line.points[-1]) for line in self.lines if line.points]
        words = "; ".join(f"{name}: {number(y)} at {number(x)}" for name, x, y in ends)
        return f"{self.axes.y_label} over {self.axes.x_label}. {words}."


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar: the lengths of its parts from the left, the words behind it, a range.

    Bars of one label after each other are a group. colour: a number, or ``win``, ``loss``,
    ``even``; several parts have the colours from 0 on.
    """

    label: str
    parts: Sequence[float]
    note: str
    colour: int | str = 0
    ends: Ends | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars with their values as words behind them, so that colours are not needed.

    legend: what the colours mean; limit: a line across all bars; foot: words below them. On a
    logarithmic axis bars begin at half the shortest.
    """

    title: str
    subtitle: str
    bars: Sequence[Bar]
    legend: Sequence[str] = ()
    limit: Mark | None = None
    foot: str = ""
    log: bool = False

    def __post_init__(self) -> None:
        _check([sum(bar.parts) for bar in self.bars])

    @property
    def told(self) -> str:
        """Every bar's label and note, and the limit."""
        told = [f"{bar.label} {bar.note}" for bar in self.bars]
        return "; ".join(told if self.limit is None else [*told, self.limit.label])


@dataclass(frozen=True, slots=True)
class HeatMaps:
    """Heat maps side by side by title: values by row and column, the number in each cell.

    axes: what rows and columns are; key: what colours mean (``darker is more``); ratios: blue above
    1 and orange below. The scale is logarithmic and spans `covers` as well, so that several
    drawings have one scale and one format of numbers.
    """

    title: str
    subtitle: str
    panels: Mapping[str, Cells]
    key: str
    axes: tuple[str, str] = ("rows", "columns")
    ratios: bool = False
    covers: Sequence[float] = ()

    def __post_init__(self) -> None:
        _check([value for cells in self.panels.values() for value in cells.values()])

    @property
    def told(self) -> str:
        """What colours mean, and the range of every panel."""
        ranges = "; ".join(
            f"{title}: {number(min(cells.values()))} to {number(max(cells.values()))}"
            for title, cells in self.panels.items()
            if cells
        )
        return f"{self.key}. {ranges}"


@dataclass(frozen=True, slots=True)
class Dots:
    """Ratios with intervals as dots on a logarithmic axis with a line at 1.

    rows: by label, the value and the ends of each name's dot; names give the colours; foot: what
    stands below the axis.
    """

    title: str
    subtitle: str
    rows: Mapping[str, Mapping[str, tuple[float, float, float]]]
    names: Sequence[str]
    foot: str

    def __post_init__(self) -> None:
        _check([end for dots in self.rows.values() for one in dots.values() for end in one])

    @property
    def told(self) -> str:
        """Every ratio."""
        return "; ".join(
            f"{label}: " + ", ".join(f"{name} {number(one[0])}" for name, one in dots.items())
            for label, dots in self.rows.items()
        )


@dataclass(frozen=True, slots=True)
class Scatter:
    """Measured points by name; widths are logarithmic, heights as `axes` says.

    rings: points of others that belong to a name, and what they are is `ring`. lines: limits, drawn
    thin. marks: places on the x axis.
    """

    title: str
    axes: Axes
    points: Mapping[str, Sequence[Point]]
    rings: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    ring: str = ""
    lines: Sequence[Line] = ()
    marks: Sequence[Mark] = ()

    def __post_init__(self) -> None:
        _check([at for some in self.points.values() for point in some for at in point])

    @property
    def told(self) -> str:
        """The range of every name's heights."""
        ranges = "; ".join(
            f"{name}: {number(min(y for _, y in some))} to {number(max(y for _, y in some))}"
            for name, some in self.points.items()
        )
        return f"{self.axes.y_label} over {self.axes.x_label}. {ranges}."


Chart = Lines | Bars | HeatMaps | Dots | Scatter


def _check(values: Sequence[float]) -> None:
    if not values or min(values) <= 0:
        raise ValueError("a chart needs at least one value, and positive ones.")


def grouped(
    groups: Mapping[str, Mapping[str, float]], unit: str, ends: Mapping[str, Ends] | None = None
) -> tuple[list[Bar], list[str]]:
    """Return bars by label and series, a colour for each series, and the series where several.

    Each bar's value stands behind it, with its series where there are several. ends: the range of
    a label's bars.
    """
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    bars = []
    for label, values in groups.items():
        span = (ends or {}).get(label)
        for name, value in values.items():
            note = f"{number(value)} {unit}"
            if span is not None and number(span[0]) != number(span[1]):
                note += f" ({number(span[0])} to {number(span[1])})"
            note += f", {name}" if len(series) > 1 else ""
            bars.append(Bar(label, (value,), note, series.index(name), span))
    return bars, series if len(series) > 1 else []


def number(value: float) -> str:
    """Return a value with three significant digits and no exponent, for labels.

    >>> number(1234.5), number(0.01234), number(-12.34)
    ('1,234', '0.0123', '-12.3')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def short(value: float) -> str:
    """Return a tick's number, ``16k`` for 16384.

    >>> short(16384), short(0.01), short(1500.0), short(512)
    ('16k', '0.01', '1,500', '512')
    """
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:,.0f}k"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


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
