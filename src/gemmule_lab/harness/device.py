"""Products on a GPU: captured calls over operands that rotate past the L2, beside their peers.

What a call costs the host is another matter and has its own rows (`gemmule_lab.bench.host_cost`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import gemmule as gm
from gemmule.backends.cuda import driver
from gemmule.backends.cuda import launch as cuda_launch
from gemmule.backends.cuda.graph_clock import GraphClock
from gemmule.choose import suggestions
from gemmule.core.problem import Problem
from gemmule.core.rung import Rung
from gemmule.storage import evidence
from gemmule.timing.sampler import FEWEST_PAIRS, Budget
from gemmule_lab.ceilings.device import measure_ceilings
from gemmule_lab.harness.bench import Bench, Measurement, peer_entry
from gemmule_lab.harness.device_operands import device_sets, in_floats, judged
from gemmule_lab.harness.operands import Sets
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.peer import Peer, check, check_operands, small_problem
from gemmule_lab.peers.registry import named
from gemmule_lab.records.environment import capture_environment
from gemmule_lab.records.rows import Ceiling, Environment

MIN_BLOCKS, MAX_BLOCKS = 7, 40
BLOCK_S = 0.004
BRIEF = Budget(0.02, FEWEST_PAIRS, 8, 1e-3, patience=8.0, timer_share=5e-3)
PLAIN_PEERS = ("torch", "cupy")
HOPELESS = 3.0  # times what the quickest rung is expected to take: not timed beside it


class DeviceBench(Bench):
    """A GPU's bench. peers: names of those that take part; rungs: those of ours to time, by name,
    None being the automatic choice. warm: over one operand set, which stays in the L2 where it
    fits. every_rung: time the proved rungs that plans could choose as well. DeviceError where there
    is no GPU, ValueError for a peer that nobody knows.
    """

    backend, prefix, brief = "cuda", "cuda-", BRIEF

    def __init__(
        self,
        ordinal: int = 0,
        seconds: float = 0.6,
        *,
        peers: Sequence[str] = (),
        rungs: Sequence[str | None] = (None,),
        warm: bool = False,
        every_rung: bool = False,
    ) -> None:
        self.peers = named(peers, "cuda")
        self.warm, self.every_rung = warm, every_rung
        self.ordinal, self.seconds, self.rungs = ordinal, seconds, rungs
        self.device = driver.device_info(ordinal).name
        self.clock: GraphClock = GraphClock(ordinal)
        self._reasons: dict[tuple[str, Problem], str | None] = {}

    def environment(self, max_seconds: float) -> Environment:
        """Return this machine with the GPU's ceilings, measured now and stored for plans."""
        machine = cuda_launch.CudaBackend().machine(f"cuda:{self.ordinal}")
        ceilings = measure_ceilings(self.ordinal, max_seconds=max_seconds)
        names = tuple(driver.device_info(i).name for i in range(driver.device_count()))
        caches = {"L2": machine.cache_bytes}
        found = capture_environment(
            machine.name,
            "cuda",
            ceilings=ceilings,
            threads=machine.units,
            gpus=names,
            caches=caches,
        )
        return replace(found, clocks={**found.clocks, "driver": driver_version()})

    def ceilings_again(self, max_seconds: float) -> Mapping[str, Ceiling]:
        """Return the ceilings as measured once more, where a row rises above them."""
        return measure_ceilings(self.ordinal, max_seconds=max_seconds, seed=1)

    def budget(self, entries: int) -> Budget:
        """Return what a run may take, whatever the number of entries."""
        return Budget(self.seconds, MIN_BLOCKS, MAX_BLOCKS, BLOCK_S)

    def sets(self, product: Product, *, seed: int = 0, warm: bool = False) -> Sets:
        """Return a product's operand sets, in half of the free memory at most."""
        return device_sets(product, self.ordinal, seed=seed, warm=warm)

    def prepared(self, product: Product) -> Measurement:
        """Return the product with its operand sets, and the rungs that are timed.

        Peers that take no codes multiply the weights that these stand for, in the dtype of x.
        """
        sets, plain, rungs = self.sets(product, warm=self.warm), None, self.rungs
        if product.form.bits is not None and any(peer.name in PLAIN_PEERS for peer in self.peers):
            plain = in_floats(sets)
        if self.every_rung:
            plan = sets.plan()
            found = {
                c.rung: c.expected_s for c in suggestions(plan.choice.call, plan.choice.machine)
            }
            least = min(seconds or 0.0 for seconds in found.values())
            near = (rung for rung, s in found.items() if (s or 0.0) <= HOPELESS * least)
            rungs = (None, *(rung.name for rung in near if rung is not plan.rung))
        return Measurement(product.title, sets, rungs, plain, PLAIN_PEERS)

    def judged(self, sets: Sets, plan: gm.Plan) -> float:
        """Multiply the first set and judge it: every element of a vector, a sample of a matrix."""
        self.calls(sets, plan)[0]()
        driver.synchronize(self.ordinal)
        return judged(sets.op, sets.items[0], plan)

    def calls(self, sets: Sets, plan: gm.Plan) -> list[Callable[[], object]]:
        """Return the planned call on each set."""
        return [functools.partial(plan, *one.operands(sets.op), out=one.out) for one in sets.items]

    def proof(self, plan: gm.Plan) -> str | None:
        """Return the proof on file of a plan's rung."""
        return proof_of(plan.rung, plan.problem)

    def checked(self, peer: Peer, problem: Problem) -> str | None:
        """Return why a peer is wrong, or cannot be captured into a graph; asked once a kind."""
        small = small_problem(problem)
        key = (peer.name, small)
        if key not in self._reasons:
            self._reasons[key] = check(peer, small) or self._uncaptured(peer, small)
        return self._reasons[key]

    def _uncaptured(self, peer: Peer, problem: Problem) -> str | None:
        prepared = peer.prepare(problem, *check_operands(problem, 0, exact=True))
        try:
            self.clock.prepare(peer_entry(peer, [prepared], None))
        except Exception as error:  # whatever a foreign library raises
            return f"its calls cannot be captured into a graph: {str(error)[:200]}"
        return None


def driver_version() -> str:
    """Return the CUDA version that the driver supports, such as ``CUDA 13.0``."""
    version = driver.check(
        driver.bindings().cuDriverGetVersion(), "asking for the driver's version"
    )
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


@functools.cache
def _keys() -> Mapping[tuple[str, str, str], str]:
    return {(r.folder, r.rung, r.variant): r.key for r in evidence.read()}


def proof_of(rung: Rung, problem: Problem) -> str | None:
    """Return the first sixteen digits of the recorded key of the variant, or None without one."""
    key = _keys().get((rung.folder, rung.name, evidence.variant_of(problem)))
    return None if key is None else key[:16]
