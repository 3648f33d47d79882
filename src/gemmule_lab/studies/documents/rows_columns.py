"""What the studies of documents 000 and 002 share: a grid of rows and columns, and its charts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from gemmule.core.registry import ladder
from gemmule_lab.harness.products import FLOATS
from gemmule_lab.records.study import Rows
from gemmule_lab.studies.charted import Spec, busy, chart
from gemmule_lab.studies.grid import Cell, Lane

EXPERIMENT, BY_TYPE = "rows x columns", "dtypes"
CHOICE = Lane("gemmule's choice", "auto")
BOTH = ("warm", "cold")


def every(sizes: Iterable[int], less: Iterable[int] = ()) -> list[tuple[int, int]]:
    """Return every pair of sizes, as rows and columns; less: but for those of these alone."""
    known, without = list(sizes), {*less}
    return [(m, n) for m in known for n in known if not {m, n} <= without]


def every_rung(op: str, backend: str, without: tuple[str, ...] = ()) -> tuple[Lane, ...]:
    """Return every rung of a ladder at its defaults, less what begins with a name, and a peer."""
    peer = "torch" if backend == "cuda" else "numpy"
    names = dict.fromkeys(rung.name for rung in ladder(op, backend))
    lanes = [Lane(name, name) for name in names if not name.startswith(without)]
    return (*lanes, Lane(peer, None, peer=peer))


def few_of(lanes: Iterable[Lane], kernels: Sequence[str]) -> tuple[Lane, ...]:
    """Return the lanes of the document's kernels and of peers, and our choice."""
    return (*(one for one in lanes if one.name in kernels or one.rung is None), CHOICE)


def cells(
    op: str, shapes: Iterable[tuple[int, int]], lanes: tuple[Lane, ...], temperatures: Sequence[str]
) -> Iterator[Cell]:
    """Yield lanes over rows and columns; a matmul's second operand is as wide as the first high."""
    for (m, n), temperature in itertools.product(shapes, temperatures):
        yield Cell(EXPERIMENT, op, m, n, lanes, temperature, m * (op == "matmul"))


def by_type(
    op: str, n: int, kernels: Sequence[str], types: Sequence[str], temperatures: Sequence[str]
) -> Iterator[Cell]:
    """Yield the document's kernels by dtype, over n x n matrices."""
    for name, temperature in itertools.product(types, temperatures):
        form = name if name in FLOATS else f"plain {name}"
        lanes = tuple(Lane(kernel, kernel, form=form) for kernel in kernels)
        whole = Cell(BY_TYPE, op, n, n, lanes, temperature, n * (op == "matmul"))
        yield replace(whole, case={**whole.filed, "dtype": name})


def largest_squares(rows: Rows) -> Iterator[tuple[str, int, Rows]]:
    """Yield, for each back end, the size of the largest square on file and its timed rows."""
    for backend in ("cuda", "cpu"):
        here = rows.where(EXPERIMENT, backend=backend).timed()
        sizes = [int(row.case["m"]) for row in here if row.case["m"] == row.case["n"]]
        if sizes:
            yield backend, max(sizes), here.where(m=max(sizes), n=max(sizes))


def charts(
    what: str,
    kernels: Sequence[str],
    value: str,
    unit: str,
    limit: str,
    shape: str,
    by_type: str,
    counted: str,
    axes: tuple[str, str],
) -> Iterator[Spec]:
    """Yield what is drawn of both: gain, use, rates, dtypes, and what is busy."""
    rate: dict[str, Any] = {"value": value, "unit": unit}
    gain: dict[str, Any] = {"value": "us", "pairs": [(tile, kernels[0]) for tile in kernels[1:]]}
    used: dict[str, Any] = {"value": "use", "unit": "%", "names": kernels, "each": ["warm"]}
    high: dict[str, Any] = {"over": "m", "at": {"n": "most"}, "each": ["cold"], "limit": limit}
    use, over = "use of the memory's bandwidth, the document's kernels", "over the rows, the most"

    def drawn(kind: str, name: str, title: str, *facts: str, **more: Any) -> Spec:
        below = "float32", *facts, shape
        return chart(kind, name, f"{what}: {title}", EXPERIMENT, *below, axes=axes, **more)

    title = "tiles are {means} times as fast as the basic kernel"
    yield drawn("maps", "gain", title, each=BOTH[::-1], **gain)
    yield drawn("maps", "use", use, "percent of the data sheet's bandwidth", **used)
    title = f"{unit} {over} columns"
    yield drawn("lines", "over-rows", title, unit, axis=axes[0], first=kernels, **high, **rate)
    title = f"{unit} by rows and columns"
    yield drawn("maps", "rates", title, f"{unit} in each cell", each=BOTH, **rate)
    title, label = f"{what}: {unit} by dtype", "{dtype}, {name}"
    yield chart("bars", "dtypes", title, BY_TYPE, "{dtypes}", by_type, unit, label=label, **rate)
    yield busy(f"{what}: what the kernels keep busy", counted)
