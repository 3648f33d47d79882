"""Result rows as tables of text: one set of cells for the terminal, the pages and the documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from gemmule.timing.sampler import CONFIDENCE
from gemmule_lab.records.distributed import DistributedRow
from gemmule_lab.records.rows import OTHERS, TAKEN_AWAY, Row, Speedup
from gemmule_lab.report import claims

T = TypeVar("T")
STEPS = "·▁▂▃▄▅▆▇█"  # of a histogram, from nothing to the most


@dataclass(frozen=True, slots=True)
class TableData:
    """A table of texts: `numeric[c]` aligns column c to the right, `best` rows are marked."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    best: frozenset[int] = frozenset()


def _quartiles(row: Row | DistributedRow) -> str:
    return f"{significant(row.times_us.q1)} to {significant(row.times_us.q3)}"


def _share(row: Row) -> str:
    return "" if row.percent_of_ceiling is None else f"{row.percent_of_ceiling:.0f}"


def _error(row: Row) -> str:
    return "" if row.error_ratio is None else f"{row.error_ratio:.2g}"


def _beside(row: Row) -> str:
    return "; ".join(f"{speedup_text(one)} {name}" for name, one in row.speedups.items())


def _fastest(row: Row) -> str:
    found = claims.comparisons([row])
    return f"{speedup_text(found[0].speedup)} {found[0].peer}" if found else ""


def _remarks(row: Row) -> str:
    """Return a row's flags; of those that tell of other programs one word, as others tell more."""
    ours = [flag for flag in row.flags if not flag.startswith((TAKEN_AWAY, OTHERS))]
    return "; ".join(["disturbed"] * row.disturbed + ours)


# Of a table: a column's name, what an item's cell is, whether it is a number.
Column = tuple[str, Callable[[T], str], bool]
SHORT: tuple[Column[Row], ...] = (
    ("product", lambda row: row.group or row.problem.describe(), False),
    ("implementation", lambda row: label(row), False),
    ("us", lambda row: significant(row.times_us.median), True),
    ("GB/s", lambda row: significant(row.gbs), True),
    ("% of read ceiling", _share, True),
    ("error / bound", _error, True),
    ("times as fast as the fastest other", _fastest, False),
    ("remarks", lambda row: _remarks(row), False),
)
FULL: tuple[Column[Row], ...] = (
    *SHORT[:3],
    ("q1 to q3", _quartiles, True),
    ("blocks", lambda row: str(row.times_us.n), True),
    ("from the least to the most us", lambda row: histogram(row.blocks_us), False),
    SHORT[3],
    ("TFLOP/s", lambda row: significant(row.tflops), True),
    *SHORT[4:6],
    ("bytes saved", lambda row: byte_text(row.bytes_saved), True),
    ("times as fast as", _beside, False),
    ("temperature", lambda row: row.temperature, False),
    ("remarks", lambda row: "; ".join((*row.flags, *([row.mode] if row.mode else []))), False),
)


def table_of(title: str, items: Iterable[T], columns: Sequence[Column[T]]) -> TableData:
    """Return a line for each item."""
    body = tuple(tuple(cell(item) for _, cell, _ in columns) for item in items)
    header, numeric = tuple(name for name, _, _ in columns), tuple(n for _, _, n in columns)
    return TableData(title, header, body, numeric)


def rows_table(title: str, rows: Sequence[Row], columns: Sequence[Column[Row]] = FULL) -> TableData:
    """Return a line for each row, empty columns left out; `SHORT` columns tell of ours."""
    return without_empty_columns(table_of(title, rows, columns))


def histogram(values: Sequence[float]) -> str:
    """Return how often values lie in twelve equal parts of their range; empty below two values.

    >>> histogram([1.0, 1.0, 1.0, 1.1, 2.0])
    '█▃·········▃'
    """
    if len(values) < 2:
        return ""
    counts, _ = np.histogram(values, 12)
    steps = np.ceil(counts / counts.max() * (len(STEPS) - 1)).astype(int)
    return "".join(STEPS[step] for step in steps)


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
        doubt = "~" if speedup.confidence < CONFIDENCE or best.disturbed else ""
        words += f", {doubt}{speedup.value:.2f} x {name}"
    return words + "".join(f", {flag}" for flag in best.flags)


def markdown(table: TableData) -> str:
    """Return a table as GitHub Markdown; characters that would break or script it are escaped."""
    lines = [_markdown_line(table.header)]
    lines.append(_markdown_line(["---:" if right else "---" for right in table.numeric], raw=True))
    lines += [_markdown_line(row) for row in table.rows]
    return "\n".join(lines)


def _markdown_line(cells: Sequence[str], *, raw: bool = False) -> str:
    return "| " + " | ".join(cells if raw else [text_of(c) for c in cells]) + " |"


def text_of(text: str) -> str:
    """Return a text as Markdown that shows it as it is."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join("\\" + c if c in "\\|`*_[]" else c for c in text)


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


def summary_table(rows: Iterable[Row]) -> TableData:
    """Return a line for each kind of product: how ours compare, by what claims may rest on."""
    header = (
        *("products, gemmule beside others", "how many", "mean", "least", "most"),
        *("surely faster", "as fast", "surely slower", "undecided", "not counted"),
    )
    body = []
    for kind, found in claims.by_kind(claims.comparisons(rows)).items():
        counted = [one for one in found if one.counted]
        values = sorted(one.speedup.value for one in counted)
        three = (claims.mean(counted), values[0], values[-1]) if values else ()
        shown = [f"{value:.2f}x" for value in three] or [""] * 3
        numbers = (*claims.tally(counted).values(), len(found) - len(counted))
        body.append((str(kind), str(len(found)), *shown, *map(str, numbers)))
    return TableData("How many times as fast", header, tuple(body), (False, *[True] * 9))


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
    group = counted(first.world, "process", "processes")
    title = f"A x, {first.n} x {first.n} {first.dtype}, {group}, {first.transport}"
    columns: tuple[Column[DistributedRow], ...] = (
        ("way", lambda row: row.way, False),
        ("us", lambda row: significant(row.times_us.median), True),
        ("q1 to q3", _quartiles, True),
        ("x over alone", lambda row: f"{row.over_alone:.2f}", True),
        ("bytes sent", lambda row: f"{row.sent_bytes:,}", True),
        ("messages", lambda row: f"{row.messages:,}", True),
    )
    return table_of(title, rows, columns)
