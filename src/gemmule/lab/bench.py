"""One product measured beside its peers, over operand sets that rotate past the caches.

A `Bench` is a product through the public API on several sets of operands of one problem. What is
timed is the public call with a given ``out``, exactly as a user makes it; peers get the same
operands. Results are judged by the oracle before anything is timed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import gemmule as gm
from gemmule.clocks import Rotation, last_level_cache_bytes, rotation
from gemmule.lab import check
from gemmule.lab.ceilings import enforce, measure_ceilings
from gemmule.lab.environment import capture_environment, cpu_name
from gemmule.lab.peers import Absence, Peer, Prepared, all_peers, select
from gemmule.lab.records import Environment, Row, make_row, speedup_of
from gemmule.measure import Contestant, HostClock, ratio, sample
from gemmule.problem import Problem, numpy_dtype

Array: TypeAlias = NDArray[Any]
Operands: TypeAlias = tuple[Any, Any]
Sets: TypeAlias = Sequence[Operands]

MOST_SETS = 1024
ASSUMED_CACHE_BYTES = 256 << 20
LEAST_TELLING_FLOPS = 100_000  # below, a call's fixed cost is most of its time
SLOWEST_CALL_S = 0.5  # a peer that needs longer for one call is left out, and named


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
        return gm.plan(self.op, *self.sets[0], rung=rung, **self.options)


@dataclass(slots=True)
class Speeds:
    """Most operations per second seen of a peer, by operation and dtype.

    From them follows what a larger product will take at least: the best rate, since small products
    and a busy machine only ever show lower ones.
    """

    seen: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def expected_s(self, peer: str, problem: Problem) -> float:
        """Return the seconds one call is expected to take; 0 for a peer not seen yet."""
        rate = self.seen.get((peer, problem.op, problem.a))
        return 0.0 if rate is None else problem.flops / rate

    def learn(self, peer: str, problem: Problem, seconds: float) -> None:
        """Take note of a timed call; one of a tiny product says nothing of larger ones."""
        if problem.flops < LEAST_TELLING_FLOPS:
            return
        key = (peer, problem.op, problem.a)
        rate = problem.flops / max(seconds, 1e-9)
        self.seen[key] = max(rate, self.seen.get(key, rate))


def sets_needed(bytes_per_set: int) -> Rotation:
    """Return how many operand sets make every read a cold one, at most `MOST_SETS`."""
    cache = last_level_cache_bytes() or ASSUMED_CACHE_BYTES
    wanted = rotation(max(1, bytes_per_set), cache)
    sets = min(wanted.sets, MOST_SETS)
    return Rotation(sets, sets * bytes_per_set, wanted.cold and sets == wanted.sets)


def measured_environment(max_seconds: float) -> Environment:
    """Return this machine with its ceilings, measured now."""
    from gemmule.backends.jit import thread_count

    ceilings = measure_ceilings(max_seconds=max_seconds)
    return capture_environment(cpu_name(), "cpu", ceilings=ceilings, threads=thread_count())


def canonical(op: str, left: Any, right: Any) -> Operands:
    """Return A and x or B as peers take them: ``x A`` is ``A^T x``."""
    return (right.T, left) if op == "vecmat" else (left, right)


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
    errors = {
        rung: judged(bench.op, *bench.sets[0], rung=rung, **bench.options) for rung in bench.rungs
    }
    plans = {rung: bench.plan(rung) for rung in bench.rungs}
    ours = {
        rung: _ours(plan.rung.name, bench.op, bench.sets, plan, {**bench.options, **_named(rung)})
        for rung, plan in plans.items()
    }
    besides = [_beside(one) for one in bench.beside]
    lanes, absent = _peer_lanes(bench, problem, peers, speeds, seed)
    contestants = [*ours.values(), *besides, *(lane.contestant for lane in lanes)]
    samples = sample(contestants, HostClock(), max_seconds=max_seconds, seed=seed)
    rows = []
    for rung, contestant in ours.items():
        mine = samples[contestant.name]
        others = [*besides, *(lane.contestant for lane in lanes)]
        speedups = {one.name: speedup_of(ratio(mine, samples[one.name])) for one in others}
        rows.append(
            make_row(
                environment, problem, mine, kind="rung", temperature=bench.temperature,
                params=plans[rung].params, speedups=speedups, error_ratio=errors[rung],
                group=bench.group,
            )
        )  # fmt: skip
    for lane in lanes:
        if lane.problem == problem:  # those on float32 stand in the ratios alone
            rows.append(
                make_row(
                    environment, problem, samples[lane.contestant.name], kind="peer",
                    temperature=bench.temperature, mode=lane.peer.mode(), group=bench.group,
                )
            )  # fmt: skip
    return rows, absent


@dataclass(frozen=True, slots=True)
class _Lane:
    peer: Peer
    problem: Problem
    prepared: list[Prepared]
    contestant: Contestant


def _named(rung: str | None) -> dict[str, str]:
    return {} if rung is None else {"rung": rung}


def _beside(one: Beside) -> Contestant:
    """Return another product of ours, judged."""
    judged(one.op, *one.sets[0], **one.options)
    plan = gm.plan(one.op, *one.sets[0], **one.options)
    return _ours(one.name, one.op, one.sets, plan, one.options)


def _ours(name: str, op: str, sets: Sets, plan: gm.Plan, options: Mapping[str, Any]) -> Contestant:
    """Return the public call over every operand set, each with its own out."""
    shape = check.result_shape(op, *sets[0])
    outs = [np.empty(shape, numpy_dtype(plan.problem.out)) for _ in sets]
    calls = [
        functools.partial(getattr(gm, op), left, right, out=out, **options)
        for (left, right), out in zip(sets, outs, strict=True)
    ]
    return Contestant(name, lambda i: calls[i](), len(calls))


def _peer_lanes(
    bench: Bench, problem: Problem, peers: Sequence[Peer] | None, speeds: Speeds, seed: int
) -> tuple[list[_Lane], list[Absence]]:
    """Prepare every peer that serves the problem, in its dtype and on plain operands."""
    wanted = [(problem, bench.sets, "")]
    if bench.plain:
        plain = gm.plan(bench.op, *bench.plain[0]).problem
        wanted.append((plain, bench.plain, f" on {plain.a}"))
    lanes: list[_Lane] = []
    absent: list[Absence] = []
    for target, sets, suffix in wanted:
        present, missing = select(target, seed=seed, peers=_candidates(bench, peers, suffix))
        absent += missing if not suffix else ()
        for peer in present:
            lane = _lane(peer, target, bench.op, sets, suffix, speeds)
            if isinstance(lane, Absence):
                absent.append(lane)
            else:
                lanes.append(lane)
    return lanes, absent


def _candidates(bench: Bench, peers: Sequence[Peer] | None, suffix: str) -> Sequence[Peer] | None:
    if not suffix or bench.plain_peers is None:
        return peers
    known = all_peers("cpu") if peers is None else peers
    return [peer for peer in known if peer.name in bench.plain_peers]


def _lane(
    peer: Peer, problem: Problem, op: str, sets: Sequence[Operands], suffix: str, speeds: Speeds
) -> _Lane | Absence:
    name = peer.name + suffix
    expected = speeds.expected_s(peer.name, problem)
    if expected > SLOWEST_CALL_S:
        return Absence(
            name, f"at least {expected:.1f} s a call expected, too slow to be timed here"
        )
    prepared = [peer.prepare(problem, *canonical(op, left, right)) for left, right in sets]
    prepared[0].call()
    start = time.perf_counter()
    prepared[-1].call()
    seconds = time.perf_counter() - start
    speeds.learn(peer.name, problem, seconds)
    if seconds > SLOWEST_CALL_S:
        return Absence(name, f"{seconds:.1f} s a call, too slow to be timed here")
    calls: list[Callable[[], Any]] = [one.call for one in prepared]
    # A peer's call may hold bare pointers into what its Prepared owns, so that has to live as long.
    return _Lane(peer, problem, prepared, Contestant(name, lambda i: calls[i](), len(calls)))


def absences_in_words(absent: Iterable[Absence]) -> list[str]:
    """Return one line a reason: who took no part, and why."""
    by_reason: dict[str, dict[str, None]] = {}
    for one in absent:
        by_reason.setdefault(one.reason, {})[one.name] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def settled(
    rows: Sequence[Row], environment: Environment, max_seconds: float
) -> tuple[list[Row], Environment]:
    """Hold all rows against the read ceiling; where one rises above it, measure that again."""
    checked, ceilings = enforce(
        rows, environment.ceilings, "cpu", lambda: measure_ceilings(max_seconds=max_seconds, seed=1)
    )
    final = replace(environment, ceilings=ceilings)
    return [replace(row, environment=final.id) for row in checked], final
