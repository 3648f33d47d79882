"""The paired sampler: several implementations timed in one run, compared block by block.

All entries take turns in rounds. Each round runs every entry once, in a fresh random
order, as a block of calls long enough that reading the clock costs less than 0.1 % of it. Two
entries are compared by the ratio of their times *within* each round, so a machine that grows
warmer, slower or busier during the run changes both sides of a ratio and cancels out. What one
entry leaves behind for the next (threads that still spin, say) is the clock's to keep out of
the blocks: see `gemmule.timing.clock.HostClock`.

>>> from gemmule.timing.clock import Entry, HostClock
>>> from gemmule.timing.sampler import Budget, ratio, sample
>>> work = Entry("sum", lambda i: sum(range(500)))
>>> more = Entry("longer sum", lambda i: sum(range(5000)))
>>> run = sample([work, more], HostClock(), Budget(max_seconds=2.0, min_block_s=0.002), seed=1)
>>> ratio(run["longer sum"], run["sum"]).verdict
'slower'
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gemmule.timing.clock import BlockRunner, Clock, Entry, Note, Timing

CONFIDENCE = 0.95
RESAMPLES = 2000
# Below six pairs even the whole range of the ratios holds the true median with less than 95 %.
FEWEST_PAIRS = 6
SAME_MARGIN = 0.01
TIMER_SHARE = 1e-3
MAX_CALLS = 1 << 24
STABLE_WITHIN = 0.02
WARMUP_WINDOW_S = 0.1


@dataclass(frozen=True, slots=True)
class Budget:
    """What a run may take: rounds, seconds in all, seconds a block at least, how sure is enough.

    precision: of every ratio to the first entry, as half its 95 % interval. patience: how many
    times `max_seconds` may pass before there are the six rounds that an interval takes.
    timer_share: of a block, that reading the clock may cost. ValueError for limits that are not
    positive, or a patience below 1.
    """

    max_seconds: float = 10.0
    min_blocks: int = 10
    max_blocks: int = 1000
    min_block_s: float = 0.01
    precision: float = 0.005
    patience: float = 1.0
    timer_share: float = TIMER_SHARE

    def __post_init__(self) -> None:
        for name in ("min_blocks", "max_blocks", "max_seconds", "min_block_s", "timer_share"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive.")
        if not self.patience >= 1:
            raise ValueError(f"patience is {self.patience}; it must be at least 1.")
        if self.max_blocks < self.min_blocks:
            raise ValueError(
                f"max_blocks ({self.max_blocks}) must be at least min_blocks ({self.min_blocks})."
            )


DEFAULT_BUDGET = Budget()


@dataclass(frozen=True)
class Samples:
    """Every block of one entry; nothing is dropped.

    `seconds[r]` is the time of one call in round r (block time over calls); `notes[r]` what the
    clock noticed in it. `stopped` names the rule that ended the run: ``precise``, ``time`` or
    ``blocks``. `warmup_s` was spent on this entry before the first round. All entries of
    one run carry the same `run` id and as many rounds, so that they pair up.
    """

    name: str
    seconds: tuple[float, ...]
    calls_per_block: int
    notes: tuple[Mapping[str, Note], ...]
    warmup_s: float
    stopped: str
    clock: str
    run: int

    @property
    def n(self) -> int:
        """Number of blocks."""
        return len(self.seconds)

    @property
    def median(self) -> float:
        """Median time of one call, in seconds."""
        return float(np.median(self.seconds))

    @property
    def q1(self) -> float:
        """First quartile, in seconds."""
        return float(np.quantile(self.seconds, 0.25))

    @property
    def q3(self) -> float:
        """Third quartile, in seconds."""
        return float(np.quantile(self.seconds, 0.75))

    @property
    def best(self) -> float:
        """Shortest block's time of one call, in seconds."""
        return min(self.seconds)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of one entry over time of another: below 1 the first is faster.

    `low` and `high` bound the interval of the given `confidence`; with fewer than six pairs it is
    the whole range, `confidence` says how little that promises, and the verdict is ``undecided``.
    """

    value: float
    low: float
    high: float
    pairs: int
    confidence: float

    @property
    def half_width(self) -> float:
        """Half the interval's width, relative to the value."""
        return (self.high - self.low) / (2 * self.value)

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``same`` (interval within 1 % of equal) or ``undecided``."""
        if self.confidence < CONFIDENCE:
            return "undecided"
        if self.low >= 1 / (1 + SAME_MARGIN) and self.high <= 1 + SAME_MARGIN:
            return "same"
        if self.high < 1:
            return "faster"
        return "slower" if self.low > 1 else "undecided"

    def inverse(self) -> Ratio:
        """Return the ratio the other way round: a speed-up instead of a share of time."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low, self.pairs, self.confidence)


def ratio(a: Samples, b: Samples, *, seed: int = 0) -> Ratio:
    """Return time(a) / time(b): the median over rounds, with a 95 % bootstrap interval.

    Ratios are averaged in the logarithm, so ``ratio(a, b)`` and ``ratio(b, a)`` are inverses.
    ValueError when `a` and `b` do not come from one run of `sample`: then nothing pairs them.
    """
    if a.run != b.run or a.n != b.n:
        raise ValueError(
            f"{a.name!r} ({a.n} blocks) and {b.name!r} ({b.n} blocks) come from different runs, so "
            "their blocks do not pair. Time both in one call of sample()."
        )
    return _log_ratio(np.log(a.seconds) - np.log(b.seconds), seed)


def _log_ratio(logs: np.ndarray, seed: int) -> Ratio:
    pairs = len(logs)
    value = math.exp(float(np.median(logs)))
    if pairs < FEWEST_PAIRS:
        confidence = 1 - 0.5 ** (pairs - 1)
        return Ratio(value, math.exp(logs.min()), math.exp(logs.max()), pairs, confidence)
    rng = np.random.default_rng(seed)
    medians = np.median(logs[rng.integers(0, pairs, (RESAMPLES, pairs))], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Ratio(value, math.exp(low), math.exp(high), pairs, CONFIDENCE)


class _Timed:
    """One entry during a run: its runner, its calls per block, what it has shown so far."""

    def __init__(self, entry: Entry, runner: BlockRunner) -> None:
        self.entry, self.runner = entry, runner
        self.calls = 1
        self.warmup_s = 0.0
        self.seconds: list[float] = []
        self.notes: list[Mapping[str, Note]] = []

    def block(self, first: int) -> Timing:
        timing = self.runner(first % self.entry.sets, self.calls)
        if timing.calls < 1 or not timing.seconds > 0:
            raise ValueError(
                f"the clock reported {timing.calls} calls in {timing.seconds} s for "
                f"{self.entry.name!r}; a block holds at least one call and takes time."
            )
        return timing

    def keep(self, timing: Timing) -> None:
        self.seconds.append(timing.seconds / timing.calls)
        self.notes.append(dict(timing.notes))


def _warm_up(one: _Timed, clock: Clock, first: int, block_s: float, limit_s: float) -> int:
    """Size the blocks and run until they settle (or `limit_s` passes); return calls made."""
    start, made = clock.now(), 0
    settled: list[tuple[float, float]] = []  # when each block of full length ended, time per call
    while True:
        timing = one.block(first + made)
        made += timing.calls
        per_call = timing.seconds / timing.calls
        one.warmup_s = clock.now() - start
        wanted = min(MAX_CALLS, max(1, math.ceil(block_s / per_call)))
        if timing.seconds < 0.5 * block_s and wanted > one.calls:
            one.calls = min(wanted, 16 * one.calls)
            settled.clear()
        else:
            settled.append((one.warmup_s, per_call))
        if _stable(settled) or one.warmup_s >= limit_s:
            one.calls = wanted
            return made


def _stable(blocks: Sequence[tuple[float, float]]) -> bool:
    """Whether the last tenth of a second was as fast as the one before, within 2 %.

    Looking at neighbouring blocks alone would miss a clock that settles over half a second.
    """
    if len(blocks) < 4 or blocks[-1][0] - blocks[0][0] < 2 * WARMUP_WINDOW_S:
        return False
    end = blocks[-1][0]
    late = [t for when, t in blocks if when > end - WARMUP_WINDOW_S]
    early = [t for when, t in blocks if end - 2 * WARMUP_WINDOW_S < when <= end - WARMUP_WINDOW_S]
    if not early:
        early = [t for when, t in blocks if when <= end - WARMUP_WINDOW_S][-1:]
    return abs(float(np.median(late) / np.median(early)) - 1) <= STABLE_WITHIN


def sample(
    entries: Sequence[Entry],
    clock: Clock,
    budget: Budget = DEFAULT_BUDGET,
    *,
    seed: int = 0,
    runners: Mapping[str, BlockRunner] | None = None,
) -> dict[str, Samples]:
    """Time all entries in one interleaved run and return their samples by name.

    Each is warmed up until its speed over a tenth of a second changes by less than 2 % (at most a
    fifth of `max_seconds` for all together); then rounds follow, each in a new random order drawn
    from `seed`. The run ends when there are `min_blocks` rounds and every ratio to the first
    entry is known within `precision` (half the 95 % interval; for a single entry its own
    median), or when `max_seconds` have passed (with fewer than six rounds when `patience` times as
    many have), or after `max_blocks` rounds. At least one round is completed whatever it takes. A
    block lasts `min_block_s`, or as long as makes the clock's overhead its `timer_share` if longer.

    Operand sets are walked in one sequence across all entries that have as many, so that none
    finds in the cache what another has just read. Nothing is checked about results: check them
    before timing. runners: of entries that the clock has prepared already, by name.
    ValueError for no entries or equal names.
    """
    names = [one.name for one in entries]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"entries are {names}; give at least one, each with its own name.")
    start = clock.now()
    rng = np.random.default_rng(seed)
    block_s = max(budget.min_block_s, clock.overhead_s / budget.timer_share)
    made = runners or {}
    timed = [_Timed(one, made.get(one.name) or clock.prepare(one)) for one in entries]
    # Those with fewer or more sets do not share them: their own sequence goes on where it was.
    position = dict.fromkeys((one.sets for one in entries), 0)
    for index in rng.permutation(len(timed)):
        limit = budget.max_seconds / (5 * len(timed))
        sets = entries[index].sets
        position[sets] += _warm_up(timed[index], clock, position[sets], block_s, limit)
    stopped = ""
    while not stopped:
        for index in rng.permutation(len(timed)):
            sets = entries[index].sets
            timing = timed[index].block(position[sets])
            timed[index].keep(timing)
            position[sets] += timing.calls
        stopped = _stop_rule(timed, budget, (clock.now() - start) / budget.max_seconds)
    run = int(rng.integers(1 << 62))
    return {
        one.entry.name: Samples(
            one.entry.name,
            tuple(one.seconds),
            one.calls,
            tuple(one.notes),
            one.warmup_s,
            stopped,
            clock.name,
            run,
        )
        for one in timed
    }


def _stop_rule(timed: Sequence[_Timed], budget: Budget, passed: float) -> str:
    """Return the name of the rule that ends the run now, or an empty string to go on.

    passed: the share of `max_seconds`.
    """
    rounds = len(timed[0].seconds)
    # The bootstrap is repeated only as the rounds grow by a tenth: it must not eat the time cap.
    enough = rounds >= max(budget.min_blocks, FEWEST_PAIRS)
    due = enough and (rounds - budget.min_blocks) % (rounds // 10 + 1) == 0
    if due and all(r.half_width < budget.precision for r in _open_ratios(timed)):
        return "precise"
    if passed >= (1.0 if rounds >= FEWEST_PAIRS else budget.patience):
        return "time"
    return "blocks" if rounds >= budget.max_blocks else ""


def _open_ratios(timed: Sequence[_Timed]) -> Iterator[Ratio]:
    logs = [np.log(one.seconds) for one in timed]
    if len(logs) == 1:
        yield _log_ratio(logs[0] - np.median(logs[0]), 0)
    for other in logs[1:]:
        yield _log_ratio(other - logs[0], 0)
