"""Result rows as tables of text: one set of cells for the terminal, the pages and the documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gemmule.timing.sampler import CONFIDENCE
from gemmule_lab.records.distributed import DistributedRow
from gemmule_lab.records.results import geomean
from gemmule_lab.records.rows import Row, Speedup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TableData:
    """A table of texts: `numeric[c]` aligns column c to the right, `best` rows are marked."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    best: frozenset[int] = frozenset()


def by_problem(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return rows grouped by what was computed, cold or warm; each group from fast to slow."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        title = f"{row.problem.describe()}, {row.temperature}"
        groups.setdefault(f"{row.group}: {title}" if row.group else title, []).append(row)
    return {k: sorted(v, key=lambda r: r.times_us.median) for k, v in groups.items()}


def problem_table(title: str, rows: Sequence[Row]) -> TableData:
    """Return the table of one problem: time, bandwidth, share of the ceiling, ratios, error."""
    peers = sorted({peer for row in rows for peer in row.speedups})
    ceiling = any(row.percent_of_ceiling is not None for row in rows)
    header = ["implementation", "us", "q1 to q3", "GB/s"]
    header += ["% of read ceiling"] if ceiling else []
    header += [f"x over {peer}" for peer in peers] + ["error / bound", "bytes saved", "remarks"]
    body = []
    for row in rows:
        times = row.times_us
        cells = [label(row), significant(times.median)]
        cells += [f"{significant(times.q1)} to {significant(times.q3)}", significant(row.gbs)]
        if ceiling:
            share = row.percent_of_ceiling
            cells.append("" if share is None else f"{share:.0f}")
        cells += [speedup_text(row.speedups.get(peer)) for peer in peers]
        cells.append("" if row.error_ratio is None else f"{row.error_ratio:.2g}")
        cells += [byte_text(row.bytes_saved), "; ".join(row.flags)]
        body.append(tuple(cells))
    numeric = (False, *[True] * (len(header) - 2), False)
    ours = [i for i, row in enumerate(rows) if row.kind == "rung"]
    full = TableData(title, tuple(header), tuple(body), numeric, frozenset(ours[:1]))
    return without_empty_columns(full)


def products_table(title: str, rows: Sequence[Row]) -> TableData:
    """Return one line for each of our rows: time, bandwidth, share of the ceiling, ratios."""
    ours = [row for row in rows if row.kind == "rung"]
    peers = list(dict.fromkeys(name for row in ours for name in row.speedups))
    times = {(row.group, row.name): row.times_us.median for row in rows if row.kind == "peer"}
    header = ["product", "rung", "us", "GB/s", "TFLOP/s", "% of read ceiling", "error / bound"]
    for peer in peers:
        header += [f"{peer}, us", f"x over {peer}"]
    body = []
    for row in ours:
        share = row.percent_of_ceiling
        cells = [
            row.group,
            row.name,
            significant(row.times_us.median),
            significant(row.gbs),
            significant(row.tflops),
            "" if share is None else f"{share:.0f}",
            "" if row.error_ratio is None else f"{row.error_ratio:.2g}",
        ]
        for peer in peers:
            time_us = times.get((row.group, peer))
            cells.append("" if time_us is None else significant(time_us))
            cells.append(speedup_text(row.speedups.get(peer)))
        body.append((*cells, "; ".join(row.flags)))
    numeric = (False, False, *[True] * (len(header) - 2), False)
    return without_empty_columns(TableData(title, (*header, "remarks"), tuple(body), numeric))


def in_words(rows: Sequence[Row]) -> str:
    """Return one line on what was found: our fastest, its bandwidth, the fastest peer's share.

    The share of the read ceiling is told at the end: until then the ceiling may be measured anew.
    """
    ours = [row for row in rows if row.kind == "rung"]
    if not ours:
        return "nothing was timed"
    best = min(ours, key=lambda row: row.times_us.median)
    words = f"{best.name} {significant(best.times_us.median)} us, {significant(best.gbs)} GB/s"
    for name, speedup in best.speedups.items():
        words += f", {speedup.value:.2f} x {name}"
    return words + "".join(f", {flag}" for flag in best.flags)


def without_empty_columns(table: TableData) -> TableData:
    """Return the table less the columns in which no row has anything."""
    kept = [i for i in range(len(table.header)) if any(row[i] for row in table.rows)]

    def pick(values: Sequence[T]) -> tuple[T, ...]:
        return tuple(values[i] for i in kept)

    rows = tuple(pick(row) for row in table.rows)
    return replace(table, header=pick(table.header), rows=rows, numeric=pick(table.numeric))


def label(row: Row) -> str:
    """Return a row's implementation in words: name, parameters, and whether it is a peer."""
    params = ", ".join(f"{k}={v}" for k, v in row.params.items())
    return f"{row.name}{f' ({params})' if params else ''}{' [peer]' if row.kind == 'peer' else ''}"


def speedup_text(speedup: Speedup | None) -> str:
    """Return ``1.23 (1.20 to 1.26)``; an interval below 95 % confidence is marked with ``~``.

    One block has no interval: ``~1.23 (one block)``.
    """
    if speedup is None:
        return ""
    if speedup.confidence <= 0:
        return f"~{speedup.value:.2f} (one block)"
    mark = "~" if speedup.confidence < CONFIDENCE else ""
    return f"{mark}{speedup.value:.2f} ({speedup.low:.2f} to {speedup.high:.2f})"


def counted(number: int, one: str, many: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "study", "studies"), counted(1200, "row", "rows")
    ('1 study', '1,200 rows')
    """
    return f"{number:,} {one if number == 1 else many}"


def significant(value: float) -> str:
    """Return a positive number with three significant digits, or whole when it has more.

    >>> significant(0.01234), significant(12.345), significant(12345.6)
    ('0.0123', '12.3', '12,346')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def byte_text(count: int) -> str:
    """Return a number of bytes in words; empty for zero.

    >>> byte_text(3 << 20), byte_text(0), byte_text(-512)
    ('3.0 MiB', '', '-512 B')
    """
    if count == 0:
        return ""
    size, sign = float(abs(count)), "-" if count < 0 else ""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    return f"{sign}{size:.1f} GiB"


def best_speedups(rows: Iterable[Row]) -> dict[str, dict[str, Speedup]]:
    """Return, per peer and problem, the speed-up of our fastest rung there."""
    found: dict[str, dict[str, Speedup]] = {}
    for title, group in by_problem(rows).items():
        ours = next((row for row in group if row.kind == "rung"), None)
        for peer, speedup in (ours.speedups if ours is not None else {}).items():
            found.setdefault(peer, {})[title] = speedup
    return found


def summary_table(rows: Iterable[Row]) -> TableData:
    """Return one line per peer: problems, geometric mean, worst and best, problems lost."""
    header = ("peer", "problems", "geometric mean", "worst", "best", "surely slower on")
    body = []
    for peer, speedups in sorted(best_speedups(rows).items()):
        values = [s.value for s in speedups.values()]
        lost = sum(s.verdict == "slower" for s in speedups.values())
        body.append(
            (
                peer,
                str(len(values)),
                f"{geomean(values):.2f}x",
                f"{min(values):.2f}x",
                f"{max(values):.2f}x",
                str(lost),
            )
        )
    numeric = (False, True, True, True, True, True)
    return TableData("Our fastest rung against each peer", header, tuple(body), numeric)


def distributed_tables(rows: Iterable[DistributedRow]) -> list[TableData]:
    """Return a table for each product of each run, in the order of the file."""
    groups: dict[object, list[DistributedRow]] = {}
    for row in rows:
        key = (row.environment, row.n, row.dtype, row.world, row.transport)
        groups.setdefault(key, []).append(row)
    return [distributed_table(group) for group in groups.values()]


def distributed_table(rows: Sequence[DistributedRow]) -> TableData:
    """Return the table of one product: each way's time, and what it sends."""
    first = rows[0]
    body = tuple(
        (
            row.way,
            significant(row.times_us.median),
            f"{significant(row.times_us.q1)} to {significant(row.times_us.q3)}",
            f"{row.over_alone:.2f}",
            f"{row.sent_bytes:,}",
            f"{row.messages:,}",
        )
        for row in rows
    )
    group = counted(first.world, "process", "processes")
    title = f"A x, {first.n} x {first.n} {first.dtype}, {group}, {first.transport}"
    header = ("way", "us", "q1 to q3", "x over alone", "bytes sent", "messages")
    return TableData(title, header, body, (False, *(True,) * 5))
