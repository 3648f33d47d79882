"""The README's table of speeds on CPUs: each format beside NumPy's float32 and the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gemmule_lab.records import results
from gemmule_lab.records.rows import Row
from gemmule_lab.report.ladder_gains import FILES
from gemmule_lab.report.tables import significant

PLAIN = "numpy"
PRODUCTS = {  # the words of a recorded product: those of the table
    "matvec": "A x",
    "vecmat": "x A",
    "matmul 16 columns": "A by 16 columns",
    "matmul square": "A B",
}


def processors(root: Path) -> str:
    """Return a Markdown table for every CPU on record; it names what was disturbed."""
    paths = sorted(root.glob(f"evidence/*/{FILES['cpu']}"))
    return "\n\n".join(_device(path) for path in paths) or "No run is on record."


def _device(path: Path) -> str:
    found = results.read(path)
    environment = found.environments[found.rows[0].environment]
    groups: dict[str, list[Row]] = {}
    for row in found.rows:
        groups.setdefault(row.group, []).append(row)
    lines = [
        f"{environment.cpu}, {environment.threads} threads, {environment.timestamp[:10]}, cold: "
        "microseconds, and how many times as fast as NumPy's product in float32:",
        "",
        "| product | format | us | times as fast | x rounded to 8 bits, us | best other library |",
        "|---|---|---:|---:|---:|---|",
    ]
    for words, product in PRODUCTS.items():
        for title, rows in groups.items():
            size, kind, dtype = title.split(", ")
            if kind == words and not dtype.startswith("plain"):
                base = _timed(groups.get(f"{size}, {kind}, float32", ()), PLAIN)
                lines.append(f"| {product}, {size} | {dtype} | {_cells(rows, base)} |")
    return "\n".join(lines)


def _timed(rows: Sequence[Row], name: str) -> float | None:
    return next((row.times_us.median for row in rows if row.name == name), None)


def _cells(rows: Sequence[Row], base: float | None) -> str:
    """Return our time and its ratio to NumPy, that of x in 8 bits, and the best peer."""
    ours = [row for row in rows if row.kind == "rung"]
    rounded = [row for row in ours if "int8" in row.name]  # only where the caller permits it
    best = _least([row for row in ours if row not in rounded])
    peer = _least([row for row in rows if row.kind == "peer"])
    ratio = "" if base is None or best is None else f"{base / best.times_us.median:.2f}"
    name = "" if peer is None else f"{peer.name} "
    return f"{_said(best)} | {ratio} | {_said(_least(rounded))} | {name}{_said(peer)}"


def _least(rows: Sequence[Row]) -> Row | None:
    return min(rows, key=lambda row: row.times_us.median, default=None)


def _said(row: Row | None) -> str:
    if row is None:
        return ""
    return significant(row.times_us.median) + " (disturbed)" * bool(row.flags)
