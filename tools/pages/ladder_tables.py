"""Times and counters of the CUDA ladders as tables, and the bars at the head of each page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from counters import ladder_times
from counters.counters import Counted
from gemmule.core.registry import ladder
from gemmule.core.rung import Rung
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.report.ladder_gains import before
from gemmule_lab.report.tables import TableData, markdown, significant, without_empty_columns
from pages.excerpts import Telling
from pages.figures.drawing import Figure

PARAMETERS = "parameters"
COMMAND = "`python -m counters --evidence evidence/`"


def _ratio(over: str, under: str, factor: float) -> Callable[[Mapping[str, float]], float | None]:
    def value(raw: Mapping[str, float]) -> float | None:
        if over not in raw or not raw.get(under):
            return None
        return factor * raw[over] / raw[under]

    return value


def _scaled(name: str, factor: float) -> Callable[[Mapping[str, float]], float | None]:
    return lambda raw: raw[name] * factor if name in raw else None


DERIVED: Mapping[str, Callable[[Mapping[str, float]], float | None]] = {
    "DRAM read, MB": _scaled("DRAM bytes read", 1e-6),
    "DRAM written, MB": _scaled("DRAM bytes written", 1e-6),
    "load requests, thousands": _scaled("load requests", 1e-3),
    "sectors a load request": _ratio("load sectors", "load requests", 1.0),
    "L1 hits, %": _ratio("load sectors hit in L1", "load sectors", 100.0),
    "L2 hits, %": _ratio("L2 sectors read, hit", "L2 sectors read", 100.0),
    "shared-memory passes, millions": _scaled("shared wavefronts", 1e-6),
    "bank conflicts, % of passes": _ratio("shared bank conflicts", "shared wavefronts", 100.0),
    "warp instructions, millions": _scaled("warp instructions", 1e-6),
    "occupancy, %": _scaled("occupancy %", 1.0),
    "issue slots used, %": _scaled("issue slots %", 1.0),
    "FMA pipe, %": _scaled("FMA pipe %", 1.0),
    "tensor pipe, %": _scaled("tensor pipe %", 1.0),
}


# What moves along the way from one step of a ladder to the next.
STORY = (
    "load requests, thousands",
    "shared-memory passes, millions",
    "warp instructions, millions",
    "FMA pipe, %",
    "tensor pipe, %",
)


def shown(counter: str, one: Counted) -> str:
    """Return a derived counter as text; empty where it was not counted."""
    value = DERIVED[counter](one.counters)
    if value is None:
        return ""
    return "0" if value < 0.005 else significant(value)


def conditions(environment: Environment | None) -> str:
    """Return where and when the times were taken."""
    if environment is None:
        return f"Not measured yet: {COMMAND}."
    read = environment.ceilings.get("read")
    versions = ", ".join(
        f"{name} {environment.versions[name]}"
        for name in ("torch", "nvidia-cuda-nvrtc")
        if name in environment.versions
    )
    ceiling = "" if read is None else f"; read ceiling {read.value / 1e3:.2f} TB/s, the same run"
    day = environment.timestamp[:10]
    return f"{environment.device}, {day}, {versions}{ceiling}. Renewed by {COMMAND}."


def titles(op: str) -> tuple[str, ...]:
    """Return the products of a ladder in words, in order."""
    return tuple(spot.title for spot in ladder_times.spots() if spot.op == op)


def rung_times(op: str, rung: Rung, rungs: Sequence[Rung], rows: Sequence[Row]) -> str:
    """Return one rung's times on every product, beside the rung before it; empty without any."""
    body = []
    known = titles(op)
    earlier: list[str] = []
    for row in rows:
        if row.kind != "rung" or row.name != rung.name or row.group not in known:
            continue
        present = {one.name for one in rows if one.group == row.group}
        previous = before(rung, rungs, present) or ""
        earlier.append(previous)
        share = row.percent_of_ceiling
        told = "" if share is None or row.problem.op == "matmul" else f"{share:.0f}"
        gains = (_gain(row, other) for other in (previous, ladder_times.TORCH, ladder_times.PLAIN))
        params = ", ".join(f"{name} {value}" for name, value in row.params.items())
        time = significant(row.times_us.median)
        body.append((row.group, time, *rates(row), told, *gains, params))
    names = " or ".join(dict.fromkeys(name for name in earlier if name))
    over = (f"x over {name}" for name in (names, ladder_times.TORCH, ladder_times.PLAIN))
    header = ("cold", "us", "GB/s", "TFLOP/s", "% of read ceiling", *over, PARAMETERS)
    return table(header, body) if body else ""


def rates(row: Row) -> tuple[str, str]:
    """Return bandwidth and arithmetic rate, the one that does not limit the product empty."""
    if row.problem.op == "matmul":
        return "", significant(row.tflops)
    return significant(row.gbs), ""


def _gain(row: Row, other: str) -> str:
    """Return how many times as fast as another; ``~`` where the interval is below 95 %."""
    speedup = row.speedups.get(other)
    return "" if speedup is None else f"{speedup.value:.2f}"


def telling(
    op: str, rung: Rung, rungs: Sequence[Rung], wanted: Telling, counted: Sequence[Counted]
) -> str:
    """Return the counters that explain a rung, beside those of the rung before it."""
    mine = {one.title: one for one in counted if (one.op, one.rung) == (op, rung.name)}
    title = next((t for t in titles(op) if t in mine and wanted.product in t), None)
    if title is None:
        return ""
    present = {one.rung: one for one in counted if (one.op, one.title) == (op, title)}
    previous = before(rung, rungs, present)
    others = [present[previous]] if previous else []
    header = (f"counted, {title}", *(one.rung for one in others), rung.name)
    body = [
        (name, *(shown(name, one) for one in (*others, mine[title])))
        for name in wanted.names or DERIVED
        if shown(name, mine[title])
    ]
    return table(header, body) if body else ""


def story(op: str, rows: Sequence[Row], counted: Sequence[Counted]) -> str:
    """Return the way to a ladder's fastest rung on its first product, step by step.

    A step is a rung that the fastest builds on, with what it gained and the counters that moved.
    """
    title, rungs = titles(op)[0], ladder(op, "cuda")
    mine = {row.name: row for row in rows if row.group == title and row.kind == "rung"}
    ours = [rung for rung in rungs if rung.name in mine and not rung.vendor]
    best = min(ours, key=lambda rung: mine[rung.name].times_us.median, default=None)
    steps = []
    while best is not None:
        steps.append(best)
        name = before(best, rungs, [rung.name for rung in ours])
        best = next((rung for rung in ours if rung.name == name), None)
    found = {one.rung: one for one in counted if (one.op, one.title) == (op, title)}
    body = []
    for rung in reversed(steps):
        row, one = mine[rung.name], found.get(rung.name)
        gains = (_gain(row, before(rung, rungs, mine) or ""), _gain(row, ladder_times.TORCH))
        told = ("" if one is None else shown(name, one) for name in STORY)
        body.append((rung.name, significant(row.times_us.median), *gains, *told))
    header = (title, "us", "x over the step before", f"x over {ladder_times.TORCH}", *STORY)
    return table(header, body) if body else f"Not measured yet: {COMMAND}."


def all_times(op: str, rows: Sequence[Row]) -> str:
    """Return the times of all rungs and peers of a ladder, a column for each product."""
    columns = [title for title in titles(op) if any(row.group == title for row in rows)]
    numbers = {**ladder(op, "cuda").numbers, ladder_times.PLAIN: "", ladder_times.TORCH: ""}
    times = {(row.name, row.group): significant(row.times_us.median) for row in rows}
    body = [
        (f"{number} {name}".strip(), *(times.get((name, title), "") for title in columns))
        for name, number in numbers.items()
    ]
    body = [line for line in body if any(line[1:])]
    if not body:
        return f"Not measured yet: {COMMAND}."
    return table(("us, cold", *columns), body)


def all_counters(op: str, counted: Sequence[Counted]) -> str:
    """Return every counter of every rung, a table for each product."""
    parts = []
    for title in titles(op):
        present = {one.rung: one for one in counted if (one.op, one.title) == (op, title)}
        order = [rung.name for rung in ladder(op, "cuda") if rung.name in present]
        body = [(name, *(shown(key, present[name]) for key in DERIVED)) for name in order]
        if body:
            parts.append(f"**{title}**\n\n{table(('rung', *DERIVED), body)}")
    return "\n\n".join(parts) or f"Not counted yet: {COMMAND}."


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without the columns that nothing stands in."""
    numeric = tuple(i > 0 and name != PARAMETERS for i, name in enumerate(header))
    whole = TableData("", tuple(header), tuple(map(tuple, body)), numeric)
    return markdown(without_empty_columns(whole))


def times_figure(op: str, rows: Sequence[Row]) -> Figure:
    """Draw the times of a ladder's first product as bars, on a logarithmic axis."""
    return bars(titles(op)[0], ladder(op, "cuda").numbers, rows)


def bars(
    title: str, numbers: Mapping[str, str], rows: Sequence[Row], said: str = "; cold"
) -> Figure:
    """Draw the times of a product: of rungs by their numbers, and of the peers after them."""
    times = {row.name: row.times_us.median for row in rows if row.group == title}
    peers = [row for row in rows if row.group == title and row.kind == "peer"]
    peers.sort(key=lambda row: -row.times_us.median)
    marked = {row.name for row in rows if row.group == title and row.flags}
    order = [*numbers, *(row.name for row in peers)]
    names = [name for name in order if name in times]
    told = "; ".join(f"{name} {significant(times[name])} us" for name in names)
    f = Figure(f"{title}: time of each rung", told or "Not measured yet.", 92 + 28 * len(names))
    if not names:
        f.text(20, 64, "not measured yet", kind="soft")
        return f
    fastest, slowest = min(times[name] for name in names), max(times[name] for name in names)
    span = math.log(2 * slowest / fastest)
    for index, name in enumerate(names):
        y = 52 + 28 * index
        length = 390 * math.log(2 * times[name] / fastest) / span
        f.text(232, y + 16, f"{numbers.get(name, '')} {name}".strip(), anchor="end")
        f.box(242, y, round(length, 1), 22, "a" if name in numbers else "x")
        mark = " *" * (name in marked)
        f.text(round(250 + length, 1), y + 16, f"{significant(times[name])} us{mark}")
    said += "; * disturbed or throttled" * bool(marked)
    f.soft(242, 76 + 28 * len(names), f"logarithmic axis{said}")
    return f
