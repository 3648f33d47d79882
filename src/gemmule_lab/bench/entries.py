"""What takes part in one interleaved run, and the rows that come of it, on a CPU as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmule.timing.clock import Clock, Contestant
from gemmule.timing.sampler import Budget, ratio, sample
from gemmule_lab.ceilings.host import enforce
from gemmule_lab.records.rows import Ceiling, Environment, Facts, Row, make_row, speedup_of


@dataclass(frozen=True, slots=True)
class Entry:
    """An implementation ready to be timed, and what its row says beside the times.

    against: the entries over which a rung's speed-ups are; None: all that are no rungs. shown:
    whether it has a row; what multiplies other numbers stands in the ratios alone.
    """

    contestant: Contestant
    facts: Facts
    against: tuple[str, ...] | None = None
    shown: bool = True


def race(
    entries: Sequence[Entry],
    clock: Clock,
    environment: Environment,
    budget: Budget,
    *,
    seed: int = 0,
) -> list[Row]:
    """Time the entries in one run; return a row for each that is shown, in their order."""
    samples = sample([one.contestant for one in entries], clock, budget, seed=seed)
    others = tuple(one.contestant.name for one in entries if one.facts.kind != "rung")
    rows = []
    for one in entries:
        if not one.shown:
            continue
        mine = samples[one.contestant.name]
        over = others if one.against is None else one.against
        speedups = {
            name: speedup_of(ratio(mine, samples[name]))
            for name in (over if one.facts.kind == "rung" else ())
        }
        rows.append(make_row(environment, one.facts, mine, speedups))
    return rows


def settled(
    rows: Sequence[Row], environment: Environment, measure: Callable[[], Mapping[str, Ceiling]]
) -> tuple[list[Row], Environment]:
    """Hold all rows against the read ceiling; where one rises above it, measure that again."""
    checked, ceilings = enforce(rows, environment.ceilings, environment.backend, measure)
    final = replace(environment, ceilings=ceilings)
    return [replace(row, environment=final.id) for row in checked], final
