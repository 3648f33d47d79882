"""The README's tables of speeds: dense and quantised products of recorded runs beside PyTorch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from gemmule_lab.records import results
from gemmule_lab.records.rows import Row

LARGE_BYTES = 64 * 2**20
PEER = "torch"
DIRECTIONS = {"A x": "row", "x A": "col"}
PACKED = "torch int4pack"
COLUMNS = (1, 4, 16)
NONE_YET = "No run is on record."


def sources(root: Path) -> list[Path]:
    """Return the result files that the table is made of, one a device."""
    return sorted(root.glob("evidence/*/bench/matvec.jsonl"))


def speed(root: Path) -> str:
    """Return a Markdown table for every device on record."""
    return "\n\n".join(_device(path) for path in sources(root)) or NONE_YET


def _device(path: Path) -> str:
    found = results.read(path)
    rows = [row for row in found.rows if row.kind == "rung" and PEER in row.speedups]
    environment = found.environments[rows[0].environment]
    shapes = {(row.problem.m, row.problem.n) for row in rows if row.problem.layout_a == "row"}
    version = environment.versions.get(PEER, "")
    head = (
        f"{environment.device}, {environment.timestamp[:10]}, {len(rows)} products of "
        f"{len(shapes)} shapes (square, tall, wide, odd, of models), cold, {PEER} {version} in the "
        "same run:"
    )
    lines = [head, ""]
    titles = [
        f"{direction}, {what}"
        for direction in DIRECTIONS
        for what in (f"times as fast as {PEER} (worst)", "large, of the read rate")
    ]
    lines.append(f"| dtype | {' | '.join(titles)} |")
    lines.append("|---|" + "---:|" * len(titles))
    for dtype in dict.fromkeys(row.problem.a for row in rows):
        cells = [
            cell
            for layout in DIRECTIONS.values()
            for cell in _cells(
                [r for r in rows if (r.problem.a, r.problem.layout_a) == (dtype, layout)]
            )
        ]
        lines.append(f"| {dtype} | {' | '.join(cells)} |")
    everything = [row.speedups[PEER].value for row in rows]
    lines.append(
        f"\nOver all of them {results.geomean(everything):.2f} times as fast as {PEER} in the "
        f"geometric mean, {min(everything):.2f} at least."
    )
    return "\n".join(lines)


def _cells(rows: Sequence[Row]) -> tuple[str, str]:
    """Return the ratio to the peer, and the median share of the read ceiling of large matrices."""
    if not rows:
        return "", ""
    ratios = [row.speedups[PEER].value for row in rows]
    shares = [
        row.percent_of_ceiling
        for row in rows
        if row.percent_of_ceiling is not None and row.problem.matrix_bytes > LARGE_BYTES
    ]
    share = f"{statistics.median(shares):.0f} %" if shares else ""
    return f"{results.geomean(ratios):.2f} ({min(ratios):.2f})", share


def quantised(root: Path) -> str:
    """Return a Markdown table for every device on record: 4-bit weights by 1, 4 and 16 columns."""
    paths = sorted(root.glob("evidence/*/bench/quantised.jsonl"))
    return "\n\n".join(_weights(path) for path in paths) or NONE_YET


def _weights(path: Path) -> str:
    found = results.read(path)
    times: dict[int, dict[int, Row]] = {}
    for row in found.rows:
        quant = row.problem.quant
        if row.kind == "rung" and PACKED in row.speedups and quant and quant.group_size == 128:
            columns = row.problem.n if row.problem.op == "matmul" else 1
            times.setdefault(row.problem.m, {})[columns] = row
    environment = found.environments[next(iter(times.values()))[1].environment]
    titles = [f"{k} column{'s' * (k > 1)}" for k in COLUMNS]
    lines = [
        f"{environment.device}, {environment.timestamp[:10]}, int4, cold: microseconds, and how "
        "many times as fast as PyTorch's own int4 product in the same run:",
        "",
        f"| matrix | {' | '.join(titles)} |",
        "|---|" + "---:|" * len(titles),
    ]
    for side, by_columns in sorted(times.items()):
        cells = [
            f"{one.times_us.median:.1f} ({one.speedups[PACKED].value:.2f})"
            if (one := by_columns.get(k)) is not None and one.times_us is not None
            else ""
            for k in COLUMNS
        ]
        lines.append(f"| {side} x {side} | {' | '.join(cells)} |")
    return "\n".join(lines)
