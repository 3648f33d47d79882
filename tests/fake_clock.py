"""A clock that counts made-up times, so that what is sampled on it has a known truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gemmule.timing.clock import Entry, Timing


@dataclass
class FakeClock:
    """A clock whose blocks take made-up times; `pace(t)` slows the machine at time t."""

    costs: dict[str, float]
    noise: float = 0.0
    pace: Callable[[float], float] = lambda t: 1.0
    seed: int = 0
    overhead_s: float = 1e-7
    name: str = "synthetic"
    time_s: float = 0.0
    blocks: list[tuple[str, int, int]] = field(default_factory=list)

    def now(self) -> float:
        return self.time_s

    def prepare(self, entry: Entry) -> Callable[[int, int], Timing]:
        rng = np.random.default_rng([self.seed, *entry.name.encode()])

        def run(first: int, calls: int) -> Timing:
            jitter = math.exp(self.noise * rng.standard_normal())
            seconds = calls * self.costs[entry.name] * self.pace(self.time_s) * jitter
            self.time_s += seconds
            self.blocks.append((entry.name, first, calls))
            return Timing(seconds, calls, {"clock_mhz": 1980})

        return run


def entries_on(clock: FakeClock, sets: int = 1) -> list[Entry]:
    return [Entry(name, lambda i: None, sets) for name in clock.costs]
