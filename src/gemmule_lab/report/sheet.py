"""The paper that charts are drawn on: sizes, colours for light and dark, and the SVG of a figure.

Colours are told apart by every eye (after Okabe and Ito). matplotlib writes those of a light
screen, and a style sheet replaces each of them on a dark one. The same chart is the same text on
every run.
"""

from __future__ import annotations

import functools
import hashlib
import html
import io
import re
import textwrap
from typing import TYPE_CHECKING, Any

from gemmule_lab.report.charts import Chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOK = 1  # raise it when the same chart is drawn in another way: pages are then drawn anew
WIDTH, SIDE, ROW = 800.0, 16.0, 20.0
NARROW = 400.0  # width of what telephones show as well
MOST_LETTERS = 106  # of a line of a subtitle
PAPER, INK, SOFT, GRID = "#fdfdfb", "#1d2429", "#4d5860", "#e1e5e8"
SERIES = ("#0072b2", "#c04c00", "#00795a", "#a0408c", "#39434a", "#866400")
VERDICTS = {"win": "#1a7f5a", "loss": "#c0492f", "even": "#8a929a"}
DARK = {
    PAPER: "#14181b", INK: "#e8ecee", SOFT: "#aab4ba", GRID: "#2b3338",
    "#0072b2": "#6fb7e9", "#c04c00": "#ff9a57", "#00795a": "#4cc9a0", "#a0408c": "#e08bd0",
    "#39434a": "#d5dadd", "#866400": "#e0bd45",
    "#1a7f5a": "#4cc38a", "#c0492f": "#f0795b", "#8a929a": "#7d8790",
}  # fmt: skip
DOTTED = (0, (3, 3))
SETTINGS: Any = {  # of matplotlib, whose names for them grow with its releases
    "svg.fonttype": "none", "svg.hashsalt": "gemmule", "text.parse_math": False,
    "font.size": 13.0, "text.color": INK, "axes.labelcolor": INK, "axes.titlesize": 13.0,
    "axes.titlelocation": "left", "axes.facecolor": "none", "figure.facecolor": PAPER,
    "axes.edgecolor": SOFT, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 1.0,
    "xtick.color": SOFT, "ytick.color": SOFT, "ytick.major.size": 0.0, "xtick.labelsize": 12.0,
    "xtick.major.pad": 6.0,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
    "lines.scale_dashes": False, "legend.frameon": False, "legend.handlelength": 2.4,
}  # fmt: skip


def drawn_of(chart: Chart) -> str:
    """Return what a drawing's head says of its chart: who finds it need not draw the chart again.

    Drawings themselves differ by a hair from one release of matplotlib to another.
    """
    digest = hashlib.sha256(f"{LOOK} {chart!r}".encode()).hexdigest()
    return f'data-of="{digest[:16]}"'


def figure(
    chart: Chart, tall: float, subtitle: str, above: float = 0.0, wide: float = WIDTH
) -> Figure:
    """Return a figure with room of some height below its title, in pixels, `above` of it empty.

    Without a subtitle the title is not drawn either: the page that shows the chart has it.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    below = textwrap.wrap(subtitle, MOST_LETTERS)
    head = 34 + 17.0 * len(below) if below else 4.0
    height = head + tall
    made = Figure(figsize=(wide / 72, height / 72), dpi=72)
    side = SIDE / WIDTH if wide == WIDTH else 2 / wide  # on a page that has its own margins
    place = (side, 4 / height, 1 - 2 * side, (tall - above - 8) / height)
    made.set_layout_engine(ConstrainedLayoutEngine(rect=place, h_pad=0, w_pad=0))
    if below:
        size = min(17.0, 1.7 * (WIDTH - 2 * SIDE) / len(chart.title))
        left = SIDE / WIDTH
        made.text(left, 1 - 24 / height, chart.title, size=size, weight="bold", gid="title")
        for index, line in enumerate(below):
            made.text(left, 1 - (44 + 17 * index) / height, line, color=SOFT, gid="sub")
    return made


def svg(drawn: Figure, chart: Chart) -> str:
    """Return a figure's document: titled, described, in few words, with two sets of colours."""
    out = io.StringIO()
    drawn.savefig(out, format="svg", metadata={"Date": None})
    text = re.sub(r"\s*\n\s*", " ", out.getvalue()).replace("> <", "><")
    body = text.partition("</metadata>")[2].partition("</defs>")[2]
    body = re.sub(r"; font-family: [^;\"]*", "", body)
    body = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", body)
    body = re.sub(r' (?:d|x|y|transform)="[^"]*"', _rounded, body)
    body = re.sub(r'(?<=<g) id="[xy](tick)_\d+"|(?<=<g) id="(legend)_\d+"', r' class="\1\2"', body)
    body = re.sub(r'(?<=<g) id="[a-zA-Z.]+(?:2d)?_\d+"', "", body)
    body = re.sub(r'<g id="(\w+):([^"]*)">', r'<g class="\1"><title>\2</title>', body)
    body = re.sub(r'<g id="(\w+)">', r'<g class="\1">', body)
    name, (wide, tall) = html.escape(chart.title), drawn.get_size_inches() * 72
    return (
        f'<svg class="plot" viewBox="0 0 {wide:.0f} {tall:.0f}" role="img" aria-label="{name}" '
        f'{drawn_of(chart)} xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink"><style>{_style()}</style>'
        f"<title>{name}</title><desc>{html.escape(chart.told)}</desc>{body.strip()}\n"
    )


def _rounded(attribute: re.Match[str]) -> str:
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}", attribute[0])


@functools.cache
def _style() -> str:
    dark = "".join(
        f'[style*="{what}: {light}"]{{{what}:{tone}!important}}'
        for light, tone in DARK.items()
        for what in ("fill", "stroke")
    )
    words = "svg.plot text{font-family:system-ui,sans-serif}"
    return f"{words}@media(prefers-color-scheme:dark){{{dark}}}"


def halo() -> dict[str, Any]:
    """Return the look of words that a line may not strike through."""
    return {"gid": "halo", "bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 1}, "zorder": 5}
