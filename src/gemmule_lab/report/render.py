"""Results for people: tables in the terminal, and one self-contained HTML page.

The page fetches nothing and is read without its script, which sorts and filters rows; it follows
the reader's light or dark setting, and prints. What comes from a results file is escaped, and the
page lets no other script run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmule.storage.atomic import replace_text
from gemmule_lab.records.results import Results
from gemmule_lab.records.rows import Environment
from gemmule_lab.report import claims
from gemmule_lab.report.charts import Chart
from gemmule_lab.report.plots import draw
from gemmule_lab.report.sections import first_screens
from gemmule_lab.report.sheet import NARROW
from gemmule_lab.report.tables import (
    SHORT,
    TableData,
    byte_text,
    rows_table,
    significant,
    summary_table,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FOLDER = Path(__file__).parent
FILE_WIDTH = 160


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and the table of what it shows."""

    chart: Chart
    table: TableData


@dataclass(frozen=True, slots=True)
class Story:
    """What a page begins with, for readers who read no more: sentences, a chart, tables.

    note: what the dots of the chart are.
    """

    sentences: tuple[str, ...]
    chart: Figure
    note: str
    tables: tuple[TableData, ...]


def print_tables(results: Results, console: Console) -> None:
    """Print what was measured of ours, how it compares, and what that allows to be said."""
    devices = ", ".join(dict.fromkeys(one.device for one in results.environments.values()))
    ours = [row for row in results.rows if row.kind == "rung"]
    for data in (rows_table(devices, ours, SHORT), summary_table(results.rows)):
        if data.rows:
            console.print(terminal_table(data))
    for _, rows, runs in claims.devices(results):
        for sentence in claims.takeaway(rows, runs):
            console.print(sentence, markup=False, highlight=False)


def wide_console() -> Console:
    """Return a console that is wide where no terminal tells its width."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def print_table(data: TableData) -> None:
    """Print a table, in full width where no terminal tells its own."""
    wide_console().print(terminal_table(data))


def terminal_table(data: TableData) -> RenderableType:
    """Return a table for the terminal, whatever its width."""
    from gemmule_lab.report.fitted import Fitted

    return Fitted(data)


def render_html(results: Results, *, title: str = "", stories: Sequence[Story] = ()) -> str:
    """Return the page of a results file; ValueError when it holds no rows.

    title: by default the devices. stories: what comes first; the rest is then folded.
    """
    if not results.rows:
        raise ValueError("there are no rows to report; run `gemmule bench` first.")
    runs = list(results.environments.values())
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    return page(
        title or f"gemmule on {devices}",
        stories=stories,
        screens=first_screens(results),
        machines=[(machine_table(run), ceiling_table(run)) for run in runs],
        torn=results.torn,
    )


def page(title: str, **parts: Any) -> str:
    """Return a page of results or of studies; all texts are escaped, and nothing is fetched."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (FOLDER / "report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    whole = {"studies": (), "screens": (), "machines": (), "stories": (), "torn": False, **parts}
    template = environment.get_template("report.html.j2")
    narrow = functools.partial(draw, wide=NARROW)
    return template.render(
        title=title, draw=draw, narrow=narrow, script=script, digest=digest, **whole
    )


def write_html(
    results: Results, path: Path, *, title: str = "", stories: Sequence[Story] = ()
) -> None:
    """Write the page to `path`, all of it or nothing."""
    replace_text(path, render_html(results, title=title, stories=stories))


def machine_table(environment: Environment) -> TableData:
    """Return what a run depended on, as names and values."""
    lines = [
        ("device", environment.device),
        ("CPU", environment.cpu),
        ("GPUs", ", ".join(environment.gpus)),
        ("system", environment.system),
        ("Python", environment.python),
        ("threads", str(environment.threads)),
        ("clocks", _pairs(environment.clocks)),
        ("caches", ", ".join(f"{n} {byte_text(size)}" for n, size in environment.caches.items())),
        ("versions", _pairs(environment.versions)),
        ("commit", environment.commit or ""),
        ("data", environment.data),
        ("measured at", environment.timestamp),
    ]
    rows = tuple(line for line in lines if line[1])
    return TableData(environment.device, ("what", "value"), rows, (False, False))


def _pairs(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def ceiling_table(environment: Environment) -> TableData:
    """Return the measured ceilings and the way that reached each."""
    rows = tuple(
        (c.name, f"{significant(c.value)} {c.unit}", c.shape) for c in environment.ceilings.values()
    )
    return TableData(
        "Measured ceilings", ("ceiling", "value", "reached by"), rows, (False, True, False)
    )
