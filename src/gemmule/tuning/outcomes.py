"""What a tuning run tries and finds: candidates, typed outcomes, the report.

A configuration that cannot be compiled, launched or trusted is an outcome like any other, kept in
the report with its reason; it never ends the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from gemmule.core.problem import Problem
from gemmule.core.rung import Machine, Rung
from gemmule.timing.sampler import Ratio


@dataclass(frozen=True)
class Candidate:
    """One configuration: a rung and a full set of its declared parameters.

    expected_s: what the rung's heuristic expects of its suggested parameters, None where it makes
    no suggestion. proved: whether automatic plans may use it on this machine.
    """

    rung: Rung
    params: Mapping[str, Any]
    expected_s: float | None = None
    proved: bool = True

    @property
    def name(self) -> str:
        """Folder, rung and parameters: ``matvec/threads(block=4)``."""
        params = ", ".join(f"{key}={value}" for key, value in self.params.items())
        return f"{self.rung.folder}/{self.rung.name}({params})"


@dataclass(frozen=True, slots=True)
class Measured:
    """A right result, and its time: `ratio` is candidate over baseline, below 1 where faster.

    seconds: median time of one call in the last round that the candidate took part in.
    """

    candidate: Candidate
    seconds: float
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class Failure:
    """A candidate that took no part in the timing; `text` says why."""

    candidate: Candidate
    text: str


class CompileFailed(Failure):
    """Its kernels do not compile; the text begins with the compiler's first words."""


class LaunchFailed(Failure):
    """It compiled, and then raised, was refused by the driver, or took its process down."""


class Wrong(Failure):
    """The oracle found a wrong element, a changed input, or bytes written beside the result."""


class Timeout(Failure):
    """It did not finish in time, and its process was ended."""


class Skipped(Failure):
    """Nothing is wrong with it: the model or a first timing rules it out, or time ran out."""


Outcome: TypeAlias = Measured | Failure
FAILURES = (CompileFailed, LaunchFailed, Wrong, Timeout)


@dataclass(frozen=True)
class TuneReport:
    """What a tuning run did.

    default: what a plan would use without this run. winner: the default, unless a candidate beat it
    by more than the noise; None where nothing ran right. gain: time of the default over that of the
    fastest challenger in their last duel, with its interval; None where there was no duel. cold:
    whether every timed call found its operands out of cache. path: the stored entry, None where
    nothing was stored. stopped: why the run ended early, or ``""``. disturbed: share of the duel's
    blocks in which other programs took a processor away; above a half nothing is stored.
    fastest_unproved: of the configurations without a proof, which are never chosen.
    """

    problem: Problem
    machine: Machine
    default: Candidate
    winner: Candidate | None
    default_s: float | None = None
    winner_s: float | None = None
    gain: Ratio | None = None
    cold: bool = True
    outcomes: tuple[Outcome, ...] = ()
    seconds: float = 0.0
    path: Path | None = None
    stopped: str = ""
    disturbed: float = 0.0
    fastest_unproved: Measured | None = field(default=None)

    @property
    def changed(self) -> bool:
        """Whether the winner is another configuration than the default."""
        return self.winner is not None and not same(self.winner, self.default)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The outcomes that are failures (candidates merely skipped are none)."""
        return tuple(o for o in self.outcomes if isinstance(o, FAILURES))

    def counts(self) -> Counter[str]:
        """Return how many outcomes there are of each type, by its name."""
        return Counter(type(outcome).__name__ for outcome in self.outcomes)


def same(one: Candidate, other: Candidate) -> bool:
    """Tell whether two candidates are the same configuration."""
    return one.rung is other.rung and dict(one.params) == dict(other.params)
