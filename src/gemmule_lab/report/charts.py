"""Charts as files of their own: titled lines, heat maps and bars, in light and dark.

A drawing names what was measured, where and in what unit, and is read without its page. Colours are
told apart by every eye (after Okabe and Ito); lines differ in dashes as well and carry their names
at their ends, heat maps and bars their numbers. A chart of lines takes at most six.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from gemmule_lab.report.svg import WIDTH, escape, words

LIGHT = ("#0072b2", "#c04c00", "#00795a", "#a0408c", "#39434a", "#866400")
DARK = ("#6fb7e9", "#ff9a57", "#4cc9a0", "#e08bd0", "#d5dadd", "#e0bd45")
DASHES = ("none", "8 4", "2 3", "10 3 2 3", "14 5", "5 3")
HEAD, STEP = 56.0, 17.0  # below a subtitle of one line; what each further line takes
MOST_LETTERS = 126  # of a line of a subtitle
LETTER = 7.3  # width of an average character at 13 px


@dataclass(frozen=True, slots=True)
class Mark:
    """A place on an axis and its words: a line at `at`, what lies from `low` to `high` shaded.

    Of a ceiling, `at` is a value that a line stands at, and the ends are not used.
    """

    label: str
    at: float
    low: float = 0.0
    high: float = 0.0


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


def head(subtitle: str) -> float:
    """Return where the drawing below a title and this subtitle begins."""
    return HEAD + STEP * (len(_wrapped(subtitle)) - 1)


def document(height: float, title: str, subtitle: str, parts: Sequence[str], told: str) -> str:
    """Return a drawing as a file: titled, described for screen readers, with its own colours.

    A long subtitle goes on in further lines; `parts` leave it the room that `head` says.
    """
    name = escape(title)
    below = [
        words(16, 43 + STEP * index, line, "start", "sub")
        for index, line in enumerate(_wrapped(subtitle))
    ]
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}" '
        f'xmlns="http://www.w3.org/2000/svg"><style>{_style()}</style><title>{name}</title>'
        f"<desc>{escape(told)}</desc>{words(16, 24, title, 'start', 'title')}{''.join(below)}"
        f"{''.join(parts)}</svg>\n"
    )


def _wrapped(subtitle: str) -> list[str]:
    return textwrap.wrap(subtitle, MOST_LETTERS) or [""]


def short(value: float) -> str:
    """Return a tick's number, ``16k`` for 16384.

    >>> short(16384), short(0.01), short(1500.0), short(512)
    ('16k', '0.01', '1,500', '512')
    """
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:,.0f}k"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"
