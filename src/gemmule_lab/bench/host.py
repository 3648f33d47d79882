"""One product measured beside its peers, over operand sets that rotate past the caches.

A `Bench` is a product through the public API on several sets of operands of one problem. What is
timed is the public call with a given ``out``, exactly as a user makes it; peers get the same
operands. Results are judged by the oracle before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.core.problem import Problem, numpy_dtype
from gemmule.timing.machine import Rotation, last_level_cache_bytes, rotation
from gemmule.timing.sampler import Budget, Contestant, HostClock
from gemmule_lab.bench.entries import Entry, race
from gemmule_lab.bench.lanes import Lane, Limits, Sets, Speeds, Target, lanes_of
from gemmule_lab.ceilings.cold import rotating_bytes
from gemmule_lab.ceilings.host import measure_ceilings
from gemmule_lab.peers.peer import Absence, Peer
from gemmule_lab.peers.registry import all_peers
from gemmule_lab.records.environment import capture_environment, cpu_name
from gemmule_lab.records.rows import Ceiling, Environment, Facts, Row
from gemmule_lab.verify import check

MOST_SETS = 1024
ASSUMED_CACHE_BYTES = 256 << 20
SHARING = 3  # contestants that share the seconds given to a product; more get more
SLOWEST_CALL_S = 0.25  # a peer that needs longer for one call is left out, and named


@dataclass(frozen=True, slots=True)
class Beside:
    """Another product of ours timed in the same run, so that the ratio to it is a paired one."""

    name: str
    op: str
    sets: Sets
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bench:
    """One product: the public function, its operand sets, and how cold they are.

    plain: the same products in a plain dtype, for peers named ``<peer> on <dtype>``: what a user
    without this format would do; `plain_peers` names those that do so (None: all). rungs: rungs to
    time by name; None is the automatic choice. options: of the public function.
    """

    group: str
    op: str
    sets: Sets
    temperature: str
    plain: Sets = ()
    rungs: Sequence[str | None] = (None,)
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: Sequence[Beside] = ()
    plain_peers: Sequence[str] | None = None

    @property
    def problem(self) -> Problem:
        """The canonical problem, as the automatic plan sees it."""
        return self.plan().problem

    def plan(self, rung: str | None = None) -> gm.Plan:
        """Return the plan of the first operand set, by the automatic choice or a named rung."""
        made: gm.Plan = gm.plan(self.op, *self.sets[0], rung=rung, **self.options)
        return made


def sets_needed(
    bytes_per_set: int, cold_bytes: int | None = None, memory_bytes: int | None = None
) -> Rotation:
    """Return how many operand sets make every read a cold one, at most `MOST_SETS`.

    cold_bytes: how many bytes have to pass between two uses of a set, as measured; None: twice the
    cache that the system reports. memory_bytes: the most that the sets may take.
    """
    if cold_bytes is None:
        cold_bytes = 2 * (last_level_cache_bytes() or ASSUMED_CACHE_BYTES)
    size = max(1, bytes_per_set)
    return rotation(size, cold_bytes, factor=1.0, memory_bytes=memory_bytes, most_sets=MOST_SETS)


def measured_environment(max_seconds: float) -> Environment:
    """Return this machine with its ceilings, measured now."""
    from gemmule.backends.cpu.threads import thread_count

    ceilings = measure_ceilings(max_seconds=max_seconds)
    return capture_environment(cpu_name(), "cpu", ceilings=ceilings, threads=thread_count())


def ceilings_again(max_seconds: float) -> dict[str, Ceiling]:
    """Return the ceilings as measured once more, where a row rises above them."""
    return measure_ceilings(max_seconds=max_seconds, seed=1)


def rates_hint() -> str | None:
    """Return the advice to measure this CPU's rates, or None where they are measured."""
    from gemmule.backends.cpu import launch

    if launch.machine().rates.measured:
        return None
    return (
        "choices are made by cautious default rates; gemmule tune --device-model measures this "
        "CPU's in two seconds"
    )


def judged(op: str, left: Any, right: Any, rung: str | None = None, **options: Any) -> float:
    """Multiply once, have every element judged, and return the largest error over its bound.

    ArithmeticError, with the oracle's words, for a wrong result.
    """
    out = getattr(gm, op)(left, right, rung=rung, **options)
    plan = gm.plan(op, left, right, rung=rung, **options)
    verdict = check.judge(op, left, right, out, check.Rounding.of(plan))
    if not verdict.ok:
        raise ArithmeticError(f"{op} {plan.problem.describe()}: {verdict.text}")
    return verdict.ratio


def run(
    bench: Bench,
    environment: Environment,
    *,
    max_seconds: float,
    peers: Sequence[Peer] | None = None,
    speeds: Speeds | None = None,
    seed: int = 0,
) -> tuple[list[Row], list[Absence]]:
    """Judge, then time, ours and the peers interleaved; return rows and who took no part.

    peers: candidates (default: all known); each is checked on small operands first. Raises
    ArithmeticError where a result of ours is wrong: then nothing is timed.
    """
    speeds = Speeds() if speeds is None else speeds
    problem = bench.problem
    entries = [_rung(bench, problem, rung) for rung in bench.rungs]
    entries += [_beside(one) for one in bench.beside]
    cold_bytes = rotating_bytes(environment.ceilings)
    limits = Limits(SLOWEST_CALL_S, lambda size, room: sets_needed(size, cold_bytes, room))
    lanes, absent = _peer_lanes(bench, problem, peers, speeds, limits, seed)
    for lane in lanes:
        temperature = bench.temperature if lane.cold else "warm"
        facts = Facts(problem, "peer", temperature, mode=lane.peer.mode(), group=bench.group)
        entries.append(Entry(lane.contestant, facts, shown=lane.problem == problem))
    # Threads that come to rest and settle between two contestants take most of a round.
    budget = Budget(max_seconds * max(1.0, len(entries) / SHARING))
    return race(entries, HostClock(), environment, budget, seed=seed), absent


def _rung(bench: Bench, problem: Problem, rung: str | None) -> Entry:
    """Return a rung, or the automatic choice, judged."""
    options = dict(bench.options) if rung is None else {**bench.options, "rung": rung}
    error = judged(bench.op, *bench.sets[0], **options)
    plan = bench.plan(rung)
    facts = Facts(problem, "rung", bench.temperature, plan.params, error, group=bench.group)
    return Entry(_ours(plan.rung.name, bench.op, bench.sets, plan, options), facts)


def _beside(one: Beside) -> Entry:
    """Return another product of ours, judged."""
    judged(one.op, *one.sets[0], **one.options)
    plan = gm.plan(one.op, *one.sets[0], **one.options)
    contestant = _ours(one.name, one.op, one.sets, plan, one.options)
    return Entry(contestant, Facts(plan.problem, "beside", "cold"), shown=False)


def _ours(name: str, op: str, sets: Sets, plan: gm.Plan, options: Mapping[str, Any]) -> Contestant:
    """Return the public call over every operand set, each with its own out."""
    calls = public_calls(op, sets, plan.problem.out, options)
    return Contestant(name, lambda i: calls[i](), len(calls))


def public_calls(
    op: str, sets: Sets, dtype: str, options: Mapping[str, Any]
) -> list[Callable[[], Any]]:
    """Return the public function over every operand set, each with an out of its own."""
    shape = check.result_shape(op, *sets[0])
    return [
        functools.partial(
            getattr(gm, op), *operands, out=np.empty(shape, numpy_dtype(dtype)), **options
        )
        for operands in sets
    ]


def _peer_lanes(
    bench: Bench,
    problem: Problem,
    peers: Sequence[Peer] | None,
    speeds: Speeds,
    limits: Limits,
    seed: int,
) -> tuple[list[Lane], list[Absence]]:
    """Prepare every peer that serves the problem, in its dtype and on plain operands."""
    right = getattr(gm, bench.op)(*bench.sets[0], **bench.options)
    target = Target(problem, bench.op, bench.sets, right)
    lanes, absent = lanes_of(target, peers, speeds, limits, seed)
    if bench.plain:
        plain = gm.plan(bench.op, *bench.plain[0]).problem
        target = Target(plain, bench.op, bench.plain, suffix=f" on {plain.a}")
        more, slow = lanes_of(target, _candidates(bench, peers), speeds, limits, seed, quiet=True)
        lanes, absent = lanes + more, absent + slow
    return lanes, absent


def _candidates(bench: Bench, peers: Sequence[Peer] | None) -> Sequence[Peer] | None:
    if bench.plain_peers is None:
        return peers
    known = all_peers("cpu") if peers is None else peers
    return [peer for peer in known if peer.name in bench.plain_peers]


def absences_in_words(absent: Iterable[Absence]) -> list[str]:
    """Return one line a reason: who took no part, and why."""
    by_reason: dict[str, dict[str, None]] = {}
    for one in absent:
        by_reason.setdefault(one.reason, {})[one.name] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
