"""Results for people: a table in the terminal, and one self-contained HTML page.

The page needs no network and no JavaScript; it follows the reader's light or dark setting, prints,
and gives every plot's numbers as a table too. Everything that comes from a results file is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemmule.core.problem import describe_quant
from gemmule.storage.atomic import replace_text
from gemmule.timing.sampler import CONFIDENCE
from gemmule_lab.records.results import Results
from gemmule_lab.records.rows import Environment, Row, Speedup
from gemmule_lab.report.charts import Axes, Bar, Bars, Chart, Line, Lines, Mark, number
from gemmule_lab.report.plots import draw
from gemmule_lab.report.tables import (
    TableData,
    best_speedups,
    by_problem,
    label,
    problem_table,
    significant,
    summary_table,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FOLDER = Path(__file__).parent
FILE_WIDTH = 160
LOGARITHMIC_FROM = 30  # times the fastest
LADDER_FROM = 3  # rungs on one problem that make a ladder worth drawing


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and the table of what it shows."""

    chart: Chart
    table: TableData


@dataclass(frozen=True, slots=True)
class Story:
    """What a page begins with, for readers who read no more: a sentence, a chart, tables."""

    sentence: str
    chart: Figure
    tables: tuple[TableData, ...]


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Print one table per problem, and the summary over peers, to a rich console."""
    for title, group in by_problem(rows).items():
        console.print(terminal_table(problem_table(title, group)))
    summary = summary_table(rows)
    if summary.rows:
        console.print(terminal_table(summary))


def wide_console() -> Console:
    """Return a console that is wide where no terminal tells its width."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def print_table(data: TableData) -> None:
    """Print a table, in full width where no terminal tells its own."""
    wide_console().print(terminal_table(data))


def terminal_table(data: TableData) -> RenderableType:
    """Return a table for the terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(data.title), title_justify="left", row_styles=["", "dim"])
    for i, name in enumerate(data.header):
        table.add_column(
            Text(name), justify="right" if data.numeric[i] else "left", overflow="fold"
        )
    for index, row in enumerate(data.rows):
        style = "bold green" if index in data.best else None
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


def render_html(
    results: Results, *, title: str = "gemmule results", story: Story | None = None
) -> str:
    """Return the page of a results file; ValueError when it holds no rows.

    story: what comes first; the rest is then folded.
    """
    if not results.rows:
        raise ValueError("there are no rows to report; run `gemmule bench` first.")
    machines = [(machine_table(e), ceiling_table(e)) for e in results.environments.values()]
    return page(
        title,
        story=story,
        machines=machines,
        summary=summary_table(results.rows),
        speedups=speedup_figures(results.rows),
        bandwidths=bandwidth_figures(results),
        ladders=ladder_figures(results.rows),
        tables=[problem_table(t, g) for t, g in by_problem(results.rows).items()],
        torn=results.torn,
    )


def page(title: str, **parts: Any) -> str:
    """Return a page of results or of studies; all texts are escaped."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    whole = {"studies": (), "story": None, "torn": False, **parts}
    return str(environment.get_template("report.html.j2").render(title=title, draw=draw, **whole))


def write_html(
    results: Results, path: Path, *, title: str = "gemmule results", story: Story | None = None
) -> None:
    """Write the page to `path`, all of it or nothing."""
    replace_text(path, render_html(results, title=title, story=story))


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


def speedup_figures(rows: Sequence[Row]) -> list[Figure]:
    """Return one bar chart per peer: our fastest rung on every problem both did."""
    figures = []
    for peer, speedups in sorted(best_speedups(rows).items()):
        ordered = sorted(speedups.items(), key=lambda item: -item[1].value)
        bars = [_speedup_bar(title, one) for title, one in ordered]
        caption = f"Speed-up of our fastest rung over {peer}"
        data = tuple((t, f"{s.value:.2f}", f"{s.low:.2f}", f"{s.high:.2f}") for t, s in ordered)
        header = ("problem", "times as fast", "from", "to")
        table = TableData(caption, header, data, (False, True, True, True))
        figures.append(Figure(Bars(caption, "", bars, limit=Mark("1.0", 1.0)), table))
    return figures


def _speedup_bar(title: str, one: Speedup) -> Bar:
    """Return a speed-up with its interval; its colour says if it is surely above or below 1."""
    sure = one.confidence >= CONFIDENCE
    verdict = "win" if sure and one.low > 1 else "loss" if sure and one.high < 1 else "even"
    return Bar(title, (one.value,), f"{number(one.value)}×", verdict, (one.low, one.high))


def bandwidth_figures(results: Results) -> list[Figure]:
    """Return one plot of bandwidth over size per kind of problem measured at several sizes."""
    families: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        families.setdefault((row.environment, family(row)), []).append(row)
    figures = []
    for (machine, caption), rows in families.items():
        if len({_side(row) for row in rows}) < 2:
            continue
        environment = results.environments[machine]
        cold = rows[0].temperature == "cold"
        read = environment.ceilings.get("read") if cold else None
        series = [_series(name, rows) for name in dict.fromkeys(row.name for row in rows)]
        title = f"{caption} on {environment.device}"
        label = "side of the matrix, √(rows × columns), logarithmic"
        marks = [Mark(f"read ceiling {number(read.value)} GB/s", read.value)] if read else []
        chart = Lines(title, "", series, Axes(label, "GB/s"), marks)
        figures.append(Figure(chart, _series_table(title, series)))
    return figures


def family(row: Row) -> str:
    """Return what a row shares with the same product at other sizes, in words."""
    problem = row.problem
    matrix = describe_quant(problem.quant) if problem.quant else problem.a
    shape = f"A {problem.layout_a}"
    if problem.op == "matmul":
        shape += f", B {problem.layout_b}"
    batch = f", batch {problem.batch}" if problem.batch > 1 else ""
    dtypes = f"{matrix} x {problem.b} -> {problem.out}"
    return f"{problem.op}, {dtypes}, {shape}{batch}, {row.temperature}"


def _side(row: Row) -> float:
    return math.sqrt(max(1, row.problem.m * row.problem.reduction))


def _series(name: str, rows: Sequence[Row]) -> Line:
    """Return an implementation's line: at each size its fastest parameters."""
    points: dict[float, Row] = {}
    for row in rows:
        old = points.get(_side(row))
        faster = old is None or row.times_us.median < old.times_us.median
        if row.name == name and faster:
            points[_side(row)] = row
    kind = rows[[r.name for r in rows].index(name)].kind
    ordered = sorted(points.items())
    line = [(side, row.gbs) for side, row in ordered]
    scaled = [(row.gbs * row.times_us.median, row.times_us) for _, row in ordered]
    band = [(gigabytes / times.q3, gigabytes / times.q1) for gigabytes, times in scaled]
    return Line(name if kind == "rung" else f"{name} [peer]", line, band)


def _series_table(title: str, series: Sequence[Line]) -> TableData:
    sides = sorted({p[0] for s in series for p in s.points})
    values = [{p[0]: significant(p[1]) for p in s.points} for s in series]
    header = ("side", *(f"{s.name}, GB/s" for s in series))
    rows = tuple((f"{side:,.0f}", *(v.get(side, "") for v in values)) for side in sides)
    return TableData(title, header, rows, (True,) * len(header))


def ladder_figures(rows: Sequence[Row]) -> list[Figure]:
    """Return the waterfall of every problem on which three rungs or more were timed.

    Rungs stand in the order of the file, which the bench writes in the order of the ladder; of a
    rung timed with several parameters the fastest row counts.
    """
    position = {id(row): index for index, row in enumerate(rows)}
    figures = []
    for title, group in by_problem(rows).items():
        fastest: dict[str, Row] = {}
        for row in group:  # from fast to slow
            if row.kind == "rung":
                fastest.setdefault(row.name, row)
        if len(fastest) < LADDER_FROM:
            continue
        rungs = sorted(fastest.values(), key=lambda row: position[id(row)])
        figures.append(_ladder_figure(title, rungs))
    return figures


def _ladder_figure(title: str, rungs: Sequence[Row]) -> Figure:
    """Return each rung's time as a bar, and behind it how much faster it is than the one before.

    Times that span more than a factor of 30 are drawn on a logarithmic axis.
    """
    times, bars = [row.times_us.median for row in rungs], []
    for index, row in enumerate(rungs):
        note = f"{number(times[index])} us"
        if index:
            gain = times[index - 1] / times[index]
            note += f", {number(gain)}× faster" if gain >= 1 else f", {number(1 / gain)}× slower"
        bars.append(Bar(label(row), (times[index],), note))
    log = max(times) / min(times) > LOGARITHMIC_FROM
    foot = f"time of one call, {'logarithmic axis' if log else 'axis from zero'}"
    data = tuple((label(row), significant(row.times_us.median)) for row in rungs)
    return Figure(
        Bars(title, "", bars, foot=foot, log=log),
        TableData(title, ("rung", "us"), data, (False, True)),
    )
