"""Products on a GPU beside their peers: judged, then timed in one interleaved run of graph replays.

The GPU's time of a call is measured cold, over operand sets that rotate past the L2; what a call
costs the host is another matter and has its own rows (`gemmule_lab.bench.host_cost`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.core.problem import Problem
from gemmule.timing.machine import Rotation
from gemmule.timing.sampler import Budget, Contestant
from gemmule_lab.bench.device_operands import (
    OperandSet,
    judge,
    judge_coded,
    make_coded_sets,
    make_sets,
)
from gemmule_lab.bench.entries import Entry, race
from gemmule_lab.bench.suites import CODED, Product
from gemmule_lab.ceilings.device import measure_ceilings
from gemmule_lab.peers.peer import Absence, Peer, Prepared, check, check_operands, small_problem
from gemmule_lab.peers.registry import all_peers
from gemmule_lab.records.environment import capture_environment
from gemmule_lab.records.known_proofs import proof_of
from gemmule_lab.records.rows import Environment, Facts, Row

MIN_BLOCKS, MAX_BLOCKS = 7, 40
BLOCK_S = 0.004


def measured_environment(ordinal: int, max_seconds: float) -> Environment:
    """Return this machine with the GPU's ceilings, measured now and stored for plans."""
    machine = cuda_launch.CudaBackend().machine(f"cuda:{ordinal}")
    ceilings = measure_ceilings(ordinal, max_seconds=max_seconds)
    names = tuple(driver.device_info(i).name for i in range(driver.device_count()))
    clocks = {"driver": driver_version()}
    return capture_environment(
        machine.name, "cuda", ceilings=ceilings, threads=machine.units, gpus=names, clocks=clocks
    )


def driver_version() -> str:
    """Return the CUDA version that the driver supports, such as ``CUDA 13.0``."""
    version = driver.check(
        driver.bindings().cuDriverGetVersion(), "asking for the driver's version"
    )
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def run(
    product: Product,
    environment: Environment,
    clock: GraphClock,
    *,
    peers: Sequence[str],
    max_seconds: float,
    rungs: Sequence[str | None] = (None,),
) -> tuple[list[Row], list[Absence]]:
    """Judge our result, then time ours and the peers; return rows and who took no part.

    peers: names out of ``all_peers("cuda")``. rungs: rungs to time by name, None being the
    automatic choice. ArithmeticError where a result of ours is wrong: then nothing is timed.
    """
    op = product.op
    sets, turn = _sets(product, clock.ordinal)
    temperature = "cold" if turn.cold else "warm"
    plans = [gm.plan(op, *sets[0].operands(op), rung=rung) for rung in rungs]
    problem = plans[0].problem
    facts = functools.partial(Facts, problem, temperature=temperature, group=product.title)
    entries = [
        Entry(
            Contestant(plan.rung.name, calls(op, plan, sets), len(sets)),
            facts(
                kind="rung",
                params=plan.params,
                error_ratio=_judged(product, plan, sets[0]),
                proof=proof_of(plan.rung, plan.problem),
            ),
        )
        for plan in plans
    ]
    present, absent = serving(problem, peers, clock)
    entries += [
        Entry(
            _lane(peer, _prepared(peer, problem, product, sets)),
            facts(kind="peer", mode=peer.mode()),
        )
        for peer in present
    ]
    budget = Budget(max_seconds, MIN_BLOCKS, MAX_BLOCKS, BLOCK_S)
    return race(entries, clock, environment, budget), absent


def calls(op: str, plan: gm.Plan, sets: Sequence[OperandSet]) -> Callable[[int], None]:
    """Return the planned call over each of the operand sets."""

    def call(index: int) -> None:
        one = sets[index]
        plan(*one.operands(op), out=one.out)

    return call


def _sets(product: Product, ordinal: int) -> tuple[list[OperandSet], Rotation]:
    if product.format in CODED:
        return make_coded_sets(product, ordinal, seed=1)
    return make_sets(
        product.op,
        product.shape,
        product.format,
        width=product.width,
        ordinal=ordinal,
        seed=1,
        column_major=product.column_major,
    )


def _judged(product: Product, plan: gm.Plan, one: OperandSet) -> float:
    calls(product.op, plan, [one])(0)
    driver.synchronize(one.out.ordinal)
    if product.format in CODED:
        return judge_coded(product.op, one, plan)
    choice = plan.choice
    arithmetic = choice.rung.arithmetic(choice.problem)
    return judge(product.op, one, choice.problem, arithmetic, choice.params)


def serving(
    problem: Problem, names: Sequence[str], clock: GraphClock
) -> tuple[list[Peer], list[Absence]]:
    """Return the named peers that may be timed on `problem`, and the others with the reason.

    Each has been checked on rectangular operands of the problem's kind, and captured into a graph.
    ValueError for a name that no peer has.
    """
    known = {peer.name: peer for peer in all_peers("cuda")}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no peer is called {unknown[0]!r}; there are: {', '.join(known)}.")
    present, absences = [], []
    for name in names:
        peer = known[name]
        reason = (
            peer.absent() or peer.refuses(problem) or _checked(peer, small_problem(problem), clock)
        )
        if reason is None:
            present.append(peer)
        else:
            absences.append(Absence(name, reason))
    return present, absences


@functools.lru_cache(maxsize=1024)
def _checked(peer: Peer, problem: Problem, clock: GraphClock) -> str | None:
    reason = check(peer, problem)
    if reason is not None:
        return reason
    prepared = peer.prepare(problem, *check_operands(problem, 0, exact=True))
    try:
        clock.prepare(_lane(peer, [prepared]))
    except Exception as error:  # whatever a foreign library raises
        return f"its calls cannot be captured into a graph: {str(error)[:200]}"
    return None


def _prepared(
    peer: Peer, problem: Problem, product: Product, sets: Sequence[OperandSet]
) -> list[Prepared]:
    turned = product.op == "vecmat"  # peers get the canonical product: x A is A^T x
    return [peer.prepare(problem, one.a.T if turned else one.a, one.b) for one in sets]


def _lane(peer: Peer, prepared: Sequence[Prepared]) -> Contestant:
    def call(index: int) -> None:
        prepared[index].call()

    return Contestant(peer.name, call, len(prepared))
