"""Trials in worker processes: bad outcomes come back at once, a dead worker is reported.

Each worker takes every n-th problem with all its trials. Workers are started afresh (spawn), so a
crash of one loses nothing but itself, and the number it was at is known.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from gemmule_lab.verify.random_products import DRAWS, Choice, Outcome, Trial, draw, run

REPORT_EVERY_S = 0.5
ENDS_S = 10.0  # a worker that has no trial left
MOST_SHOWN = 20


@dataclass
class Tally:
    """What happened so far. `bad`: number, trial and outcome of the first bad ones."""

    done: int = 0
    wrong: int = 0
    raised: int = 0
    refused: int = 0
    worst_ratio: float = 0.0
    rungs: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, Trial, Outcome]] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every trial was right, and not every one refused."""
        all_refused = self.done > 0 and self.refused == self.done
        return not (self.wrong or self.raised or self.deaths or all_refused)

    def add(self, other: Tally) -> None:
        """Add another tally to this one, keeping the first bad trials."""
        self.done += other.done
        self.wrong += other.wrong
        self.raised += other.raised
        self.refused += other.refused
        self.worst_ratio = max(self.worst_ratio, other.worst_ratio)
        self.rungs.update(other.rungs)
        self.bad.extend(other.bad[: MOST_SHOWN - len(self.bad)])

    def count(self, number: int, trial: Trial, outcome: Outcome) -> None:
        """Count one outcome."""
        self.done += 1
        self.rungs[outcome.rung] += 1
        if outcome.status == "ok":
            self.worst_ratio = max(self.worst_ratio, outcome.ratio)
            return
        if outcome.status == "refused":
            self.refused += 1
            return
        self.wrong += outcome.status == "wrong"
        self.raised += outcome.status == "raised"
        if len(self.bad) < MOST_SHOWN:
            self.bad.append((number, trial, outcome))


def run_trials(
    choice: Choice,
    cases: int,
    seed: int,
    workers: int,
    progress: Callable[[int], None] = lambda done: None,
    seconds: float = math.inf,
) -> Tally:
    """Run trials 0..cases-1 of `seed` in `workers` processes; 1 runs them in this one.

    progress: called with the number of trials done, about twice a second; seconds: no process
    begins a trial later than so long after its first.
    """
    choice.rungs()  # an unknown name is told before processes start
    total = Tally()
    if workers == 1:
        for part in _parts(choice, seed, range(0, cases, DRAWS), cases, seconds):
            total.add(part)
            progress(total.done)
        return total
    context = multiprocessing.get_context("spawn")
    running: dict[Any, tuple[Any, Any]] = {}  # where a worker's tallies come from: it, its place
    for first in range(workers):
        receives, sends = context.Pipe(duplex=False)
        place = context.Value("q", -1)
        starts = range(first * DRAWS, cases, workers * DRAWS)
        process = context.Process(
            target=_work, args=(choice, seed, starts, cases, seconds, sends, place), daemon=True
        )
        process.start()
        sends.close()  # so that the end of the worker's own is the end of the pipe
        running[receives] = process, place
    processes = [process for process, _ in running.values()]
    try:
        while running:
            for channel in connection.wait(list(running)):
                _receive(channel, running, total)
                progress(total.done)
    finally:
        for process in processes:
            process.terminate()
    return total


def _receive(channel: Any, running: dict[Any, tuple[Any, Any]], total: Tally) -> None:
    """Add a worker's tally, or what became of it where there comes none."""
    try:
        total.add(channel.recv())
    except EOFError:
        process, place = running.pop(channel)
        process.join(ENDS_S)
        if process.exitcode not in (None, 0):
            code = f"a worker died (exit code {process.exitcode})"
            total.deaths.append(f"{code} in trial {place.value}")


def _parts(
    choice: Choice, seed: int, starts: range, cases: int, seconds: float, place: Any = None
) -> Any:
    """Yield a tally about every half second. starts: the first trials of the problems."""
    part, since = Tally(), time.monotonic()
    end = since + seconds
    planned: dict[Trial, Any] = {}
    for number in (n for start in starts for n in range(start, min(start + DRAWS, cases))):
        if time.monotonic() > end:
            break
        if place is not None:
            place.value = number
        trial = draw(choice, seed, number)
        part.count(number, trial, run(trial, planned))
        if time.monotonic() - since > REPORT_EVERY_S:
            yield part
            part, since = Tally(), time.monotonic()
    yield part


def _work(
    choice: Choice, seed: int, starts: range, cases: int, seconds: float, channel: Any, place: Any
) -> None:
    """Run a worker's trials and send their tallies."""
    import threadpoolctl

    with threadpoolctl.threadpool_limits(1, "blas"):  # the truth's BLAS would fight the others'
        for part in _parts(choice, seed, starts, cases, seconds, place):
            channel.send(part)
