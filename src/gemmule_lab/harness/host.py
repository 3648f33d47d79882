"""Products on this machine's processors: the public call with a given ``out``, as users make it.

Peers get the same operands; one that packs weights into memory of its own converts them once and
copies what that gave. Results are judged by the oracle before anything is timed.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.core.memory import available_bytes
from gemmule.core.problem import HALVES, Problem, numpy_dtype
from gemmule.core.registry import ladder
from gemmule.timing.clock import Clock, Entry, HostClock
from gemmule.timing.machine import Rotation, last_level_cache_bytes, rotation
from gemmule.timing.sampler import Budget
from gemmule_lab.ceilings.cold import rotating_bytes
from gemmule_lab.ceilings.host import measure_ceilings
from gemmule_lab.harness.bench import Bench, Measurement, peer_entry, peer_facts
from gemmule_lab.harness.operands import OperandSet, Sets, codes, drawn, host_sets, in_format
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.peer import Absence, Peer, Prepared
from gemmule_lab.peers.registry import all_peers
from gemmule_lab.records.environment import capture_environment, cpu_name
from gemmule_lab.records.rows import Ceiling, Environment, Row
from gemmule_lab.verify import check

MOST_SETS = 1024
ASSUMED_CACHE_BYTES = 256 << 20
WARMING_S = 1.0  # at most, for the first calls of all operand sets
PATIENCE = 4  # times the seconds of a product, where six rounds take longer
SHARING = 3  # entries that share the seconds given to a product; more get more
SLOWEST_CALL_S = 0.25  # a peer that needs longer for one call is left out, and named
LEAST_TELLING_FLOPS = 100_000  # below, a call's fixed cost is most of its time
OPERANDS_SHARE = 1 / 4  # of the memory available: most that a product's operand sets take
PEERS_SHARE = 1 / 3  # of what is available once our own sets are made
BYTES_TO_PREPARE = 2  # a set of a peer that packs: what it keeps, and what making it left behind
FURTHEST = 0.03  # from our own result, of its norm: rounded activations stay within a third of it
TOO_SLOW = "too slow to be timed here"
ONE_COLUMN = "gemmule on one column"


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


def rates_hint() -> str | None:
    """Return the advice to measure this CPU's rates, or None where they are measured."""
    from gemmule.backends.cpu import launch

    if launch.machine().rates.measured:
        return None
    return (
        "choices are made by cautious default rates; gemmule tune --device-model measures this "
        "CPU's in five seconds"
    )


def warm(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call once, so that none that is timed is the first product of its matrix.

    What a quantised matrix's first product works out for all later ones takes ten times as long as
    a small product, and with hundreds of matrices a run would time little else. Calls beyond the
    first second's are so slow that it does not show.
    """
    end = time.perf_counter() + WARMING_S
    for call in calls:
        call()
        if time.perf_counter() > end:
            return


def judged(op: str, left: Any, right: Any, rung: str | None = None, **options: Any) -> float:
    """Multiply once, have every element judged, and return the largest error over its bound.

    ArithmeticError, with the oracle's words, for a wrong result.
    """
    out = getattr(gm, op)(left, right, rung=rung, **options)
    return _error(op, left, right, out, gm.plan(op, left, right, rung=rung, **options))


def _error(
    op: str, left: Any, right: Any, out: Any, plan: gm.Plan, known: check.Truths | None = None
) -> float:
    verdict = check.judge(op, left, right, out, check.Rounding.of(plan), known)
    if not verdict.ok:
        raise ArithmeticError(f"{op} {plan.problem.describe()}: {verdict.text}")
    return verdict.ratio


@dataclass(eq=False)
class HostBench(Bench):
    """The CPU's bench; a matrix that the next product shares is kept for it.

    seconds: for one product. every_rung: time all rungs that take a product. cold_bytes: how many
    bytes have to pass between two uses of a set, as measured; None takes it from the cache that the
    system reports. slowest_s: a peer whose call takes longer is left out. beside_float32: halves
    stand beside NumPy's float32 too. rests: threads come to rest between two entries. warm: over
    one set of operands. Let go of a product before asking for the next, or both lie in memory at
    once.
    """

    backend = "cpu"
    seconds: float = 2.0
    _: KW_ONLY
    every_rung: bool = False
    peers: Sequence[Peer] = field(default_factory=lambda: all_peers("cpu"))
    cold_bytes: int | None = None
    slowest_s: float = SLOWEST_CALL_S
    beside_float32: bool = False
    rests: InitVar[bool] = True
    warm: bool = False

    def __post_init__(self, rests: bool) -> None:
        self.clock: Clock = HostClock() if rests else HostClock(longest_rest_s=0.0, settled_s=0.0)
        # Most operations per second seen of a peer, by operation and dtype: what a larger product
        # takes at least, since small products and a busy machine only ever show lower rates.
        self._rates: dict[tuple[str, str, str], float] = {}
        self._kept: dict[str, tuple[Any, list[Any]]] = {}  # by purpose: what they are for, and they

    def environment(self, max_seconds: float) -> Environment:
        """Return this machine with its ceilings, measured now; operand sets rotate by them."""
        from gemmule.backends.cpu.threads import thread_count

        ceilings = measure_ceilings(max_seconds=max_seconds)
        self.cold_bytes = rotating_bytes(ceilings)
        return capture_environment(cpu_name(), "cpu", ceilings=ceilings, threads=thread_count())

    def ceilings_again(self, max_seconds: float) -> Mapping[str, Ceiling]:
        """Return the ceilings as measured once more, where a row rises above them."""
        return measure_ceilings(max_seconds=max_seconds, seed=1)

    def budget(self, entries: int) -> Budget:
        """Return what a run may take: threads that come to rest and settle take most of a round.

        On two cores half a second an entry: then few rounds fit, and an interval is waited for.
        """
        return Budget(self.seconds * max(1.0, entries / SHARING), patience=PATIENCE)

    def judged(self, sets: Sets, plan: gm.Plan) -> float | None:
        """Multiply the first set as `calls` does and have every element judged."""
        operands = sets.items[0].operands(sets.op)
        if plan.options.params:
            return _error(sets.op, *operands, plan(*operands), plan, sets.truths)
        out = getattr(gm, sets.op)(*operands, **_options(sets, plan))
        return _error(sets.op, *operands, out, plan, sets.truths)

    def calls(self, sets: Sets, plan: gm.Plan) -> list[Callable[[], object]]:
        """Return the public call on each set, or the plan's own where parameters were named."""
        function, options = getattr(gm, sets.op), _options(sets, plan)
        if plan.options.params:
            function, options = plan, {}
        calls: list[Callable[[], object]] = [
            functools.partial(function, *one.operands(sets.op), out=one.out, **options)
            for one in sets.items
        ]
        if plan.problem.quant is not None:
            warm(calls)
        return calls

    # --- operands -------------------------------------------------------------------------------

    def sets(self, product: Product, *, seed: int = 0, warm: bool = False) -> Sets:
        """Return a product's operand sets, at most a quarter of the memory available."""
        self._forget(product, seed)
        rng = np.random.default_rng(seed + 1)
        other = drawn(product.other_shape, rng, product.form.integer, product.uniform)
        room = int(available_bytes() * OPERANDS_SHARE)
        matrices, cold = self._copies(
            "matrices", lambda: self._matrix(product, seed), room, 1 if warm else None
        )
        return host_sets(product, matrices, [other], cold=cold)

    def prepared(self, product: Product) -> Measurement:
        """Return the product with its operand sets, and what belongs beside it in its format."""
        sets, form = self.sets(product, warm=self.warm), product.form
        plain: Sets | None = None
        wide = form.wide or ("float32" if self.beside_float32 and form.dtype in HALVES else None)
        if wide is not None:
            taken = sum(int(one.a.nbytes) for one in sets.items)
            room = max(0, int(available_bytes() * OPERANDS_SHARE) - taken)
            dtype, order = numpy_dtype(wide), product.order
            floats, _ = self._copies(
                "plain",
                lambda: self._values(product, 0).astype(dtype, order, copy=False),
                room,
                1 if self.warm else None,
            )
            others, out = sets.items[0].b.astype(dtype), np.empty(product.out_shape, dtype)
            items = [OperandSet(matrix, others.copy(), out.copy()) for matrix in floats]
            plain = Sets(product.op, items, sets.cold)
        beside = {}
        if form.bits is not None and product.op == "matmul":
            items = [OperandSet(o.a, o.b[:, 0].copy(), o.out[:, 0].copy()) for o in sets.items]
            beside[ONE_COLUMN] = Sets("matvec", items, sets.cold, sets.options)
        rungs: Sequence[str | None] = (None,)
        if self.every_rung:
            problem = sets.plan().problem
            folder = "quantized" if problem.quant is not None else product.op
            takers = (r.name for r in ladder(folder, "cpu") if r.refusal(problem) is None)
            rungs = tuple(dict.fromkeys(takers))
        return Measurement(product.title, sets, rungs, plain, ("numpy",), beside)

    def _forget(self, product: Product, seed: int) -> None:
        """Let go of what this product has no use for, before anything is made for it."""
        form = product.form
        for purpose, key in {
            "values": (product.shape, form.integer, product.uniform, seed),
            "plain": (product.shape, form.wide or form.dtype, product.column_major, seed),
            "matrices": (
                (product.shape, form.dtype, form.bits, form.group_size),
                (product.column_major, product.uniform, seed),
            ),
        }.items():
            if purpose not in self._kept or self._kept[purpose][0] != key:
                self._kept[purpose] = key, []

    def _values(self, product: Product, seed: int) -> Any:
        """Return the matrix as drawn: normal float32, or small integers."""
        _, kept = self._kept["values"]
        if not kept:
            rng = np.random.default_rng(seed)
            kept.append(drawn(product.shape, rng, product.form.integer, product.uniform))
        return kept[0]

    def _matrix(self, product: Product, seed: int) -> Any:
        form = product.form
        if form.bits is not None and form.group_size is None:
            return codes(np.random.default_rng(seed), product.shape, form.bits)
        values = self._values(product, seed)
        return in_format(values, product.format, product.order)

    def _copies(
        self, purpose: str, make: Callable[[], Any], room: int, most: int | None = None
    ) -> tuple[list[Any], bool]:
        """Return copies of a matrix, as many as it takes to read them cold, and whether it does."""
        _, kept = self._kept[purpose]
        if not kept:
            kept.append(make())
        turn = sets_needed(int(kept[0].nbytes), self.cold_bytes, room)
        count = turn.sets if most is None else min(most, turn.sets)
        del kept[count:]
        kept += [deepcopy(kept[0]) for _ in range(count - len(kept))]
        return list(kept), turn.cold and count == turn.sets

    # --- peers ----------------------------------------------------------------------------------

    def peer_entries(
        self, sets: Sets, problem: Problem, peers: Sequence[Peer], suffix: str
    ) -> list[Entry | Absence]:
        """Return each peer over operand sets; one that is too slow, or wrong on them, is absent.

        The sets of all peers that pack are bounded by the memory together.
        """
        first = sets.items[0].operands(sets.op)
        right = None if suffix else getattr(gm, sets.op)(*first, **sets.options)
        packing = sum(peer.copies is not None for peer in peers)
        room = int(available_bytes() * PEERS_SHARE) // max(1, packing) // BYTES_TO_PREPARE
        return [self._peer(peer, sets, problem, suffix, right, room) for peer in peers]

    def _peer(
        self, peer: Peer, sets: Sets, problem: Problem, suffix: str, right: Any, room: int
    ) -> Entry | Absence:
        name, key = peer.name + suffix, (peer.name, problem.op, problem.a)
        expected = problem.flops / self._rates.get(key, math.inf)
        if expected > self.slowest_s:
            return Absence(name, TOO_SLOW, more=f"at least {expected:.1f} s a call expected")
        made, cold = self._made(peer, sets, problem, room)
        first = next(made)
        first.call()
        start = time.perf_counter()
        first.call()
        seconds = time.perf_counter() - start
        if problem.flops >= LEAST_TELLING_FLOPS:
            rate = problem.flops / max(seconds, 1e-9)
            self._rates[key] = max(rate, self._rates.get(key, rate))
        if seconds > self.slowest_s:
            return Absence(name, TOO_SLOW, more=f"{seconds:.1f} s a call")
        if right is not None and peer.stand_in is None and not _agrees(first, right):
            return Absence(name, "its result on the operands to be timed is not A B")
        facts = peer_facts(peer, problem, "cold" if cold else "warm", suffix)
        ready = [first, *made]
        if peer.copies is not None:  # it may keep something of each, as ours do
            warm(one.call for one in ready)
        return peer_entry(peer, ready, facts, suffix)

    def _made(
        self, peer: Peer, sets: Sets, problem: Problem, room: int
    ) -> tuple[Iterator[Prepared], bool]:
        """Return a peer on each of our sets, or on as many of its own; and whether it is cold."""
        if peer.copies is None:
            return (peer.prepare(problem, *one.canonical(sets.op)) for one in sets.items), sets.cold
        turn = sets_needed(peer.own_bytes(problem), self.cold_bytes, room)
        factory = peer.copies(problem, *sets.items[0].canonical(sets.op))
        return (factory() for _ in range(turn.sets)), turn.cold and sets.cold


def _options(sets: Sets, plan: gm.Plan) -> dict[str, Any]:
    """Return the public function's options: those of the sets, and a rung that was named."""
    named = {} if plan.options.rung is None else {"rung": plan.options.rung}
    return {**sets.options, **named}


def _agrees(prepared: Prepared, right: Any) -> bool:
    """Tell whether a result is near ours: the exact check was made on small operands."""
    wanted = np.asarray(right).astype(np.float64)
    found = np.asarray(prepared.result()).astype(np.float64)
    if found.shape != wanted.shape:
        return False
    distance = float(np.linalg.norm(found - wanted))
    return distance <= FURTHEST * float(np.linalg.norm(wanted)) + 1e-30


def absences_in_words(absent: Iterable[Absence], rows: Sequence[Row]) -> list[str]:
    """Return one line a reason: who took no part, and why.

    That one who has rows does not serve every product goes without saying.
    """
    there = {row.name for row in rows}
    there |= {name.partition(" on ")[0] for row in rows for name in row.speedups}
    by_reason: dict[str, dict[str, None]] = {}
    more: dict[str, dict[str, None]] = {}
    for one in absent:
        if not (one.refused and one.name in there):
            by_reason.setdefault(one.reason, {})[one.name] = None
            more.setdefault(one.reason, {})[one.more] = None
    return [
        f"{', '.join(names)}: {reason}" + "".join(f", {words}" for words in more[reason] if words)
        for reason, names in by_reason.items()
    ]
