"""Draws charts by matplotlib as SVG: lines differ in dashes too, bars and cells have numbers."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gemmule_lab.report import charts
from gemmule_lab.report.sheet import (
    DOTTED,
    INK,
    PAPER,
    ROW,
    SERIES,
    SETTINGS,
    SOFT,
    VERDICTS,
    WIDTH,
    figure,
    halo,
    svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Look: TypeAlias = dict[str, Any]
BLACK, WHITE, PALE, BLUE, ORANGE = "#000000", "#ffffff", "#f4f4f4", "#00447d", "#b24600"
MARKERS = "os^Dv"
FEW_DECADES = 50.0  # an axis that spans less has numbers between powers of ten
NO_DECADE = 4.0  # and one that spans less than this has as many as on a linear axis
LINE = 18.0  # height of a line of words
NAMES_SHARE = 0.45  # of a chart of dots, for the names of its rows at most
KEY = 46.0  # a legend's colour beside each name, and the gap to the next
LIMIT: Look = {"color": INK, "linewidth": 1, "linestyle": DOTTED, "gid": "limit"}
RING: Look = {"marker": "o", "markersize": 6, "markerfacecolor": "none"}
HALF_LETTERS = 26  # of a name that leaves room for another beside it in a narrow chart
DASHES = ("-", (0, (8, 4)), (0, (2, 3)), (0, (10, 3, 2, 3)), (0, (14, 5)), (0, (5, 3)))
LETTER = 7.3  # width of an average character
BESIDE = 56  # letters of a bar's name that fit beside it
SHADES = 17  # of a heat map
READABLE = 4.5  # contrast of a number with its cell; one of black and white always has it
ACROSS, PLOT = 500.0, 317.0  # about the width and the height of a chart of lines
CLOSE = 6.0  # a dot's width; dots of points nearer than this to both neighbours would hide dashes
DOTS = "dots are what was measured"
DENSE = "; points without one lie closer than a dot is wide"


def draw(chart: charts.Chart, wide: float = WIDTH) -> str:
    """Return a chart as an SVG document with title and description, and `drawn_of` in its head.

    wide: `NARROW` for what telephones show as well; lines and bars have one width.
    """
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()  # a user's own settings would change the drawing
        mpl.rcParams.update(SETTINGS)
        if isinstance(chart, charts.Lines):
            return svg(_lines(chart), chart)
        if isinstance(chart, charts.Bars):
            return svg(_bars(chart), chart)
        if isinstance(chart, charts.Scatter):
            return svg(_scatter(chart, wide), chart)
        made = _heat_maps(chart, wide) if isinstance(chart, charts.HeatMaps) else _dots(chart, wide)
        return svg(made, chart)


def _lines(chart: charts.Lines) -> Figure:
    points = [*(p for line in chart.lines for p in line.points), *chart.axes.covers]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    low, high = (low, high) if low < high else (low / 2, high * 2)
    dots = [_dotted(line, math.log(high / low)) for line in chart.lines]
    below = chart.subtitle and f"{chart.subtitle}; {DOTS}"
    crowded = any(len(on) < len(one.points) for on, one in zip(dots, chart.lines, strict=True))
    below += DENSE if below and crowded else ""
    above = ROW * len(chart.marks)
    tall = max(370.0, 24.0 * len(chart.lines)) + above
    drawn = figure(chart, tall, below, above)
    axes = drawn.add_subplot()
    ys = [*(y for _, y in points), *(mark.at for mark in chart.ceilings)]
    ys += [y for line in chart.lines for ends in line.band for y in ends]
    _scales(axes, chart, (low, high), (min(ys), max(ys)))
    keys = []
    for index, (line, on) in enumerate(zip(chart.lines, dots, strict=True)):
        if line.points:
            keys.append((line.points[-1][1], _line(axes, line, on, index)))
    _marks(axes, chart, (low, high))
    keys.sort(key=lambda one: -one[0])  # names stand in the order of the lines' ends
    axes.legend(handles=[key for _, key in keys], loc="upper left", bbox_to_anchor=(1.01, 1.02))
    return drawn


def _line(axes: Axes, line: charts.Line, dots: list[int], index: int) -> Line2D:
    """Draw a line with its band; 36 of them differ in colours or dashes."""
    turn, place = divmod(index, len(SERIES))
    at, up = ([point[i] for point in line.points] for i in (0, 1))
    if line.band:
        lows, highs = ([ends[i] for ends in line.band] for i in (0, 1))
        shade: Look = {"color": SERIES[place], "alpha": 0.16, "linewidth": 0}
        axes.fill_between(at, lows, highs, gid="band", **shade)
    tip = "; ".join(f"{charts.number(at[i])}: {charts.number(up[i])}" for i in dots)
    dashes = DASHES[(place + turn) % len(DASHES)]
    look: Look = {"color": SERIES[place], "linestyle": dashes, "linewidth": 2.2}
    look |= {"marker": "o", "markersize": 5.5, "markevery": dots}
    gid = f"line:{line.name}, {tip}"
    (drawn,) = axes.plot(at, up, clip_on=False, label=line.name, gid=gid, **look)
    return drawn


def _scales(axes: Axes, chart: charts.Lines, across: charts.Ends, up: charts.Ends) -> None:
    """Set what the axes show, from where to where, and their numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    (low, high), base = across, 2 if across[1] / across[0] <= 2000 else 10
    axes.set_xlabel(chart.axes.x_label)
    axes.set_ylabel(chart.axes.y_label)
    axes.grid(axis="y")
    axes.set_xscale("log", base=base)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(base, numticks=11))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if chart.axes.log_y:
        axes.set_yscale("log")
        axes.set_ylim(10 ** math.floor(math.log10(up[0])), up[1] * 1.3)
    else:
        axes.set_ylim(0, up[1] * 1.08)
    axes.yaxis.set_major_locator(LogLocator() if chart.axes.log_y else MaxNLocator(6))
    axes.yaxis.set_major_formatter(lambda value, _: charts.short(value))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def _dotted(line: charts.Line, span: float) -> list[int]:
    """Return the points that have dots: all but those close to both of their neighbours."""
    at = [ACROSS / span * math.log(x) for x, _ in line.points]
    gaps = [after - before for before, after in itertools.pairwise(at)]
    return [
        place
        for place in range(len(at))
        if max(gaps[max(place - 1, 0) : place + 1], default=CLOSE) >= CLOSE
    ]


def _marks(axes: Axes, chart: charts.Lines, across: charts.Ends) -> None:
    """Draw ceilings, and marked places with words at the upper end of each one's own line.

    A line ends at its own row and crosses the rows below it. So all words stand to the right of
    their lines, the leftmost on top; or, where that lacks room, all to the left.
    """
    for mark in chart.ceilings:
        axes.axhline(mark.at, **LIMIT | {"gid": "ceiling"})
        axes.annotate(
            mark.label, (across[0], mark.at), (6, 4), textcoords="offset points", **halo()
        )
    marks = sorted(chart.marks, key=lambda mark: mark.at)
    share = [math.log(m.at / across[0]) / math.log(across[1] / across[0]) for m in marks]
    after = all(
        60 + ACROSS * at + LETTER * len(mark.label) < WIDTH
        for at, mark in zip(share, marks, strict=True)
    )
    place = axes.get_xaxis_transform()
    for row, mark in enumerate(marks if after else marks[::-1]):
        up = 6 + ROW * (len(marks) - 1 - row)
        low, high = max(mark.low, across[0]), min(mark.high, across[1])
        axes.axvspan(low, max(low, high), color=INK, alpha=0.1, linewidth=0)
        ends = (mark.at, mark.at), (0, 1 + (up + 10) / PLOT)
        axes.plot(*ends, transform=place, clip_on=False, in_layout=False, **LIMIT)
        side: Look = {"ha": "left" if after else "right", "in_layout": False, **halo()}
        beside = (6 if after else -6, up)
        axes.annotate(mark.label, (mark.at, 1), beside, place, textcoords="offset points", **side)


def _bars(chart: charts.Bars) -> Figure:
    groups = [list(bars) for _, bars in itertools.groupby(chart.bars, lambda bar: bar.label)]
    above = max(len(group[0].label) for group in groups) > BESIDE  # names take rows of their own
    rows = len(chart.bars) + (0.3 + 0.8 * above) * len(groups)
    tall = ROW * (rows + bool(chart.legend) + bool(chart.limit) + bool(chart.foot)) + 14
    drawn = figure(chart, tall, chart.subtitle)
    axes = drawn.add_subplot(ylim=(rows - 0.3, 0))
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(chart.foot, loc="left")
    ends = [end for bar in chart.bars for end in (sum(bar.parts), *(bar.ends or ()))]
    ends += [chart.limit.at] if chart.limit is not None else []
    start = min(ends) / 2 if chart.log else 0.0
    if chart.log:
        axes.set_xscale("log")
    axes.set_xlim(start, max(ends))
    y, labels = 0.0, {}
    for group in groups:
        if above:
            words: Look = {"textcoords": "offset points", "size": 11, "color": SOFT}
            left = axes.get_yaxis_transform()
            axes.annotate(group[0].label, (0, y + 0.72), (8, 0), left, gid="over", **words)
            y += 0.8
        else:
            labels[y + len(group) / 2] = group[0].label
        for bar in group:
            _bar(axes, bar, y, start)
            y += 1
        y += 0.3
    axes.set_xticks([])
    axes.set_xticks([], minor=True)
    axes.set_yticks(list(labels), list(labels.values()))
    if chart.limit is not None:
        axes.axvline(chart.limit.at, **LIMIT)
        late = chart.limit.at > axes.get_xlim()[1] / 2
        place, side = axes.get_xaxis_transform(), "right" if late else "left"
        look: Look = {"ha": side, "textcoords": "offset points", **halo()}
        beside = (-6 if late else 6, 6)
        axes.annotate(chart.limit.label, (chart.limit.at, 1), beside, place, **look)
    _legend(axes, chart.legend, up=1.0 / rows if chart.limit is not None else 0.0)
    return drawn


def _bar(axes: Axes, bar: charts.Bar, y: float, start: float) -> None:
    """Draw a bar's parts, its range, and its note behind them."""
    end = start
    for index, part in enumerate(bar.parts):
        colour = bar.colour if len(bar.parts) == 1 else index
        kind = "bar" if isinstance(colour, int) else colour
        tone = SERIES[colour] if isinstance(colour, int) else VERDICTS[colour]
        look: Look = {"color": tone, "edgecolor": PAPER, "gid": f"{kind}:{bar.label}: {bar.note}"}
        axes.barh(y, part - start, 1, end, align="edge", linewidth=1, **look)
        end += part - start
    if bar.ends is not None:
        axes.plot(bar.ends, (y + 0.5,) * 2, color=INK, linewidth=1.5, clip_on=False, gid="range")
        end = max(end, bar.ends[1])
    axes.annotate(
        bar.note, (end, y + 0.5), (8, 0), textcoords="offset points", va="center", **halo()
    )


def _legend(
    axes: Axes, names: Sequence[str], marker: str = "s", up: float = 0.0, columns: int = 0
) -> None:
    """Write names above a drawing, each with its colour; up: how far above, in its heights.

    columns: beside each other; 0: all.
    """
    from matplotlib.lines import Line2D

    if not names:
        return
    look: Look = {"marker": marker, "linestyle": "", "markersize": 10}
    keys = [Line2D([], [], color=SERIES[i % len(SERIES)], **look) for i in range(len(names))]
    columns = columns or len(names)
    # It ends with the bars, and begins before them, where it may be wider than they are.
    wide = sum(map(len, names)) > 40 or columns < len(names)
    place: Look = {"loc": "lower right" if wide else "lower left", "bbox_to_anchor": (wide, 1 + up)}
    axes.legend(keys, names, ncols=columns, borderaxespad=0.2, handlelength=1.0, **place)


def _heat_maps(chart: charts.HeatMaps, wide: float) -> Figure:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    values = [value for cells in chart.panels.values() for value in cells.values()]
    every = [*values, *chart.covers]
    rows, columns = (sorted({case[i] for p in chart.panels.values() for case in p}) for i in (0, 1))
    across = max(1, min(len(chart.panels), int((wide - 20) // (84 + 38 * len(columns)))))
    down = -(-len(chart.panels) // across)
    drawn = figure(chart, 60 + down * (24 * len(rows) + 66), chart.subtitle, wide=wide)
    reach = max(*every, 1 / min(every), 1.5)
    ends = (1 / reach, reach) if chart.ratios else (min(every), max(*every, 1.001 * min(every)))
    tones = (ORANGE, PALE, BLUE) if chart.ratios else (PALE, BLUE)
    shades, norm = LinearSegmentedColormap.from_list("", tones, SHADES), LogNorm(*ends)
    grid = drawn.subplots(down, across, squeeze=False)
    for axes, (title, cells) in zip(grid.flat, chart.panels.items(), strict=False):
        found = [[cells.get((row, column), math.nan) for column in columns] for row in rows]
        mesh = axes.pcolormesh(
            found, cmap=shades, norm=norm, edgecolors=PAPER, linewidth=1, gid="cells"
        )
        axes.set(xlabel=chart.axes[1], ylabel=chart.axes[0], ylim=(len(rows), 0))
        axes.set_title(title, gid="name")
        axes.set_xticks([i + 0.5 for i in range(len(columns))], [charts.short(n) for n in columns])
        axes.set_yticks([i + 0.5 for i in range(len(rows))], [charts.short(n) for n in rows])
        axes.tick_params(length=0)
        axes.spines["bottom"].set_visible(False)
        write = charts.number_format(every)
        for (row, column), value in cells.items():
            x, y = columns.index(column) + 0.5, rows.index(row) + 0.5
            look: Look = {"ha": "center", "va": "center", "size": 11, "in_layout": False}
            axes.text(x, y, write(value), gid="value", color=ink(shades(norm(value))), **look)
    for axes in grid.flat[len(chart.panels) :]:
        axes.axis("off")
    blank = len(chart.panels) * len(rows) * len(columns) > len(values)
    bar = drawn.colorbar(mesh, ax=grid, location="top", shrink=0.3, aspect=14, anchor=(0, 0))
    if bar.solids is not None:
        bar.solids.set_gid("swatch")
    bar.set_ticks([], minor=True)
    bar.ax.set_xlim(min(every), max(*every, 1.001 * min(every)))
    shown = sorted({min(every), max(every)})
    bar.set_ticks(shown, labels=[write(value) for value in shown])
    bar.set_label(chart.key + ("; blank: not run" if blank else ""), loc="left")
    return drawn


def ink(cell: Sequence[float]) -> str:
    """Return the colour of a number on a cell: black wherever it can be read there.

    >>> ink((0.96, 0.96, 0.96)), ink((0.0, 0.27, 0.49))
    ('#000000', '#ffffff')
    """
    return BLACK if (brightness(cell) + 0.05) / 0.05 >= READABLE else WHITE


def brightness(colour: Sequence[float]) -> float:
    """Return the relative luminance of red, green and blue, from 0 to 1, after the WCAG."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _scatter(chart: charts.Scatter, wide: float) -> Figure:
    """Draw points and limits; what tells them apart stands above, so that the width is theirs."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, NullLocator

    keys, dots = [], {}
    for place, name in enumerate(chart.points):
        turn, index = divmod(place, len(SERIES))
        look: Look = {"linestyle": "", "marker": MARKERS[turn % len(MARKERS)]}
        dots[name] = {**look, "markersize": 5, "color": SERIES[index]}
        keys.append(Line2D([], [], label=name, **dots[name]))
    if any(chart.rings.values()):
        keys.append(Line2D([], [], label=chart.ring, color=SOFT, linestyle="", **RING))
    for place, line in enumerate(chart.lines):
        look = {"color": INK, "linewidth": 1.2, "linestyle": DASHES[-1 - place % len(DASHES)]}
        keys.append(Line2D([], [], label=line.name, **look))
    columns = 2 if max(len(str(key.get_label())) for key in keys) <= HALF_LETTERS else 1
    tall = wide * 0.62 + 18 * -(-len(keys) // columns) + ROW * bool(chart.marks) + 16
    drawn = figure(chart, tall, "", wide=wide)
    axes = drawn.add_subplot(xscale="log")
    axes.set(xlabel=chart.axes.x_label, ylabel=chart.axes.y_label)
    axes.set_yscale("log" if chart.axes.log_y else "linear")
    axes.grid(axis="y")
    for name, some in chart.points.items():
        axes.plot(*zip(*some, strict=True), gid=f"points:{name}", **dots[name])
        if chart.rings.get(name):
            rings = {**dots[name], **RING, "marker": dots[name]["marker"]}
            axes.plot(*zip(*chart.rings[name], strict=True), gid="rings", **rings)
    for key, line in zip(keys[len(keys) - len(chart.lines) :], chart.lines, strict=True):
        look = {"linestyle": key.get_linestyle(), "linewidth": 1.2, "color": INK}
        axes.plot(*zip(*line.points, strict=True), gid="ceiling", **look)
    low, high = axes.get_xlim()
    for mark in (mark for mark in chart.marks if low < mark.at < high):
        axes.axvline(mark.at, **LIMIT)
        words: Look = {"textcoords": "offset points", "ha": "center", "size": 12}
        axes.annotate(mark.label, (mark.at, 1), (0, 3), axes.get_xaxis_transform(), **words)
    if not chart.axes.log_y:
        axes.set_ylim(0, axes.get_ylim()[1])
        axes.yaxis.set_major_locator(MaxNLocator(5))
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis is axes.xaxis or chart.axes.log_y:
            axis.set_major_locator(_ticks(low, high))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: charts.short(value))
    up = 1 + (ROW * bool(chart.marks) + 4) / (wide * 0.5)
    gaps: Look = {"borderaxespad": 0, "labelspacing": 0.4, "columnspacing": 1.2, "fontsize": 11}
    axes.legend(handles=keys, loc="lower left", bbox_to_anchor=(-0.12, up), ncols=columns, **gaps)
    return drawn


def _ticks(low: float, high: float) -> Any:
    """Return what places the numbers of a logarithmic axis."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if high / low < NO_DECADE:
        return MaxNLocator(4, steps=[1, 2, 5, 10])  # so that 1 is among them
    steps = (1, 2, 5) if high / low < FEW_DECADES else (1,)
    return LogLocator(subs=steps, numticks=8)


def _dots(chart: charts.Dots, wide: float) -> Figure:
    """Draw ratios; names and words are broken where they would leave the dots no room."""
    from matplotlib.ticker import NullLocator

    labels = [_broken(label, NAMES_SHARE * wide) for label in chart.rows]
    left = LETTER * max(len(line) for label in labels for line in label.split("\n"))
    foot = _broken(chart.foot, wide - left)
    keys = LETTER * len("".join(chart.names)) + KEY * len(chart.names)
    columns = len(chart.names) if keys < wide - left else -(-len(chart.names) // 2)
    each = 4 + LINE * (1 + max(label.count("\n") for label in labels))
    words = foot.count("\n") + (columns < len(chart.names))
    tall = each * len(chart.rows) + 84 + LINE * words
    drawn = figure(chart, tall, chart.subtitle, wide=wide)
    axes = drawn.add_subplot(xscale="log", ylim=(len(chart.rows) - 0.5, -0.5), xlabel=foot)
    axes.grid(axis="x")
    axes.axvline(1, **LIMIT | {"gid": "one"})
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.set_yticks(range(len(chart.rows)), labels)
    for index, dots in enumerate(chart.rows.values()):
        for place, name in enumerate(chart.names):
            if name in dots:
                value, *ends = dots[name]
                y = index + 0.1 * (place - (len(chart.names) - 1) / 2)  # equal ones stay visible
                look: Look = {"color": SERIES[place % len(SERIES)], "clip_on": False}
                axes.plot(ends, (y, y), linewidth=2, gid="range", **look)
                axes.plot(
                    value,
                    y,
                    "o",
                    markersize=9,
                    gid=f"dot:{name}: {charts.number(value)} times",
                    **look,
                )
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.8), max(high, 1.25))
    axes.xaxis.set_major_locator(_ticks(*axes.get_xlim()))
    _legend(axes, chart.names, "o", columns=columns)
    return drawn


def _broken(words: str, wide: float) -> str:
    """Return words in lines of at most so many pixels."""
    letters = int(wide / LETTER)
    return "\n".join(line for part in words.split("\n") for line in textwrap.wrap(part, letters))
