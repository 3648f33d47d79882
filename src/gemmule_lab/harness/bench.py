"""One harness for all that the lab times: from a product to benchmark entries to their race.

Everything is measured in the same steps, on a CPU (`gemmule_lab.harness.host.HostBench`) as on a
GPU (`gemmule_lab.harness.device.DeviceBench`):

1. a `Product` is the case, as data; ``bench.sets(product)`` makes its operand sets, as many as it
   takes for every call to read from memory;
2. ``bench.ours(sets, rung)`` and ``bench.theirs(sets, peers)`` make benchmark entries over them
   (`gemmule.timing.clock.Entry`), every result judged and every peer checked before it is timed;
   what is known of an entry beforehand, its `about`, are the `Facts` of its row;
3. `race` times entries on ``bench.clock`` in one run, block by block in random order, and returns
   rows with medians, quartiles and paired ratios. Who wants no rows takes the entries to
   `gemmule.timing.sampler.sample` instead, and pairs its samples by `ratio`; who has a clock of
   its own for each call, `in_turns`.

``bench.attempt(product, environment)`` is all three for one product of a suite.
"""

from __future__ import annotations

import functools
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import gemmule as gm
from gemmule.core.problem import Problem
from gemmule.timing.clock import Clock, Entry, HostClock, entry_over
from gemmule.timing.sampler import Budget, ratio, sample
from gemmule_lab.ceilings.best import enforce
from gemmule_lab.harness.neighbours import Neighbours, flags_beside
from gemmule_lab.harness.operands import Sets
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.peer import Absence, Peer, check
from gemmule_lab.peers.registry import select
from gemmule_lab.records.rows import Ceiling, Environment, Facts, Row, make_row, speedup_of

Found: TypeAlias = tuple[list[Row], list[Absence]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is timed in one run, beside the peers of a bench: a product and what belongs to it.

    rungs: those of ours, by name; None is the automatic choice. plain: the same products in a plain
    dtype, for peers named ``<peer> on <dtype>``: what a user without this format would do;
    `plain_peers` names those that do so (None: all). beside: other products of ours by name, so
    that the ratio to them is a paired one.
    """

    group: str
    sets: Sets
    rungs: Sequence[str | None] = (None,)
    plain: Sets | None = None
    plain_peers: Sequence[str] | None = None
    beside: Mapping[str, Sets] = field(default_factory=dict)


class Bench(ABC):
    """One device under the clock, and the peers that take part there. prefix: of file names."""

    backend: ClassVar[str]
    prefix: ClassVar[str] = ""
    brief: ClassVar[Budget | None] = None  # of a first look at each of many, where that pays
    clock: Clock
    peers: Sequence[Peer] = ()

    @abstractmethod
    def environment(self, max_seconds: float) -> Environment:
        """Return the machine with its ceilings, measured now."""

    @abstractmethod
    def ceilings_again(self, max_seconds: float) -> Mapping[str, Ceiling]:
        """Return the ceilings as measured once more, where a row rises above them."""

    @abstractmethod
    def sets(self, product: Product, *, seed: int = 0, warm: bool = False) -> Sets:
        """Return a product's operand sets: one when warm, else as many as make reads cold ones.

        Where the memory has no room for so many, they are not called cold.
        """

    @abstractmethod
    def judged(self, sets: Sets, plan: gm.Plan) -> float | None:
        """Multiply the first set and return the largest error over its bound.

        ArithmeticError, with the judge's words, for a wrong result.
        """

    @abstractmethod
    def calls(self, sets: Sets, plan: gm.Plan) -> list[Callable[[], object]]:
        """Return our call on each operand set, as this device's clock times it."""

    @abstractmethod
    def budget(self, entries: int) -> Budget:
        """Return what a run of so many entries may take."""

    def proof(self, plan: gm.Plan) -> str | None:
        """Return the digest of what proved a plan's rung, where rows name it."""
        return None

    def checked(self, peer: Peer, problem: Problem) -> str | None:
        """Return why a peer may not be timed on a problem, or None where it is right."""
        return check(peer, problem)

    def prepared(self, product: Product) -> Measurement:
        """Return what a suite times of a product."""
        return Measurement(product.title, self.sets(product))

    def attempt(self, product: Product, environment: Environment) -> Callable[..., Found]:
        """Make a product of a suite ready; return its measurement, which may be made again.

        It takes another budget than the bench's by name.
        """
        return functools.partial(self.measure, self.prepared(product), environment)

    def measure(
        self,
        what: Measurement,
        environment: Environment,
        *,
        seed: int = 0,
        budget: Budget | None = None,
    ) -> Found:
        """Judge ours, check the peers, race them all; return rows and who took no part.

        budget: of the race, where it is not the bench's for so many entries.
        ArithmeticError where a result of ours is wrong: then nothing is timed.
        """
        group = what.group
        entries = [self.ours(what.sets, rung, group=group) for rung in what.rungs]
        problem = entries[0].about.problem
        entries = [replace(one, about=replace(one.about, problem=problem)) for one in entries]
        for name, sets in what.beside.items():
            entries.append(self.ours(sets, name=name, kind="beside", shown=False))
        theirs, absent = self.theirs(what.sets, self.peers, group=group)
        if what.plain is not None:
            named = what.plain_peers
            kept = [peer for peer in self.peers if named is None or peer.name in named]
            suffix = f" on {what.plain.plan().problem.a}"
            more, slow = self.theirs(what.plain, kept, group=group, suffix=suffix)
            theirs, absent = theirs + more, absent + slow
        entries += theirs
        given = budget or self.budget(len(entries))
        return race(entries, self.clock, environment, given, seed=seed), absent

    def ours(
        self,
        sets: Sets,
        rung: str | None = None,
        params: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        **facts: Any,
    ) -> Entry:
        """Return a rung of ours, or the automatic choice, judged: named after the rung, or `name`.

        facts: more of the entry's `Facts`. ArithmeticError for a wrong result; ValueError and
        TypeError, as planning raises them, where the rung does not serve the problem.
        """
        plan = sets.plan(rung, params)
        case = plan.problem, facts.pop("kind", "rung"), sets.temperature, plan.params
        found = self.judged(sets, plan), self.proof(plan)
        about = Facts(*case, *found, named=rung is not None, **facts)
        return entry_over(name or plan.rung.name, self.calls(sets, plan), about, keep=sets)

    def theirs(
        self, sets: Sets, peers: Sequence[Peer], *, group: str = "", suffix: str = ""
    ) -> tuple[list[Entry], list[Absence]]:
        """Return the peers that serve a product, checked first, and who takes no part.

        suffix: of the names of peers that multiply other numbers than ours; they have no rows, and
        those that do not serve them are not named.
        """
        problem = sets.plan().problem
        present, missing = select(problem, self.backend, peers=peers, checked=self.checked)
        entries, absent = [], [] if suffix else list(missing)
        for made in self.peer_entries(sets, problem, present, suffix):
            if isinstance(made, Absence):
                absent.append(made)
            else:
                entries.append(replace(made, about=replace(made.about, group=group)))
        return entries, absent

    def peer_entries(
        self, sets: Sets, problem: Problem, peers: Sequence[Peer], suffix: str
    ) -> list[Entry | Absence]:
        """Return each peer over the operand sets, or why it takes no part after all."""
        return [
            peer_entry(
                peer,
                [peer.prepare(problem, *one.canonical(sets.op)) for one in sets.items],
                peer_facts(peer, problem, sets.temperature, suffix),
                suffix,
            )
            for peer in peers
        ]


def peer_facts(peer: Peer, problem: Problem, temperature: str, suffix: str = "") -> Facts:
    """Return what is known of a peer beforehand; one that multiplies other numbers has no row."""
    shown = not suffix and peer.stand_in is None
    return Facts(problem, "peer", temperature, mode=peer.mode(), shown=shown)


def peer_entry(peer: Peer, prepared: Sequence[Any], about: Facts | None, suffix: str = "") -> Entry:
    """Return a peer over what it was prepared on, which its calls may hold bare pointers into."""
    return entry_over(peer.name + suffix, [one.call for one in prepared], about, keep=prepared)


def race(
    entries: Sequence[Entry],
    clock: Clock,
    environment: Environment,
    budget: Budget,
    *,
    seed: int = 0,
) -> list[Row]:
    """Time entries whose `about` are `Facts` in one run; return a row for each that is shown."""
    neighbours = Neighbours()
    samples = sample(entries, clock, budget, seed=seed)
    # A GPU's clock is its own.
    share = neighbours.share() if isinstance(clock, HostClock) else None
    others = tuple(one.name for one in entries if one.about.kind != "rung")
    rows = []
    for one in entries:
        facts: Facts = one.about
        if not facts.shown:
            continue
        over = others if facts.against is None else facts.against
        speedups = {
            name: speedup_of(ratio(samples[one.name], samples[name]))
            for name in (over if facts.kind == "rung" else ())
        }
        row = make_row(environment, facts, samples[one.name], speedups)
        rows.append(replace(row, flags=flags_beside(share, row.flags)))
    return rows


def settled(
    rows: Sequence[Row], environment: Environment, measure: Callable[[], Mapping[str, Ceiling]]
) -> tuple[list[Row], Environment]:
    """Hold all rows against the read ceiling; where one rises above it, measure that again."""
    checked, ceilings = enforce(rows, environment.ceilings, environment.backend, measure)
    final = replace(environment, ceilings=ceilings)
    return [replace(row, environment=final.id) for row in checked], final


def in_turns(
    clocks: Mapping[str, Callable[[], T]],
    rounds: int,
    seed: int | None = None,
    seconds: float = math.inf,
) -> dict[str, list[T]]:
    """Return what each clock reads once a round, the rounds in random orders.

    seconds: after which no further round begins.

    >>> in_turns({"a": lambda: 1.0, "b": lambda: 2.0}, 3)
    {'a': [1.0, 1.0, 1.0], 'b': [2.0, 2.0, 2.0]}
    >>> in_turns({"a": lambda: 1.0}, 3, seconds=0)  # one round at least
    {'a': [1.0]}
    """
    order, end = random.Random(seed), time.monotonic() + seconds  # noqa: S311  no secret
    found: dict[str, list[T]] = {name: [] for name in clocks}
    for turn in range(rounds):
        if turn and time.monotonic() >= end:
            break
        for name in order.sample([*clocks], len(clocks)):
            found[name].append(clocks[name]())
    return found
