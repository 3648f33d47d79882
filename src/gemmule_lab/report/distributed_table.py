"""Rows of ``gemmule bench --suite distributed`` as tables, one for each product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemmule_lab.records.distributed import DistributedRow
from gemmule_lab.report.tables import TableData, counted, significant


def tables(rows: Iterable[DistributedRow]) -> list[TableData]:
    """Return a table for each product of each run, in the order of the file."""
    groups: dict[object, list[DistributedRow]] = {}
    for row in rows:
        key = (row.environment, row.n, row.dtype, row.world, row.transport)
        groups.setdefault(key, []).append(row)
    return [table(group) for group in groups.values()]


def table(rows: Sequence[DistributedRow]) -> TableData:
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
