"""Peers made ready to be timed: each on as many sets of operands as make its own reads cold ones.

A peer that packs weights into memory of its own converts them once and copies what that gave; the
sets of all peers together are bounded by the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gemmule.core.memory import available_bytes
from gemmule.core.problem import Problem
from gemmule.timing.machine import Rotation
from gemmule.timing.sampler import Contestant
from gemmule_lab.peers.peer import Absence, Peer, Prepared
from gemmule_lab.peers.registry import select

Operands: TypeAlias = tuple[Any, Any]
Sets: TypeAlias = Sequence[Operands]

LEAST_TELLING_FLOPS = 100_000  # below, a call's fixed cost is most of its time
MEMORY_SHARE = 1 / 3  # of what is available once our own sets are made
BYTES_TO_PREPARE = 2  # a set of a peer that packs: what it keeps, and what making it left behind
FURTHEST = 0.03  # from our own result, of its norm: rounded activations stay within a third of it


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


@dataclass(frozen=True, slots=True)
class Limits:
    """How slow a peer may be, and how many sets of so many bytes fit into so much memory."""

    slowest_s: float
    turn: Callable[[int, int], Rotation]


@dataclass(frozen=True, slots=True)
class Target:
    """What peers are to compute: a problem, the public operation, its operands.

    right: the judged result on the first set; None where the peers multiply other numbers. suffix:
    of the names of peers that do.
    """

    problem: Problem
    op: str
    sets: Sets
    right: Any = None
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Lane:
    """A peer ready to be timed. problem: what it computes, None if that is not what we compute.

    cold: whether its sets are so many that it reads from memory.
    """

    peer: Peer
    problem: Problem | None
    prepared: list[Prepared]
    contestant: Contestant
    cold: bool = True


def canonical(op: str, left: Any, right: Any) -> Operands:
    """Return A and x or B as peers take them: ``x A`` is ``A^T x``."""
    return (right.T, left) if op == "vecmat" else (left, right)


def lanes_of(
    target: Target,
    peers: Sequence[Peer] | None,
    speeds: Speeds,
    limits: Limits,
    seed: int,
    *,
    quiet: bool = False,
) -> tuple[list[Lane], list[Absence]]:
    """Prepare every peer that serves the problem; quiet: do not name those that do not serve it."""
    present, missing = select(target.problem, seed=seed, peers=peers)
    absent = [] if quiet else list(missing)
    packing = sum(peer.copies is not None for peer in present)
    room = int(available_bytes() * MEMORY_SHARE) // max(1, packing) // BYTES_TO_PREPARE
    lanes = []
    for peer in present:
        lane = _lane(peer, target, speeds, limits, room)
        if isinstance(lane, Absence):
            absent.append(lane)
        else:
            lanes.append(lane)
    return lanes, absent


def _lane(peer: Peer, target: Target, speeds: Speeds, limits: Limits, room: int) -> Lane | Absence:
    name, problem = peer.name + target.suffix, target.problem
    expected = speeds.expected_s(peer.name, problem)
    if expected > limits.slowest_s:
        return Absence(
            name, f"at least {expected:.1f} s a call expected, too slow to be timed here"
        )
    sets, cold, make = list(target.sets), True, peer.copies
    if make is None:
        made = (peer.prepare(problem, *canonical(target.op, *one)) for one in sets)
        count = len(sets)
    else:
        turn = limits.turn(peer.own_bytes(problem), room)
        factory = make(problem, *canonical(target.op, *sets[0]))
        count, cold = turn.sets, turn.cold
        made = (factory() for _ in range(count))
    first = next(made)
    first.call()
    start = time.perf_counter()
    first.call()
    seconds = time.perf_counter() - start
    speeds.learn(peer.name, problem, seconds)
    if seconds > limits.slowest_s:
        return Absence(name, f"{seconds:.1f} s a call, too slow to be timed here")
    if target.right is not None and peer.stand_in is None and not _agrees(first, target.right):
        return Absence(name, "its result on the operands to be timed is not A B")
    prepared = [first, *made]
    calls: list[Callable[[], Any]] = [one.call for one in prepared]
    # A peer's call may hold bare pointers into what its Prepared owns, so that has to live as long.
    contestant = Contestant(name, lambda i: calls[i](), count)
    return Lane(peer, None if peer.stand_in else problem, prepared, contestant, cold)


def _agrees(prepared: Prepared, right: Any) -> bool:
    """Tell whether a result is near ours: the exact check was made on small operands."""
    wanted = np.asarray(right).astype(np.float64)
    found = np.asarray(prepared.result()).astype(np.float64)
    if found.shape != wanted.shape:
        return False
    distance = float(np.linalg.norm(found - wanted))
    return distance <= FURTHEST * float(np.linalg.norm(wanted)) + 1e-30
