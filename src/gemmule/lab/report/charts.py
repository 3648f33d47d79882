"""Charts as files of their own: titled lines, heat maps and bars, in light and dark.

A drawing names what was measured, where and in what unit, and is read without its page. Colours are
told apart by every eye (after Okabe and Ito); lines differ in dashes as well and carry their names
at their ends, heat maps and bars their numbers. A chart of lines takes at most six.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmule.lab.report.svg import WIDTH, cut, escape, number, words

LIGHT = ("#0072b2", "#c04c00", "#00795a", "#a0408c", "#39434a", "#866400")
DARK = ("#6fb7e9", "#ff9a57", "#4cc9a0", "#e08bd0", "#d5dadd", "#e0bd45")
DASHES = ("none", "8 4", "2 3", "10 3 2 3", "14 5", "5 3")
HEAD = 56.0
LETTER = 7.3  # width of an average character at 13 px


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar: lengths of its parts in order."""

    label: str
    parts: Sequence[float]
    note: str = ""


def _style() -> str:
    def colours(tones: Sequence[str]) -> str:
        return "".join(
            f".l{i}{{stroke:{tone}}}.f{i}{{fill:{tone}}}" for i, tone in enumerate(tones)
        )

    dashes = "".join(f".d{i}{{stroke-dasharray:{dash}}}" for i, dash in enumerate(DASHES))
    return (
        "svg{font:13px system-ui,sans-serif;background:#fdfdfb}text{fill:#1d2429}"
        ".title{font-size:17px;font-weight:600}.sub,.tick{fill:#4d5860}.grid{stroke:#e1e5e8}"
        ".axis{stroke:#5b6670}.line{fill:none;stroke-width:2.2}.limit{stroke:#1d2429;"
        "stroke-dasharray:3 3}.span{fill:#1d2429;opacity:.10}.lead{stroke:#9aa4ab}"
        ".halo{stroke:#fdfdfb;stroke-width:4px;paint-order:stroke;stroke-linejoin:round}"
        f"{colours(LIGHT)}{dashes}.cell{{stroke:#fdfdfb}}"
        "@media(prefers-color-scheme:dark){svg{background:#14181b}text{fill:#e8ecee}"
        ".sub,.tick{fill:#aab4ba}.grid{stroke:#2b3338}.axis{stroke:#8b979e}"
        ".halo{stroke:#14181b}.limit{stroke:#e8ecee}.span{fill:#e8ecee;opacity:.14}.cell{stroke:#14181b}"
        f"{colours(DARK)}}}"
    )


def document(height: float, title: str, subtitle: str, parts: Sequence[str], told: str) -> str:
    """Return a drawing as a file: titled, described for screen readers, with its own colours."""
    name = escape(title)
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}" '
        f'xmlns="http://www.w3.org/2000/svg"><style>{_style()}</style><title>{name}</title>'
        f"<desc>{escape(told)}</desc>"
        f"{words(16, 24, title, 'start', 'title')}{words(16, 43, subtitle, 'start', 'sub')}"
        f"{''.join(parts)}</svg>\n"
    )


def stacked_bars(
    bars: Sequence[Stack], parts: Sequence[str], *, title: str, subtitle: str, shares: bool
) -> str:
    """Return horizontal bars made of parts; with `shares` each is as long as the longest.

    The parts are named above, each bar's note stands behind it. ValueError for no bars.
    """
    if not bars or max(sum(bar.parts) for bar in bars) <= 0:
        raise ValueError("a chart of bars needs bars, and something to show.")
    label = min(360.0, LETTER * max(len(bar.label) for bar in bars) + 18)
    note = LETTER * max(len(bar.note) for bar in bars) + 20
    room, longest = WIDTH - label - note, max(sum(bar.parts) for bar in bars)
    drawn, x = [], label
    for index, name in enumerate(parts if len(parts) > 1 else ()):
        drawn.append(f'<rect class="f{index}" x="{x:.1f}" y="{HEAD:.1f}" width="12" height="12"/>')
        drawn.append(words(x + 18, HEAD + 11, name, "start"))
        x += 44 + LETTER * len(name)
    y = HEAD + (26 if len(parts) > 1 else 4)
    for bar in bars:
        drawn.append(words(label - 8, y + 15, cut(bar.label, label - 10), "end"))
        x, whole = label, sum(bar.parts) if shares else longest
        for index, part in enumerate(bar.parts):
            wide = room * part / whole if whole else 0.0
            tip = escape(f"{bar.label}, {parts[index]}: {number(part)}")
            drawn.append(
                f'<rect class="f{index} cell" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" '
                f'height="20"><title>{tip}</title></rect>'
            )
            x += wide
        drawn.append(words(x + 8, y + 15, bar.note, "start"))
        y += 26
    told = "; ".join(f"{bar.label} {bar.note}" for bar in bars)
    return document(y + 14, title, subtitle, drawn, told)


def short(value: float) -> str:
    """Return a tick's number, ``16k`` for 16384.

    >>> short(16384), short(0.01), short(1500.0), short(512)
    ('16k', '0.01', '1,500', '512')
    """
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:,.0f}k"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"
