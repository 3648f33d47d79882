"""Choose by measuring: verify every candidate, time them cold and interleaved, keep the winner.

The default stays unless a candidate beats it by more than the noise in a duel of its own: by 2 %,
with a 95 % interval that excludes a tie. What wins is stored (`gemmule.storage.tuned`), and later
plans of the same problem on the same device use it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemmule import backends
from gemmule.choose import choose
from gemmule.core.caches import forget_plans
from gemmule.core.choice import Choice
from gemmule.core.problem import Problem
from gemmule.errors import DeviceError
from gemmule.settings import tuning_enabled
from gemmule.storage import tuned as tuned_store
from gemmule.storage.lines import today
from gemmule.timing.clock import Entry
from gemmule.timing.sampler import CONFIDENCE, Ratio, Samples, ratio
from gemmule.tuning.isolated import CHILD_TIMEOUT_S, measure_apart
from gemmule.tuning.operands import Place, place_of
from gemmule.tuning.outcomes import Candidate, Failure, Measured, Outcome, Skipped, TuneReport, same
from gemmule.tuning.session import Session
from gemmule.tuning.space import candidates

__all__ = ["Request", "TuneReport", "tune_problem", "tuned_choice"]

log = logging.getLogger("gemmule")

Progress = Callable[[str, int, int], None]

LEAST_GAIN = 0.02  # blocks of one kernel against itself agree this well on a busy machine
ADMISSION_SHARE = 0.5  # of the time: verifying; of the rest, half goes to the heats
HEAT_BLOCKS, DUEL_BLOCKS = 3, 20
LONGEST_HEAT_S, LONGEST_DUEL_S = 2.0, 5.0
MOST_DISTURBED = 0.5  # share of a duel's blocks; above, what won may have won by chance of the day
MOST_UNPROVED = 16
CHUNK = 16


def _silent(stage: str, done: int, total: int) -> None:
    return None


def tuned_choice(
    choice: Choice, rung: str | None, device: str, max_seconds: float
) -> Choice | None:
    """Return the fastest right configuration of a choice's problem, None where it is that already.

    rung: the one that the user named, if any; then only its parameters are tried, and nothing is
    stored. None also with ``GEMMULE_TUNE=0``, and for an empty product. ValueError for a time that
    is not positive.
    """
    call, machine = choice.call, choice.machine
    problem = call.problem.alone() if call.problem.batch_invariant else call.problem
    if not tuning_enabled() or is_empty(problem):
        return None
    report = tune_problem(problem, Request(device, max_seconds, rung=rung))
    winner = report.winner
    own = Candidate(choice.rung, dict(choice.params))
    if winner is None or report.winner_s is None or same(winner, own):
        return None
    times = math.prod(call.outer) * (call.problem.batch if call.problem.batch_invariant else 1)
    return replace(
        choose(call, machine, winner.rung.name, tuple(winner.params.items())),
        reason=f"tuned on this device, {today()}",
        expected_s=report.winner_s * times,
        runner_up=report.default.name,
    )


def is_empty(problem: Problem) -> bool:
    """Tell whether a problem has no element to compute or to read."""
    return 0 in (problem.m, problem.n, problem.k, problem.batch)


@dataclass(frozen=True, slots=True)
class Request:
    """How a problem is to be tuned.

    max_seconds: about how long it may take; operands are made before that. include_unproved: also
    measure rungs without a proof, each in a process of its own and after the others, in as much
    time again; they are reported, never chosen. rung: try only this rung's parameters and store
    nothing. root: store into this folder instead of the cache.

    ValueError for a time that is not positive.
    """

    device: str = "cpu"
    max_seconds: float = 30.0
    include_unproved: bool = False
    rung: str | None = None
    root: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.max_seconds > 0:
            raise ValueError(f"max_seconds is {self.max_seconds}; it must be positive.")


DEFAULT_REQUEST = Request()


def tune_problem(
    problem: Problem,
    request: Request = DEFAULT_REQUEST,
    *,
    progress: Progress = _silent,
    place: Place | None = None,
) -> TuneReport:
    """Tune one problem on a device and store the winner, if it is not the default.

    place: where operands lie and what times them (by default the device's memory and clock).

    Raises ValueError for an empty problem, DeviceError where the device is absent or has no room;
    what a candidate does wrong is an outcome in the report.

    >>> from gemmule.tuning.tuner import Request, tune_problem
    >>> report = tune_problem(Problem("matvec", 64, 64), Request(max_seconds=0.5, rung="threads"))
    >>> report.winner is not None and report.path is None
    True
    """
    if is_empty(problem):
        raise ValueError(f"{problem.describe()} is empty: there is nothing to tune.")
    machine = backends.get("cpu" if request.device == "cpu" else "cuda").machine(request.device)
    place = place_of(request.device, machine.cache_bytes) if place is None else place
    return _Run(Session(problem, machine, place, request.seed), request, progress).report()


class _Run:
    """One tuning run: admission, heats, duel, and what is kept of it."""

    def __init__(self, session: Session, request: Request, progress: Progress) -> None:
        self.session, self.request, self.progress = session, request, progress
        self.now = session.place.clock.now
        self.start = self.now()
        self.outcomes: list[Outcome] = []
        self.stopped = ""
        self.disturbed = 0.0

    def report(self) -> TuneReport:
        """Run it all and return the report."""
        session, request = self.session, self.request
        chosen = session.default(request.rung)
        default = Candidate(chosen.rung, chosen.params, chosen.expected_s)
        only = chosen.rung if request.rung is not None else None
        tried, skipped = candidates(
            session.problem,
            session.machine,
            default,
            include_unproved=request.include_unproved,
            only=only,
            seed=request.seed,
        )
        entries = self._admitted(default, chosen, [one for one in tried if one.proved])
        best, best_s, gain, default_s = self._contest(default, entries)
        apart = self._apart([one for one in tried if not one.proved])
        self.outcomes += skipped
        report = TuneReport(
            session.problem,
            session.machine,
            default,
            best,
            default_s,
            best_s,
            gain,
            session.cold,
            tuple(self.outcomes),
            self.now() - self.start,
            None,
            self.stopped or session.lost,
            self.disturbed,
            apart,
        )
        return replace(report, path=self._store(report))

    def _left(self) -> float:
        return self.start + self.request.max_seconds - self.now()

    def _admitted(
        self, default: Candidate, chosen: Choice, others: Sequence[Candidate]
    ) -> list[Entry]:
        """Verify the default, then the others while there is time; keep why others were not."""
        entries: list[Entry] = []
        until = self._left() * (1 - ADMISSION_SHARE)
        for index, candidate in enumerate([default, *others]):
            self.progress("verifying", index, 1 + len(others))
            if index and self.session.lost:
                self.outcomes.append(Skipped(candidate, "the device was lost before its turn"))
                continue
            if index and self._left() < until:
                self.outcomes.append(Skipped(candidate, "no time was left to verify it"))
                continue
            if index % CHUNK == 1:
                self._compile_ahead(others[index - 1 : index - 1 + CHUNK])
            found = self.session.admit(candidate, chosen if index == 0 else None)
            if isinstance(found, Failure):
                self.outcomes.append(found)
            else:
                entries.append(found)
        return entries

    def _compile_ahead(self, some: Sequence[Candidate]) -> None:
        """Compile GPU kernels side by side; what fails here fails again, and is kept, on its turn.

        CPU kernels are compiled under one lock anyhow.
        """
        if self.session.machine.backend != "cuda":
            return
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(self.session.compile_quietly, some))

    def _contest(
        self, default: Candidate, entries: list[Entry]
    ) -> tuple[Candidate | None, float | None, Ratio | None, float | None]:
        """Return the winner, its time, its gain in the duel, and the default's time."""
        if not entries or self.session.lost:
            return None, None, None, None
        baseline, challengers = entries[0], entries[1:]
        if not same(baseline.about, default):
            log.warning("the default %s failed; the tuning goes on without it", default.name)
        try:
            challenger = self._heats(baseline, challengers)
            return self._duel(default, baseline, challenger)
        except DeviceError as error:  # in a launch that was right before: no figure can be trusted
            self.stopped = f"the timing failed: {error}"
            return None, None, None, None

    def _heats(self, baseline: Entry, challengers: list[Entry]) -> Entry | None:
        """Time all, keep the faster half, and so on until one challenger is left."""
        total = rounds = math.ceil(math.log2(max(len(challengers), 1)))
        slice_s = min(LONGEST_HEAT_S, self._left() / 2 / max(rounds, 1))
        while len(challengers) > 1:
            self.progress("timing", total - rounds, total + 1)
            found = self.session.race(
                [baseline, *challengers],
                max(slice_s, 1e-3),
                min_blocks=HEAT_BLOCKS,
                precision=0.01,
                seed=self.request.seed + rounds,
            )
            base = found[baseline.name]
            ranked = sorted(
                ((ratio(found[e.name], base), i) for i, e in enumerate(challengers)),
                key=lambda item: item[0].value,
            )
            kept = math.ceil(len(challengers) / 2)
            for one, index in ranked[kept:]:
                entry = challengers[index]
                seconds = found[entry.name].median
                self.outcomes.append(Measured(entry.about, seconds, one))
            challengers = [challengers[index] for _, index in ranked[:kept]]
            rounds -= 1
        return challengers[0] if challengers else None

    def _duel(
        self, default: Candidate, baseline: Entry, challenger: Entry | None
    ) -> tuple[Candidate, float, Ratio | None, float | None]:
        """Time the two left on fresh samples, which no earlier luck has picked."""
        both = [baseline] if challenger is None else [baseline, challenger]
        limit = min(LONGEST_DUEL_S, max(self._left(), self.request.max_seconds / 10))
        found = self.session.race(
            both, limit, min_blocks=DUEL_BLOCKS, precision=0.002, seed=self.request.seed + 1000
        )
        base = found[baseline.name]
        default_s = base.median if same(baseline.about, default) else None
        if challenger is None:
            return baseline.about, base.median, None, default_s
        other = found[challenger.name]
        share = ratio(other, base)
        self.disturbed = disturbed(base, other)
        self.outcomes.append(Measured(challenger.about, other.median, share))
        won = decisive(share)
        return (
            challenger.about if won else baseline.about,
            other.median if won else base.median,
            share.inverse(),
            default_s,
        )

    def _apart(self, unproved: Sequence[Candidate]) -> Measured | None:
        """Measure unproved candidates in processes of their own; return the fastest."""
        device, seed = self.request.device, self.request.seed
        end = self.now() + self.request.max_seconds
        fastest: Measured | None = None
        for index, candidate in enumerate(unproved):
            self.progress("unproved", index, len(unproved))
            if index >= MOST_UNPROVED or self.now() > end or self.session.lost:
                self.outcomes.append(Skipped(candidate, "no time was left to try it"))
                continue
            found = measure_apart(
                self.session.problem, device, candidate, seed, timeout_s=CHILD_TIMEOUT_S
            )
            self.outcomes.append(found)
            if isinstance(found, Measured) and (
                fastest is None or found.ratio.value < fastest.ratio.value
            ):
                fastest = found
        return fastest

    def _store(self, report: TuneReport) -> Path | None:
        """Store a new winner and make later plans see it; None where nothing was to be stored."""
        if not report.changed or report.winner is None or report.winner_s is None:
            return None
        if self.request.rung is not None:
            return None
        if report.disturbed > MOST_DISTURBED:
            log.warning(
                "other programs took a processor away in %.0f %% of the blocks; the result is used "
                "now, but not stored. Tune again on a quiet machine.",
                100 * report.disturbed,
            )
            return None
        tuned = tuned_store.Tuned(
            report.winner.rung, report.winner.params, report.winner_s, today()
        )
        path = tuned_store.save(report.machine, report.problem, tuned, self.request.root)
        if path is None:
            log.warning("the tuning result cannot be stored: is the cache folder writable?")
        forget_plans()
        return path


def decisive(share: Ratio) -> bool:
    """Tell whether a candidate that takes this share of the default's time beats it.

    >>> decisive(Ratio(0.95, 0.94, 0.96, 20, 0.95)), decisive(Ratio(0.95, 0.9, 1.01, 20, 0.95))
    (True, False)
    """
    return share.confidence >= CONFIDENCE and share.high < 1 and share.value <= 1 - LEAST_GAIN


def disturbed(*both: Samples) -> float:
    """Return the share of blocks in which the system took a processor away from the process."""
    notes = [note for samples in both for note in samples.notes]
    return sum(int(note.get("preempted", 0)) > 0 for note in notes) / len(notes)


def settle_apart(
    problem: Problem, device: str, candidate: Candidate, seed: int, max_seconds: float
) -> Measured | Failure:
    """Verify one candidate and time it against the default: what a child process does."""
    machine = backends.get("cpu" if device == "cpu" else "cuda").machine(device)
    session = Session(problem, machine, place_of(device, machine.cache_bytes), seed)
    chosen = session.default()
    default = Candidate(chosen.rung, chosen.params, chosen.expected_s)
    entries: list[Any] = []
    for one, choice in ((default, chosen), (candidate, None)):
        found = session.admit(one, choice)
        if isinstance(found, Failure):
            return found if one is candidate else Skipped(candidate, f"default: {found.text}")
        entries.append(found)
    samples = session.race(entries, max_seconds, min_blocks=DUEL_BLOCKS, precision=0.005, seed=seed)
    mine = samples[candidate.name]
    return Measured(candidate, mine.median, ratio(mine, samples[default.name]))
