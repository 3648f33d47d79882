"""The parts of a page of results: the first screen of each machine, then a fold for each operation.

A fold holds the charts of `gemmule_lab.report.figures`, the ladders with what each step gained and
the counters on record, every row, and the command that measures its products again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.registry import ladder
from gemmule.storage import evidence, lines
from gemmule_lab.harness.products import titled
from gemmule_lab.records.results import Results
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.report import claims, figures
from gemmule_lab.report.charts import Chart
from gemmule_lab.report.ladder_gains import before, ladder_of
from gemmule_lab.report.tables import (
    TableData,
    label,
    rows_table,
    significant,
    summary_table,
    without_empty_columns,
)

LADDER_FROM = 3  # rungs on one product that make a ladder
LED = 3  # sentences that a page begins with; the others follow its chart
MOST_BYTES = 4 << 20
OLD_WORDS = {", A x, ": ", matvec, ", ", x A, ": ", vecmat, "}
BY_DEFAULT = {"cuda": {"torch"}}  # peers that take part without being asked for


@dataclass(frozen=True, slots=True)
class Fold:
    """One operation: a line that tells of it while it is folded, then all there is."""

    title: str
    words: str
    charts: tuple[Chart, ...]
    ladders: tuple[TableData, ...]
    rows: TableData
    command: str


@dataclass(frozen=True, slots=True)
class First:
    """A machine's first screen, and its folds. lead: what won, and where it lost."""

    device: str
    lead: str
    more: tuple[str, ...]
    chart: Chart | None
    summary: TableData
    folds: tuple[Fold, ...]


def first_screens(results: Results) -> list[First]:
    """Return what a page shows of each device that the rows were measured on."""
    return [_first(device, rows, runs) for device, rows, runs in claims.devices(results)]


def _first(device: str, rows: Sequence[Row], runs: Sequence[Environment]) -> First:
    told, known = claims.takeaway(rows, runs), {run.id: run for run in runs}
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(claims.op_of(row), []).append(row)
    folds = tuple(_fold(op, some, known[some[0].environment]) for op, some in by_op.items())
    chart = figures.overview(claims.comparisons(rows))
    return First(device, " ".join(told[:LED]), tuple(told[LED:]), chart, summary_table(rows), folds)


def _fold(op: str, rows: Sequence[Row], machine: Environment) -> Fold:
    kinds = (figures.times, figures.shares, figures.roofline, figures.errors, figures.spread)
    drawn: list[Chart] = [one for chart in kinds if (one := chart(rows, machine)) is not None]
    drawn += figures.maps(rows, machine)
    full, ladders = rows_table(f"Every row of {op}", rows), tuple(_ladders(rows, machine))
    return Fold(op, _words(rows), tuple(drawn), ladders, full, _command(rows, machine))


def _words(rows: Sequence[Row]) -> str:
    """Return what a fold says while it is closed: how many products, how fast in the mean."""
    races = claims.races(rows)
    found = [one for one in claims.hardest(claims.comparisons(rows)) if one.counted]
    words = "1 product" if len(races) == 1 else f"{len(races)} products"
    if found:
        many = claims.tally(found)
        words += f", {claims.mean(found):.2f}x the fastest other in the mean, surely slower on "
        words += f"{many['slower']}"
    return words


def _ladders(rows: Sequence[Row], machine: Environment) -> list[TableData]:
    """Return a table for each product on which three rungs or more were timed, in ladder order."""
    found = []
    for race in claims.races(rows):
        fastest: dict[str, Row] = {}
        for row in race:  # from fast to slow
            if row.kind == "rung" and not row.mode:
                fastest.setdefault(row.name, row)
        if len(fastest) >= LADDER_FROM:
            found.append(_ladder(fastest, machine))
    return found


def _ladder(fastest: Mapping[str, Row], machine: Environment) -> TableData:
    first = next(iter(fastest.values()))
    op = ladder_of(first)
    rungs = ladder(op, machine.backend)
    place = {rung.name: index for index, rung in enumerate(rungs)}
    counters = _counters(machine, op)
    body = []
    for name in sorted(fastest, key=lambda name: place.get(name, len(place))):
        row, us = fastest[name], fastest[name].times_us.median
        over = before(rungs[place[name]], rungs, fastest) if name in place else None
        gain = "" if over is None else f"{fastest[over].times_us.median / us:.2f}x {over}"
        form = claims.format_of(row)
        counted = counters.get((name, row.group)) or counters.get((name, form), "")
        share = "" if row.percent_of_ceiling is None else f"{row.percent_of_ceiling:.0f}"
        number = rungs.numbers.get(name, "")
        body.append((label(row), number, significant(us), gain, share, counted))
    header = ("rung", "step", "us", "gain over the step before", "% of read ceiling", "counters")
    numeric = (False, False, True, False, True, False)
    title = f"Ladder: {first.group or first.problem.describe()}"
    return without_empty_columns(TableData(title, header, tuple(body), numeric))


def _counters(machine: Environment, op: str) -> dict[tuple[str, str], str]:
    """Return what is on record of a device's rungs, by rung and product or dtype."""
    folder = evidence.folder() / evidence.slug(machine.device)
    if machine.backend == "cpu":
        return _instructions(folder / "instructions.json", op)
    return {
        (str(one["rung"]), str(one["title"])): _counted(one["counters"])
        for one in lines.read(folder / "counters.jsonl", 1)
        if one.get("op") == op and isinstance(one.get("counters"), dict) and one["counters"]
    }


def _counted(counters: Mapping[str, float]) -> str:
    names = ("occupancy %", "issue slots %", "FMA pipe %", "tensor pipe %")
    told = [f"{name[:-2]} {counters[name]:.0f} %" for name in names if counters.get(name, 0) >= 0.5]
    read = counters.get("DRAM bytes read")
    return ", ".join([*([f"DRAM read {read / figures.MIB:.1f} MiB"] if read else []), *told])


def _instructions(path: Path, op: str) -> dict[tuple[str, str], str]:
    if not path.is_file():
        return {}
    held = json.loads(lines.read_bytes(path, MOST_BYTES)).get(op, {})
    return {
        (rung, dtype): f"{sum(one['counts'].values()) / one['width']:.2f} instructions an element"
        for rung, dtypes in held.items()
        for dtype, one in dtypes.items()
    }


def _command(rows: Sequence[Row], machine: Environment) -> str:
    """Return the command that measures the products again; empty where bench has none of them."""
    titles = []
    for group in dict.fromkeys(row.group for row in rows):
        title = group
        for old, new in OLD_WORDS.items():
            title = title.replace(old, new)
        try:
            titles.append(titled(title).title)
        except ValueError:  # a product of the ladders' own, or the cost of a call
            continue
    if not titles:
        return ""
    words = ["gemmule", "bench"]
    if machine.backend != "cpu":
        asked = {row.name for row in rows if row.kind == "peer"} - BY_DEFAULT[machine.backend]
        words += ["--device", machine.backend, *(w for n in sorted(asked) for w in ("--peer", n))]
    return shlex.join([*words, *(word for title in titles for word in ("--product", title))])
