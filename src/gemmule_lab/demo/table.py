"""The demo's rows as one table an operation: a block for each shape, a line for each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemmule_lab.records.rows import Row, Speedup
from gemmule_lab.report.tables import TableData, byte_text, significant

# Column -> the peers whose ratio may stand in it: of several, one serves a number format.
PEER_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "x NumPy": ("numpy",),
    "x NumPy f32": ("numpy on float32",),
    "x torch": ("torch", "torch int8pack", "torch int4pack"),
    "x torch f32": ("torch on float32",),
}
LEGEND = (
    "x: gemmule is that many times as fast as the peer in the same format, or as the peer on "
    "float32 weights; by 95 % intervals '-' marks surely slower, '=' the same within 1 %, "
    "'?' undecided, or too few blocks for an interval. "
    "% read: of the measured read ceiling; cached: the matrices stay in the "
    "cache, !: above the ceiling, so one of both was disturbed. "
    "error: largest error over its bound. saved: bytes against float32."
)


def tables(rows: Sequence[Row]) -> list[TableData]:
    """Return a table for each operation, in the order of the rows."""
    ours = [row for row in rows if row.kind == "rung"]
    columns = [name for name in PEER_COLUMNS if any(_peer(row, name) for row in ours)]
    header = ("shape", "format", "rung", "us", "GB/s", "% read", *columns, "error", "saved")
    numeric = (False, False, False, *[True] * (len(header) - 3))
    bodies: dict[str, list[tuple[str, ...]]] = {}
    told: dict[str, str] = {}  # the shape of an operation's last line
    for row in ours:
        shape, op, form = row.group.rsplit(", ", 2)
        head = "" if told.get(op) == shape else shape
        bodies.setdefault(op, []).append((head, form, *cells(row, columns)))
        told[op] = shape
    return [TableData(op, header, tuple(body), numeric) for op, body in bodies.items()]


def cells(row: Row, columns: Sequence[str]) -> list[str]:
    """Return the texts of one line."""
    share = row.percent_of_ceiling
    return [
        row.name,
        significant(row.times_us.median),
        significant(row.gbs),
        "cached" if share is None else f"{share:.0f}{'!' if row.flags else ''}",
        *(ratio_text(_peer(row, column)) for column in columns),
        "" if row.error_ratio is None else f"{row.error_ratio:.2g}",
        byte_text(row.bytes_saved),
    ]


def _peer(row: Row, column: str) -> Speedup | None:
    found = (row.speedups.get(name) for name in PEER_COLUMNS[column])
    return next((speedup for speedup in found if speedup is not None), None)


def ratio_text(speedup: Speedup | None) -> str:
    """Return a ratio with its mark: ``1.50``, ``0.80-``, ``1.01=``, ``1.20?``; see `LEGEND`."""
    if speedup is None:
        return ""
    mark = {"faster": "", "slower": "-", "same": "="}.get(speedup.verdict, "?")
    return f"{speedup.value:.2f}{mark}" if speedup.value < 100 else f"{speedup.value:.0f}{mark}"
