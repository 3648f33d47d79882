"""The demo's rows as one table an operation: a block for each shape, a line for each format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gemmule_lab.records.rows import Row, Speedup
from gemmule_lab.report.tables import byte_text, significant

if TYPE_CHECKING:
    from rich.console import Console

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


def show(rows: Sequence[Row], console: Console) -> None:
    """Print one table for each operation, in the order of the rows, and what the signs mean.

    Lines are as wide as they are; a narrower terminal breaks them.
    """
    from rich.text import Text

    timed = [row for row in rows if row.kind == "rung"]
    operations = list(dict.fromkeys(_group(row)[1] for row in timed))
    ours = sorted(timed, key=lambda row: operations.index(_group(row)[1]))
    columns = [name for name in PEER_COLUMNS if any(_peer(row, name) for row in ours)]
    header = ["format", "rung", "us", "GB/s", "% read", *columns, "error", "saved"]
    texts = [cells(row, columns) for row in ours]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    before = ("", "")
    for row, line in zip(ours, texts, strict=True):
        shape, op, _ = _group(row)
        if op != before[0]:
            console.print(Text(f"\n{op}", style="bold underline"))
            console.print(Text(_aligned(header, widths), style="dim"), soft_wrap=True)
        if (op, shape) != before:
            console.print(Text(shape, style="bold"))
        console.print(Text(_aligned(line, widths)), soft_wrap=True)
        before = (op, shape)
    console.print(Text(f"\n{LEGEND}", style="dim"))


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> str:
    """Return the texts in columns: the first two to the left, numbers to the right."""
    return " ".join(
        text.ljust(width) if index < 2 else text.rjust(width)
        for index, (text, width) in enumerate(zip(texts, widths, strict=True))
    ).rstrip()


def cells(row: Row, columns: Sequence[str]) -> list[str]:
    """Return the texts of one line."""
    share = row.percent_of_ceiling
    return [
        _group(row)[2],
        row.name,
        significant(row.times_us.median),
        significant(row.gbs),
        "cached" if share is None else f"{share:.0f}{'!' if row.flags else ''}",
        *(ratio_text(_peer(row, column)) for column in columns),
        "" if row.error_ratio is None else f"{row.error_ratio:.2g}",
        byte_text(row.bytes_saved),
    ]


def _group(row: Row) -> tuple[str, str, str]:
    """Return shape, operation and format, as the row's group names them."""
    shape, op, name = row.group.rsplit(", ", 2)
    return shape, op, name


def _peer(row: Row, column: str) -> Speedup | None:
    found = (row.speedups.get(name) for name in PEER_COLUMNS[column])
    return next((speedup for speedup in found if speedup is not None), None)


def ratio_text(speedup: Speedup | None) -> str:
    """Return a ratio with its mark: ``1.50``, ``0.80-``, ``1.01=``, ``1.20?``; see `LEGEND`."""
    if speedup is None:
        return ""
    mark = {"faster": "", "slower": "-", "same": "="}.get(speedup.verdict, "?")
    return f"{speedup.value:.2f}{mark}" if speedup.value < 100 else f"{speedup.value:.0f}{mark}"
