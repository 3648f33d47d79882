"""Drawings as SVG text: cells, boxes, arrows and words, for the figures of the ladders' pages.

A figure is the same text on every run. Colours are classes with a value for light and one for dark
screens; every figure lies on paper of its own, so that it can be read on any page.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 760
CHARACTER = 0.56  # width of an average character, in font sizes
LANES = 8
_FILLS = {  # class: (light, dark)
    "l0": ("#bcd7f5", "#1f4e82"), "l1": ("#fbd7ab", "#7a4a14"), "l2": ("#c3e6c9", "#22603a"),
    "l3": ("#ddcdf3", "#523a80"), "l4": ("#f7c7d6", "#7d2f4c"), "l5": ("#bfe6e8", "#155e63"),
    "l6": ("#eee3a0", "#655a12"), "l7": ("#d9d2cb", "#5a5048"),
    "a": ("#bcd7f5", "#1f4e82"), "x": ("#fbd7ab", "#7a4a14"), "y": ("#c3e6c9", "#22603a"),
    "shared": ("#ddcdf3", "#523a80"), "bad": ("#f6bcb6", "#8a2b23"),
    "mute": ("#e9edf0", "#29313a"), "paper": ("#ffffff", "#0f151c"),
}  # fmt: skip
_INKS = {"ink": ("#17212b", "#e8eef4"), "soft": ("#50606f", "#a5b4c2")}
_LINES = {"line": ("#5b6b7a", "#93a3b2"), "alarm": ("#b3372b", "#f0857a")}


def _style() -> str:
    """Return the style sheet of every figure."""
    sheets = []
    for dark in (0, 1):
        rules = [f".{name}{{fill:{pair[dark]}}}" for name, pair in (_FILLS | _INKS).items()]
        for name, pair in _LINES.items():
            rules.append(f".{name}{{stroke:{pair[dark]};fill:none;stroke-width:1.6}}")
            rules.append(f".{name}-end{{fill:{pair[dark]}}}")
        rules.append(f".cell{{stroke:{_FILLS['paper'][dark]};stroke-width:1}}")
        rules.append(f".edge{{stroke:{_LINES['line'][dark]};stroke-width:1}}")
        rules.append(f".now{{stroke:{_INKS['ink'][dark]};stroke-width:2.4;fill:none}}")
        sheets.append("".join(rules))
    light, dark_sheet = sheets
    return f"<style>{light}@media(prefers-color-scheme:dark){{{dark_sheet}}}</style>"


@dataclass(frozen=True, slots=True)
class Words:
    """A text as placed, for the checks: its left edge, baseline, estimated width, and size."""

    text: str
    left: float
    base: float
    width: float
    size: float


@dataclass(slots=True)
class Figure:
    """A drawing under construction; lengths in pixels, y downwards.

    title stands above the drawing, description is for those who do not see it.
    """

    title: str
    description: str
    height: int
    width: int = WIDTH
    parts: list[str] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        kind: str = "ink",
        anchor: str = "start",
        size: int = 15,
        bold: bool = False,
    ) -> None:
        """Write words at a baseline; anchor is ``start``, ``middle`` or ``end`` of x."""
        span = len(words) * size * CHARACTER
        left = x - span * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
        self.words.append(Words(words, left, y, span, size))
        weight = ' font-weight="600"' if bold else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}"{where}{weight}>'
            f"{escape(words)}</text>"
        )

    def soft(self, x: float, y: float, words: str, anchor: str = "start", size: int = 14) -> None:
        """Write words that explain, small and pale."""
        self.text(x, y, words, kind="soft", anchor=anchor, size=size)

    def lines(self, x: float, y: float, words: str, *, size: int = 14) -> None:
        """Write the lines of some words under each other."""
        for index, line in enumerate(words.split("\n")):
            self.soft(x, y + index * (size + 6), line, size=size)

    def note(self, y: float, words: str) -> None:
        """Write a caption under the drawing, wrapped to its width."""
        self.lines(20, y, textwrap.fill(words, 88))

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        label: str = "",
        *,
        edge: str = "edge",
        size: int = 14,
        dashed: bool = False,
    ) -> None:
        """Draw a filled rectangle, its label in the middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect class="{kind} {edge}" x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="2"{dash}/>'
        )
        if label:
            middle = y + height / 2 + size * 0.36
            self.text(x + width / 2, middle, label, anchor="middle", size=size)

    def frame(self, x: float, y: float, width: float, height: float, kind: str = "now") -> None:
        """Draw an empty rectangle around something."""
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'
        )

    def cells(
        self,
        x: float,
        y: float,
        kinds: Sequence[Sequence[str]],
        *,
        side: float = 18,
        labels: Mapping[tuple[int, int], str] | None = None,
        size: int = 13,
    ) -> None:
        """Draw rows of square cells by their kinds; an empty kind leaves a gap."""
        for row, line in enumerate(kinds):
            for column, kind in enumerate(line):
                if kind:
                    label = (labels or {}).get((row, column), "")
                    left, top = x + column * side, y + row * side
                    self.box(left, top, side, side, kind, label, edge="cell", size=size)

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        kind: str = "line",
        dashed: bool = False,
    ) -> None:
        """Draw a straight line."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<path class="{kind}" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"{dash}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, kind: str = "line") -> None:
        """Draw a line with a head at its end."""
        length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-9)
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        bx, by = x2 - 8 * dx, y2 - 8 * dy
        self.line(x1, y1, round(bx, 2), round(by, 2), kind=kind)
        points = ((x2, y2), (bx - 4 * dy, by + 4 * dx), (bx + 4 * dy, by - 4 * dx))
        path = " ".join(f"{round(px, 2):g},{round(py, 2):g}" for px, py in points)
        self.parts.append(f'<polygon class="{kind}-end" points="{path}"/>')

    def bracket(self, x1: float, x2: float, y: float, label: str = "", *, up: bool = False) -> None:
        """Draw a bracket under (or over) a stretch, with words beyond it."""
        tip = -6 if up else 6
        self.parts.append(f'<path class="line" d="M{x1:g} {y:g}v{tip}H{x2:g}v{-tip}"/>')
        if label:
            at = y - 12 if up else y + 23
            self.soft((x1 + x2) / 2, at, label, "middle")

    def svg(self) -> str:
        """Return the file's text."""
        name, told = escape(self.title), escape(self.description)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-label="{name}" font-family="system-ui, sans-serif">\n'
            f"<title>{name}</title>\n<desc>{told}</desc>\n{_style()}\n"
            f'<rect class="paper" width="{self.width}" height="{self.height}" rx="6"/>\n'
        )
        caption = f'<text class="ink" x="20" y="31" font-size="17" font-weight="600">{name}</text>'
        return head + "\n".join([caption, *self.parts]) + "\n</svg>\n"


Drawings = Mapping[str, Callable[[], Figure]]


def drawn(
    title: str, height: int, below: int = 0
) -> Callable[[Callable[[Figure], None]], Callable[[], Figure]]:
    """Return what makes a function that draws one that returns the figure.

    The first paragraph of its docstring is the description; a second one stands in the figure,
    from the height `below` on.
    """

    def made(draw: Callable[[Figure], None]) -> Callable[[], Figure]:
        @functools.wraps(draw)
        def figure() -> Figure:
            told, _, note = inspect.cleandoc(draw.__doc__ or "").partition("\n\n")
            made = Figure(title, " ".join(told.split()), height)
            draw(made)
            if note:
                made.note(below, " ".join(note.split()))
            return made

        return figure

    return made


def lane(index: int) -> str:
    """Return the kind of cells of a lane, thread, warp or block; they repeat after eight."""
    return f"l{index % LANES}"


def striped(rows: int, columns: int) -> list[list[str]]:
    """Return cells each row of which belongs to another thread."""
    return [[lane(row)] * columns for row in range(rows)]


def plain(rows: int, columns: int, kind: str = "mute") -> list[list[str]]:
    """Return cells all alike."""
    return [[kind] * columns for _ in range(rows)]


def memory(
    figure: Figure,
    x: float,
    y: float,
    kinds: Sequence[str],
    *,
    side: float = 18,
    label: str = "memory",
    labels: Sequence[str] = (),
) -> None:
    """Draw a stretch of memory as a strip of cells with its name before it."""
    figure.soft(x - 10, y + side / 2 + 5, label, "end")
    marked = {(0, i): text for i, text in enumerate(labels)}
    figure.cells(x, y, [list(kinds)], side=side, labels=marked)
