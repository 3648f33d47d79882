"""What each step of a ladder gained over the step before it, by the newest run on record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.registry import ladder
from gemmule.core.rung import Rung
from gemmule.storage import evidence
from gemmule_lab.records import results
from gemmule_lab.records.rows import Row

FILES = {"cpu": "cpu_ladder.jsonl", "cuda": "ladder.jsonl"}  # below a device's folder


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast as the rung `over` one was at a product, both timed in one run."""

    over: str
    times: float
    product: str
    us: float

    def __str__(self) -> str:
        return f"{self.times:.3g}x {self.over} ({self.product})"


def newest(backend: str, folder: Path | None = None) -> results.Results | None:
    """Return the newest run of a back end's ladders below an evidence folder, None without one."""
    base = evidence.folder() if folder is None else folder
    runs = [results.read(path) for path in sorted(base.glob(f"*/{FILES[backend]}"))]
    return max(
        runs,
        key=lambda run: max((e.timestamp for e in run.environments.values()), default=""),
        default=None,
    )


def ladder_of(row: Row) -> str:
    """Return which operation's ladder a measured product belongs to."""
    problem = row.problem
    if problem.quant is not None:
        return "quantized"
    if problem.op == "matmul":
        return "matmul"
    return "matvec" if problem.layout_a == "row" else "vecmat"


def before(rung: Rung, rungs: Sequence[Rung], present: Iterable[str]) -> str | None:
    """Return the nearest rung that `rung` builds on, along `after`, among those present."""
    known = {one.name: one for one in rungs}
    here, name = set(present), rung.after
    while name is not None and name not in here:
        name = known[name].after if name in known else None
    return name


def gains(op: str, backend: str, rows: Sequence[Row]) -> dict[str, Gain]:
    """Return the gain of every rung of a ladder that was timed beside one that it builds on.

    rows: a run's, products in order. A step of the main line counts at the first product at which
    it was timed beside the nearest step before it; a branch, which is made for other products, at
    the one of those on record where it gained most.
    """
    products: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.kind == "rung" and ladder_of(row) == op:
            products.setdefault(row.group, {})[row.name] = row.times_us.median
    rungs = ladder(op, backend)
    found = {}
    for rung in rungs:
        beside = [
            Gain(name, times[name] / times[rung.name], title, times[rung.name])
            for title, times in products.items()
            if rung.name in times and (name := before(rung, rungs, times))
        ]
        if beside:
            nearest = [gain for gain in beside if gain.over == rung.after] or beside
            on_line = rung in rungs.steps
            found[rung.name] = nearest[0] if on_line else max(nearest, key=lambda g: g.times)
    return found
