"""Document 001's times by size, and the size from which a GPU is the faster one for good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gemmule_lab.studies.records import Rows

TOTAL = "host to host"


def totals_of(rows: Rows) -> Rows:
    """Return the timed products from host to host."""
    return rows.where(TOTAL).timed()


def by_size(rows: Rows, name: str, part: str | None = None) -> dict[int, float]:
    """Return n -> microseconds of an implementation's totals, or of one part of them."""
    return {
        int(row.case["n"]): row.us if part is None else row.figures[part]
        for row in totals_of(rows).where(name=name)
        if part is None or part in row.figures
    }


@dataclass(frozen=True, slots=True)
class Crossing:
    """The size from which the GPU stays faster, and its ends by the quartiles of both times."""

    n: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """The size and its interval, ``47 (45 to 52)``."""
        return f"{self.n:.0f} ({self.low:.0f} to {self.high:.0f})"


def crossing(rows: Rows, cpu: str, gpu: str) -> Crossing | None:
    """Return where the GPU overtakes the CPU for good, between sizes by logarithms, or None."""
    left, right = (
        {int(row.case["n"]): row.times_us for row in totals_of(rows).where(name=name)}
        for name in (cpu, gpu)
    )
    common = sorted(set(left) & set(right))
    times = [
        (n, a, b) for n in common if (a := left[n]) is not None and (b := right[n]) is not None
    ]
    middle = last_crossing({n: a.median / b.median for n, a, b in times})
    if middle is None:
        return None
    low = last_crossing({n: a.q3 / b.q1 for n, a, b in times})
    high = last_crossing({n: a.q1 / b.q3 for n, a, b in times})
    return Crossing(middle, low or middle, float("inf") if high is None else high)


def last_crossing(ratios: Mapping[int, float]) -> float | None:
    """Return the size at which a ratio rises above 1 for good; None if it ends below.

    >>> last_crossing({1: 0.1, 10: 0.5, 40: 2.0, 50: 3.0})
    20.0
    """
    sizes = sorted(ratios)
    if not sizes or ratios[sizes[-1]] <= 1:
        return None
    below = [n for n in sizes if ratios[n] <= 1]
    if not below:
        return float(sizes[0])
    n, after = below[-1], sizes[sizes.index(below[-1]) + 1]
    share = -math.log(ratios[n]) / math.log(ratios[after] / ratios[n])
    return round(math.exp(math.log(n) + share * math.log(after / n)), 6)
