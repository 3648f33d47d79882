"""Horizontal bars: groups of plain ones beside a limit, and bars made of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gemmule_lab.report.charts import LETTER, Mark, document, head
from gemmule_lab.report.svg import WIDTH, cut, escape, number, stroke, words

MOST_LABEL = 360.0
TALL, APART = 20.0, 6.0


@dataclass(frozen=True, slots=True)
class Group:
    """Bars of one label: their values by the name of the series, and the ends of a range of it."""

    label: str
    values: Mapping[str, float]
    ends: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar: lengths of its parts in order."""

    label: str
    parts: Sequence[float]
    note: str = ""


def grouped_bars(
    groups: Sequence[Group], *, title: str, subtitle: str, unit: str, limit: Mark | None = None
) -> str:
    """Return horizontal bars, those of a label side by side, a colour for each series.

    Each bar's value stands behind it, with its series where there are several, so that colours are
    not needed. `limit` is drawn as a line across. ValueError for no bars.
    """
    series = tuple(dict.fromkeys(name for group in groups for name in group.values))
    longest = max((value for group in groups for value in group.values.values()), default=0.0)
    if longest <= 0:
        raise ValueError("a chart of bars needs bars, and something to show.")
    notes = {
        (group.label, name): _note(group, name, unit, len(series) > 1)
        for group in groups
        for name in group.values
    }
    label = _label_room([group.label for group in groups])
    room = WIDTH - label - LETTER * max(map(len, notes.values())) - 20
    scale = room / max(longest, 0.0 if limit is None else limit.at)
    drawn, y = _legend(series, label, head(subtitle))
    begin = y = y + (20 if limit is not None else 0)
    behind = []  # the values, which the line across must not strike through
    for group in groups:
        middle = y + TALL * len(group.values) / 2
        drawn.append(words(label - 8, middle + 5, cut(group.label, label - 10), "end"))
        for name, value in group.values.items():
            kind = f"f{series.index(name)} cell"
            drawn.append(_bar((label, y), scale * value, kind, f"{group.label}: {value:g} {unit}"))
            end = scale * value
            if name in group.ends:
                low, high = (label + scale * at for at in group.ends[name])
                drawn.append(stroke(low, y + TALL / 2, high, y + TALL / 2, "axis"))
                end = high - label
            behind.append(words(label + end + 8, y + 15, notes[group.label, name], "start", "halo"))
            y += TALL
        y += APART
    told = "; ".join(f"{where} {note}" for (where, _), note in notes.items())
    if limit is not None:
        drawn += _limit(limit, label + scale * limit.at, begin, y)
        told += f"; {limit.label}"
    return document(y + 14, title, subtitle, [*drawn, *behind], told)


def stacked_bars(bars: Sequence[Stack], parts: Sequence[str], *, title: str, subtitle: str) -> str:
    """Return horizontal bars of one length, each divided by the shares of its parts.

    The parts are named above, each bar's note stands behind it. ValueError for no bars.
    """
    if not bars or max(sum(bar.parts) for bar in bars) <= 0:
        raise ValueError("a chart of bars needs bars, and something to show.")
    label = _label_room([bar.label for bar in bars])
    room = WIDTH - label - LETTER * max(len(bar.note) for bar in bars) - 20
    drawn, y = _legend(parts, label, head(subtitle))
    for bar in bars:
        drawn.append(words(label - 8, y + 15, cut(bar.label, label - 10), "end"))
        x, whole = label, sum(bar.parts)
        for index, part in enumerate(bar.parts):
            wide = room * part / whole if whole else 0.0
            tip = f"{bar.label}, {parts[index]}: {number(part)}"
            drawn.append(_bar((x, y), wide, f"f{index} cell", tip))
            x += wide
        drawn.append(words(x + 8, y + 15, bar.note, "start"))
        y += TALL + APART
    told = "; ".join(f"{bar.label} {bar.note}" for bar in bars)
    return document(y + 14, title, subtitle, drawn, told)


def _label_room(labels: Sequence[str]) -> float:
    return min(MOST_LABEL, LETTER * max(map(len, labels)) + 18)


def _legend(names: Sequence[str], left: float, top: float) -> tuple[list[str], float]:
    """Return the names of several series or parts with their colours, and where bars begin."""
    if len(names) < 2:
        return [], top + 4
    drawn, x = [], left
    for index, name in enumerate(names):
        drawn.append(f'<rect class="f{index}" x="{x:.1f}" y="{top:.1f}" width="12" height="12"/>')
        drawn.append(words(x + 18, top + 11, name, "start"))
        x += 44 + LETTER * len(name)
    return drawn, top + 26


def _limit(limit: Mark, x: float, begin: float, bottom: float) -> list[str]:
    """Return a line across all bars, its words above them."""
    anchor, away = ("start", 6) if x < WIDTH / 2 else ("end", -6)
    return [
        stroke(x, begin - 18, x, bottom, "limit"),
        words(x + away, begin - 7, limit.label, anchor, "halo"),
    ]


def _bar(place: tuple[float, float], wide: float, kind: str, tip: str) -> str:
    x, y = place
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{TALL:.0f}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _note(group: Group, name: str, unit: str, several: bool) -> str:
    note = f"{number(group.values[name])} {unit}"
    if name in group.ends:
        low, high = (number(end) for end in group.ends[name])
        note += f" ({low} to {high})" if low != high else ""
    return f"{note}, {name}" if several else note
