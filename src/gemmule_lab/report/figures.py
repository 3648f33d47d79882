"""The charts of a page of results: what rows say of one operation on one machine, as data.

Points are ours, rings the fastest other; colours are formats of the matrix, or rungs. Each returns
None where the rows have nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gemmule_lab.records.results import geomean
from gemmule_lab.records.rows import Environment, Row
from gemmule_lab.report import claims
from gemmule_lab.report.charts import Axes, Dots, HeatMaps, Line, Mark, Point, Scatter
from gemmule_lab.report.claims import Comparison
from gemmule_lab.report.ladder_table import REFERENCE_GPU

MIB = 1 << 20
MOST_CELLS = 8  # of a map, in a row or a column
MOST_NAMES = 24  # that colours and marks tell apart
MAP_KEY = "blue: ours is faster, orange: slower"
RING = "ring: the fastest other"


def overview(found: Sequence[Comparison]) -> Dots | None:
    """Return each kind's mean speed-up, with the least and the most, by what claims may rest on."""
    rows: dict[str, dict[str, tuple[float, float, float]]] = {}
    for kind, some in claims.by_kind(one for one in found if one.counted).items():
        values = [one.speedup.value for one in some]
        label = f"{kind.op} {kind.format}"
        label += "" if kind.over == claims.OTHERS else f"\nover {kind.over}"
        rows.setdefault(label, {})[kind.asked] = (claims.mean(some), min(values), max(values))
    names = [one for one in claims.ASKED if any(one in dots for dots in rows.values())]
    if not rows:
        return None
    title = "Times as fast as the fastest other: the mean, from the least to the most"
    return Dots(title, "", rows, names, "slower ← 1 → faster; logarithmic axis")


def _size(row: Row) -> float:
    return row.problem.matrix_bytes / MIB


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row | None]]:
    """Return our fastest row of each product, and the fastest other's, where it has one."""
    found = []
    for race in claims.races(rows):
        ours = next((row for row in race if row.kind == "rung" and not row.mode), None)
        other = next((row for row in race if row.kind == "peer"), None)
        if ours is not None:
            found.append((ours, other))
    return found


def _by_format(
    title: str, axes: Axes, pairs: Sequence[tuple[Row, Row | None]], point: Callable[[Row], Point]
) -> Scatter:
    points: dict[str, list[Point]] = {}
    rings: dict[str, list[Point]] = {}
    for ours, other in pairs:
        points.setdefault(claims.format_of(ours), []).append(point(ours))
        if other is not None:
            rings.setdefault(claims.format_of(ours), []).append(point(other))
    return Scatter(title, axes, points, rings, RING)


def _caches(machine: Environment) -> list[Mark]:
    """Return the caches as places on the axis of sizes; of old files the reference GPU's."""
    caches = machine.caches
    if not caches and machine.device == REFERENCE_GPU.name:
        caches = {"L2": REFERENCE_GPU.cache_bytes}
    return [Mark(name, size / MIB) for name, size in caches.items()]


def times(rows: Sequence[Row], machine: Environment) -> Scatter | None:
    """Return the time of a call over the size of the matrix, with what reading it takes."""
    pairs, lines = _pairs(rows), []
    read = machine.ceilings.get("read")
    sizes = [_size(ours) for ours, _ in pairs]
    if not pairs:
        return None
    if read is not None and min(sizes) < max(sizes):
        limit = [(mib, mib * MIB / read.value * 1e-3) for mib in (min(sizes), max(sizes))]
        least = min(ours.times_us.median for ours, _ in pairs) / 2
        floor = [(max(x, least * read.value * 1e3 / MIB), max(y, least)) for x, y in limit]
        lines = [Line(f"read at {read.value:,.0f} GB/s", floor)]
    axes = Axes("MiB of matrix", "us a call", log_y=True)
    found = _by_format("Time over size", axes, pairs, lambda row: (_size(row), row.times_us.median))
    return replace(found, lines=lines, marks=_caches(machine))


def shares(rows: Sequence[Row], machine: Environment) -> Scatter | None:
    """Return the share of the read ceiling over the size of the matrix."""
    pairs = [
        (ours, other if other and other.percent_of_ceiling else None)
        for ours, other in _pairs(rows)
        if ours.percent_of_ceiling
    ]
    sizes = [_size(ours) for ours, _ in pairs]
    if not pairs:
        return None
    whole = [Line("the read ceiling", [(min(sizes), 100.0), (max(sizes), 100.0)])]
    axes = Axes("MiB of matrix", "% of the read ceiling")
    title = "Share of the read ceiling over size"
    found = _by_format(
        title, axes, pairs, lambda row: (_size(row), row.percent_of_ceiling or math.nan)
    )
    return replace(found, lines=whole, marks=_caches(machine))


def errors(rows: Sequence[Row], machine: Environment) -> Scatter | None:
    """Return our errors beside our times; results without any error have no place on the axis."""
    pairs = [(ours, None) for ours, _ in _pairs(rows) if ours.error_ratio]
    if not pairs:
        return None
    axes = Axes("us a call", "largest error / its bound", log_y=True)
    return _by_format(
        "Error beside time", axes, pairs, lambda row: (row.times_us.median, row.error_ratio or 1.0)
    )


def roofline(rows: Sequence[Row], machine: Environment) -> Scatter | None:
    """Return every rung under the measured roofs: operations a second over operations a byte."""
    points: dict[str, list[Point]] = {}
    others = []
    for row in rows:
        if row.mode and row.kind == "rung":
            continue
        at = row.problem.flops / row.problem.compulsory_bytes, row.tflops
        if row.kind == "rung":
            points.setdefault(row.name, []).append(at)
        else:
            others.append(at)
    read = machine.ceilings.get("read")
    if not points or read is None:
        return None
    often = sorted(points, key=lambda name: -len(points[name]))
    if len(often) > MOST_NAMES:
        rest = [at for name in often[MOST_NAMES - 1 :] for at in points[name]]
        points = {name: points[name] for name in often[: MOST_NAMES - 1]} | {"other rungs": rest}
    every = [x for some in points.values() for x, _ in some]
    low, high = min(every) / 1.5, max(every) * 1.5
    peaks = {c.name: c.value / 1e3 for c in machine.ceilings.values() if c.unit == "GFLOP/s"}
    slope = read.value / 1e3  # TFLOP/s by an operation a byte
    end = min(max([high, *(peak / slope for peak in peaks.values())]), high * 100)
    lines = [Line(f"read {read.value:,.0f} GB/s", [(x, x * slope) for x in (low, end)])]
    for name, peak in peaks.items():
        lines.append(Line(f"{name} {peak:.3g}", [(min(peak / slope, end / 2), peak), (end, peak)]))
    axes = Axes("operations a byte", "TFLOP/s", log_y=True)
    rings = {next(iter(points)): others}
    return Scatter("Roofline", axes, points, rings, "ring: others", lines)


def maps(rows: Sequence[Row], machine: Environment) -> list[HeatMaps]:
    """Return our speed beside the fastest other's over rows and columns, a map for each format.

    Sizes are put together by powers of two, or of more where there are many; a cell is the mean.
    """
    found: dict[str, dict[tuple[int, int], list[float]]] = {}
    for one in claims.comparisons(rows):
        problem = one.row.problem
        if one.kind.over == claims.OTHERS and one.counted:
            sides = (problem.m, problem.reduction)
            found.setdefault(claims.format_of(one.row), {}).setdefault(sides, []).append(
                one.speedup.value
            )
    grids = {name: _binned(cells) for name, cells in found.items()}
    return [
        HeatMaps(f"Speed over the fastest other's, {name}", "", {"": grid}, MAP_KEY, ratios=True)
        for name, grid in grids.items()
        if len(grid) > 1
    ]


def _binned(cells: dict[tuple[int, int], list[float]]) -> dict[tuple[int, int], float]:
    for step in range(1, 20):
        grid: dict[tuple[int, int], list[float]] = {}
        for sides, values in cells.items():
            m, n = (2 ** (step * round(math.log2(side) / step)) for side in sides)
            grid.setdefault((m, n), []).extend(values)
        if max(len({place[i] for place in grid}) for i in (0, 1)) <= MOST_CELLS:
            break
    return {place: geomean(values) for place, values in grid.items()}


def spread(rows: Sequence[Row], machine: Environment) -> Scatter | None:
    """Return how often blocks take so many times their own row's median: ours and others'."""
    blocks: dict[str, list[float]] = {}
    for row in rows:
        name = "gemmule" if row.kind == "rung" else "others"
        blocks.setdefault(name, []).extend(us / row.times_us.median for us in row.blocks_us)
    blocks = {name: some for name, some in blocks.items() if some}
    if not blocks:
        return None
    low, high = np.quantile([x for some in blocks.values() for x in some], (0, 0.99))
    edges = np.linspace(float(low), max(float(high), 1.01 * float(low)), 25)
    points = {}
    for name, some in blocks.items():
        counts, _ = np.histogram(some, edges)
        shown = zip((edges[:-1] + edges[1:]) / 2, 100 * counts / len(some), strict=True)
        points[name] = [(float(x), float(y)) for x, y in shown if y > 0]
    axes = Axes("times the median", "% of blocks")
    return Scatter("Single blocks beside their median", axes, points)
