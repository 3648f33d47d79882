"""A ceiling as the best of several ways to reach it, and rows held against those measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmule.timing.clock import Clock, entry_over
from gemmule.timing.sampler import Budget, sample
from gemmule_lab.records.rows import Ceiling, Row

TOLERANCE = {"cpu": 0.10, "cuda": 0.03}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to reach a ceiling: what a call does, and how many bytes or operations that is."""

    name: str
    call: Callable[[], object]
    amount: float
    threads: int


def best(name: str, ways: Sequence[Way], clock: Clock, budget: Budget, seed: int) -> Ceiling:
    """Time all ways in turns; return the ceiling, in GB/s or GFLOP/s, with every way's figure."""
    timed = sample([entry_over(way.name, [way.call]) for way in ways], clock, budget, seed=seed)
    rates = {way.name: way.amount / timed[way.name].median * 1e-9 for way in ways}
    winner = max(ways, key=lambda way: rates[way.name])
    unit = "GB/s" if name in ("read", "copy") else "GFLOP/s"
    return Ceiling(name, rates[winner.name], unit, winner.name, winner.threads, rates)


def above_ceiling(row: Row, ceilings: Mapping[str, Ceiling], backend: str) -> str | None:
    """Return the flag of a cold row that beats the read ceiling by more than the tolerance.

    10 % on a CPU, 3 % on a GPU (`backend`: ``cpu`` or ``cuda``). None when nothing is wrong: warm
    rows are served by a cache and meet no DRAM ceiling.
    """
    read = ceilings.get("read")
    if row.temperature != "cold" or read is None:
        return None
    excess = row.gbs / read.value - 1
    if excess <= TOLERANCE[backend]:
        return None
    return f"above the read ceiling by {100 * excess:.0f} %"


def enforce(
    rows: Sequence[Row],
    ceilings: Mapping[str, Ceiling],
    backend: str,
    measure_again: Callable[[], Mapping[str, Ceiling]],
) -> tuple[tuple[Row, ...], dict[str, Ceiling]]:
    """Hold cold rows against the read ceiling; measure it again when one rises above it.

    Returns the rows, kept all, and the ceilings that count now: of the old and the new figure the
    higher one. Rows still above carry the flag; shares of the ceiling are worked out anew. Ceilings
    are part of an environment, so the caller gives the rows the id of the one that holds these.
    """
    if not any(above_ceiling(row, ceilings, backend) for row in rows):
        return tuple(rows), dict(ceilings)
    again = measure_again()
    now = {name: _higher(old, again.get(name)) for name, old in ceilings.items()}
    return tuple(_against(row, now, backend) for row in rows), now


def _higher(old: Ceiling, new: Ceiling | None) -> Ceiling:
    better = old if new is None or old.value >= new.value else new
    return replace(better, measured=old.measured + (new is not None))


def _against(row: Row, ceilings: Mapping[str, Ceiling], backend: str) -> Row:
    flag = above_ceiling(row, ceilings, backend)
    others = tuple(f for f in row.flags if not f.startswith("above the read ceiling"))
    flags = (*others, flag) if flag else others
    if row.percent_of_ceiling is None:
        return replace(row, flags=flags)
    return replace(row, flags=flags, percent_of_ceiling=100 * row.gbs / ceilings["read"].value)
