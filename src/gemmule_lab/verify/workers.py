"""Trials in worker processes: bad outcomes come back at once, a dead worker is reported.

Each worker takes every n-th trial number. Workers are started afresh (spawn), so a crash of one
loses nothing but itself, and the number it was at is known.
"""

from __future__ import annotations

import math
import multiprocessing
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gemmule_lab.verify.random_products import Choice, Outcome, Trial, draw, run

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
        for part in _parts(choice, seed, range(cases), seconds):
            total.add(part)
            progress(total.done)
        return total
    context = multiprocessing.get_context("spawn")
    channel: Any = context.Queue()
    places = [context.Value("q", -1) for _ in range(workers)]
    processes = [
        context.Process(
            target=_work,
            args=(choice, seed, range(i, cases, workers), seconds, channel, places[i]),
            daemon=True,
        )
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        _gather(processes, places, channel, total, progress)
        for process in processes:
            process.join(ENDS_S)
            if process.exitcode not in (None, 0) and not total.deaths:
                total.deaths.append(f"a worker died at its end (exit code {process.exitcode})")
    finally:
        for process in processes:
            process.terminate()
    return total


def _parts(choice: Choice, seed: int, numbers: range, seconds: float, place: Any = None) -> Any:
    """Yield a tally about every half second."""
    part, since = Tally(), time.monotonic()
    end = since + seconds
    for number in numbers:
        if time.monotonic() > end:
            break
        if place is not None:
            place.value = number
        trial = draw(choice, seed, number)
        part.count(number, trial, run(trial))
        if time.monotonic() - since > REPORT_EVERY_S:
            yield part
            part, since = Tally(), time.monotonic()
    yield part


def _work(
    choice: Choice, seed: int, numbers: range, seconds: float, channel: Any, place: Any
) -> None:
    """Run a worker's trials and send their tallies; None at the end."""
    import threadpoolctl

    with threadpoolctl.threadpool_limits(1, "blas"):  # the truth's BLAS would fight the others'
        for part in _parts(choice, seed, numbers, seconds, place):
            channel.put(part)
    channel.put(None)


def _gather(
    processes: list[Any],
    places: list[Any],
    channel: Any,
    total: Tally,
    progress: Callable[[int], None],
) -> None:
    finished = 0
    dead: set[int] = set()
    while finished + len(dead) < len(processes):
        try:
            part = channel.get(timeout=1.0)
        except queue.Empty:
            for index, process in enumerate(processes):
                if process.exitcode not in (None, 0) and index not in dead:
                    dead.add(index)
                    total.deaths.append(
                        f"a worker died (exit code {process.exitcode}) in trial "
                        f"{places[index].value}"
                    )
            continue
        if part is None:
            finished += 1
        else:
            total.add(part)
            progress(total.done)
