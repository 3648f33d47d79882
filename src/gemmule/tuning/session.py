"""One problem on one device made ready for timing: rotating operands, verified candidates.

`Session.admit` compiles, launches and verifies a configuration and runs its first blocks; whatever
goes wrong comes back as a typed outcome. `Session.race` times those admitted, interleaved.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

from gemmule import backends
from gemmule.choose import choose
from gemmule.core.canonical import Call
from gemmule.core.choice import Choice
from gemmule.core.problem import Problem
from gemmule.core.rung import Machine
from gemmule.errors import CompileError, DeviceError
from gemmule.timing.clock import BlockRunner, Entry
from gemmule.timing.machine import rotation
from gemmule.timing.sampler import Budget, Samples, sample
from gemmule.tuning.operands import Place, canonical_call, nbytes, put_all, random_operands
from gemmule.tuning.outcomes import Candidate, CompileFailed, Failure, LaunchFailed, Skipped, Wrong
from gemmule.tuning.trials import (
    AnyRun,
    Exact,
    Placed,
    Sampled,
    exact,
    prepared,
    sampled,
    scalars_of,
)

MOST_SETS = 4096
SLOW = 5.0  # times the baseline's first blocks: such a candidate is not timed any further
ATTEMPTS, REST_S = 4, 2e-3
LONGEST_PASS_S = 0.25  # for what a rung keeps of a matrix, of all copies of it
SLOWEST_UNTRIED_S = 2e-3  # a shorter call is timed whatever it seems: most of it may be overhead


class Session:
    """One problem's operands on one device; not for use from several threads."""

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        place: Place,
        seed: int = 0,
        most_sets: int = MOST_SETS,
    ) -> None:
        self.problem, self.machine, self.place, self.seed = problem, machine, place, seed
        self.backend = backends.get(machine.backend)
        host = random_operands(problem, seed)
        self.turn = rotation(
            nbytes(host), place.caches, factor=1.0, memory_bytes=place.spare_bytes()
        )
        self.call: Call = canonical_call(problem, host)
        self._scalars = scalars_of(problem)
        self.sampled: Sampled = sampled(problem, host, seed)
        self._renew_exact()
        count = min(self.turn.sets, most_sets)
        self.cold = self.turn.cold and count == self.turn.sets
        self._out = host.out
        self.sets = list(zip(*(place.copies(part, count) for part in host.parts()), strict=True))
        # One call of the baseline, once it is admitted: on the smaller problem, at full size, and
        # on the clock.
        self._small_s = self._whole_s = self._first_s = math.inf
        self._ready: dict[str, tuple[BlockRunner, float]] = {}  # and seconds a call at first
        self._met: set[str] = set()  # rungs that have met every copy of a quantised matrix
        self.lost = ""  # what ended the device's context, so that nothing can run any more

    def _renew_exact(self) -> None:
        """Make the smaller problem, anew where a candidate has changed its inputs."""
        self.exact: Exact = exact(self.problem, self.seed)
        self._exact_operands = put_all(self.place, self.exact.host, copy=False)

    def default(self, rung: str | None = None, params: Any = None) -> Choice:
        """Return what a plan chooses for this problem now (or the named rung)."""
        return choose(self.call, self.machine, rung, params)

    def choice(self, candidate: Candidate, call: Call | None = None) -> Choice:
        """Return a candidate as a plan's choice."""
        call = self.call if call is None else call
        which = candidate.rung, candidate.params, self.machine
        return Choice(call, call.problem, *which, "tuning", candidate.expected_s)

    def admit(self, candidate: Candidate, choice: Choice | None = None) -> Entry | Failure:
        """Compile, launch and verify a configuration, and time its first blocks.

        An entry's `about` is its candidate. choice: how the plan runs it, where that converts
        operands first.
        """
        full = self.choice(candidate) if choice is None else choice
        try:
            small = self.exact.choice(full)
            if small is None:
                return Skipped(candidate, "its parameters do not fit the size it is verified at")
            run = prepared(small, self.backend)
            whole = run if small.call is full.call else prepared(full, self.backend)
        except CompileError as error:
            return CompileFailed(candidate, _first_line(error))
        except DeviceError as error:
            return self._failed(candidate, error)
        except Exception as error:  # of a compiler's own kind: the configuration's fault
            return CompileFailed(candidate, _first_line(error))
        try:
            return self._verified(candidate, small, run, full, whole)
        except Exception as error:  # whatever a launch raises is this configuration's failure
            return self._failed(candidate, error)

    def compile_quietly(self, candidate: Candidate) -> None:
        """Compile a candidate for both sizes; an error is met again when it is admitted."""
        full = self.choice(candidate)
        small = self.exact.choice(full)
        with contextlib.suppress(Exception):
            prepared(full, self.backend)
            if small is not None:
                prepared(small, self.backend)

    def _failed(self, candidate: Candidate, error: Exception) -> Failure:
        if isinstance(error, DeviceError) and error.restart:
            self.lost = f"{candidate.name} lost the device: {_first_line(error)}"
        return LaunchFailed(candidate, _first_line(error))

    def _verified(
        self, candidate: Candidate, small: Choice, run: AnyRun, full: Choice, whole: AnyRun
    ) -> Entry | Failure:
        self.exact.compute(self.place, self._exact_operands, run)
        verdict = self.exact.judge(small)
        if not verdict.ok:
            if verdict.kind == "side effect":
                self._renew_exact()
            return Wrong(candidate, verdict.text)
        small_s = self._call_s(run, self._exact_operands, self._small_s)
        if self._hopeless(small_s, self._small_s):
            return Skipped(candidate, _slow_words(small_s, self._small_s, "on a smaller problem"))
        out = self.sets[0][-1]
        self.place.send(self._out, out)  # the poison: elements that stay unwritten are NaN
        whole(*self.sets[0], *self._scalars)
        self.place.wait()
        self.place.fetch(out, self._out)
        complaint = self.sampled.complaint(full, self._out.array)
        self._out.buffer[:] = self._out.pattern
        if complaint:
            return Wrong(candidate, complaint)
        whole_s = self._call_s(whole, self.sets[0], self._whole_s)
        if self._hopeless(whole_s, self._whole_s):
            return Skipped(candidate, _slow_words(whole_s, self._whole_s, "in its first call"))
        found = self._first_blocks(candidate, whole)
        if isinstance(found, Entry) and math.isinf(self._first_s):  # the baseline is the first
            self._small_s, self._whole_s = small_s, whole_s
            _, self._first_s = self._ready[found.name]
        return found

    def _call_s(self, run: AnyRun, operands: Placed, baseline_s: float) -> float:
        """Return the time of one call, the best of a few where it seems hopeless at first.

        The first calls after another program, or another pool of threads, has run may take many
        milliseconds longer than all later ones.
        """
        best = math.inf
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(REST_S)
            start = self.place.wall()
            run(*operands, *self._scalars)
            self.place.wait()
            best = min(best, self.place.wall() - start)
            if not self._hopeless(best, baseline_s):
                break
        return best

    def _hopeless(self, seconds: float, baseline_s: float) -> bool:
        """Tell from one call, host overhead included, whether timing it would waste the budget."""
        return seconds > max(2 * SLOW * baseline_s, SLOWEST_UNTRIED_S)

    def _first_blocks(self, candidate: Candidate, run: AnyRun) -> Entry | Failure:
        sets, scalars = self.sets, self._scalars
        self._meet_all(candidate, run)
        entry = Entry(candidate.name, lambda i: run(*sets[i], *scalars), len(sets), candidate)
        runner = self.place.clock.prepare(entry)
        first_s, made = math.inf, 0
        for attempt in range(ATTEMPTS):
            block = runner(made % len(sets), 1)
            first_s, made = min(first_s, block.seconds / block.calls), made + block.calls
            if attempt and not self._too_slow(first_s):
                break
        if self._too_slow(first_s):
            return Skipped(candidate, _slow_words(first_s, self._first_s, "in its first blocks"))
        self._ready[entry.name] = runner, first_s
        return entry

    def _meet_all(self, candidate: Candidate, run: AnyRun) -> None:
        """Multiply by every copy of a quantised matrix once, before any is timed.

        What a rung keeps of a matrix is made in its first product, which costs as much as several:
        of thousands of small copies half the timed products would be the first.
        """
        name = f"{candidate.rung.folder}/{candidate.rung.name}"
        if self.problem.quant is None or name in self._met:
            return
        self._met.add(name)
        end = self.place.wall() + LONGEST_PASS_S
        for operands in self.sets[1:]:
            if self.place.wall() > end:
                break
            run(*operands, *self._scalars)
        self.place.wait()

    def _too_slow(self, seconds: float) -> bool:
        return seconds > SLOW * self._first_s

    def race(
        self,
        entries: Sequence[Entry],
        max_seconds: float,
        *,
        min_blocks: int,
        precision: float,
        seed: int,
    ) -> dict[str, Samples]:
        """Time admitted entries interleaved; samples by candidate name."""
        runners = {one.name: self._ready[one.name][0] for one in entries}
        slowest = max(self._ready[one.name][1] for one in entries)
        budget = Budget(
            min_blocks=min_blocks,
            max_blocks=400,
            max_seconds=max_seconds,
            min_block_s=min(1e-2, max(1e-3, slowest)),
            precision=precision,
        )
        return sample(entries, self.place.clock, budget, seed=seed, runners=runners)


def _slow_words(seconds: float, baseline_s: float, where: str) -> str:
    return f"{seconds * 1e6:,.0f} us {where}, {seconds / baseline_s:,.0f} times the default's"


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:400]
