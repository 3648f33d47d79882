"""How a study's cells are timed, on any device: each lane on its operands, then all interleaved.

A bench of a device says how operands are made, how a lane is bound to them and judged, and which
lanes may be timed in one run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gemmule.core.problem import Problem
from gemmule.errors import DeviceError
from gemmule.timing.clock import Clock, Entry
from gemmule.timing.sampler import Budget, sample
from gemmule_lab.peers import registry
from gemmule_lab.peers.peer import Peer
from gemmule_lab.records.rows import times_of
from gemmule_lab.studies.grid import Cell, Lane, Measured, rates


@dataclass(frozen=True, slots=True)
class Bound:
    """A lane ready to be timed over its operand sets, and the parameters it runs with."""

    lane: Lane
    entry: Entry
    params: Mapping[str, Any] = field(default_factory=dict)


class CellBench(ABC):
    """Times cells on one device. seconds: what one lane may take."""

    backend: str
    min_blocks: ClassVar[int] = 6
    max_blocks: ClassVar[int]
    block_s: ClassVar[float]

    def __init__(self, device: str, clock: Clock, seconds: float) -> None:
        self.device, self.clock, self.seconds = device, clock, seconds

    @abstractmethod
    def sets(self, cell: Cell, lane: Lane) -> Sequence[Any] | str:
        """Return a lane's operand sets, as many as its temperature needs, or why there are none."""

    @abstractmethod
    def bind(self, cell: Cell, lane: Lane, sets: Sequence[Any]) -> Bound | str:
        """Return a lane over its operands, judged once, or why it takes no part."""

    @abstractmethod
    def release(self) -> None:
        """Give back the memory that is kept from cell to cell."""

    def runs(self, bound: Sequence[Bound]) -> Iterable[Sequence[Bound]]:
        """Yield the lanes that are timed together."""
        yield bound

    def figures(self, cell: Cell, lane: Lane, us: float) -> dict[str, float]:
        """Return what follows from the time of one call."""
        return rates(cell, lane, us)

    def measure(self, cell: Cell, lanes: tuple[Lane, ...]) -> Mapping[str, Measured]:
        """Return what became of each lane, by name; ArithmeticError for a wrong result."""
        found: dict[str, Measured] = {}
        bound: list[Bound] = []
        kept: dict[tuple[str, bool, int], Sequence[Any] | str] = {}
        for lane in lanes:
            key = (lane.form, lane.flip, lane.matrix)
            try:
                if key not in kept:
                    kept[key] = self.sets(cell, lane)
                sets = kept[key]
                made = sets if isinstance(sets, str) else self.bind(cell, lane, sets)
            except DeviceError as error:
                if error.restart:
                    raise
                made = str(error)
            if isinstance(made, str):
                found[lane.name] = Measured(note=made)
            else:
                bound.append(made)
        for run in self.runs(bound):
            found |= self._timed(cell, run)
        return found

    def _timed(self, cell: Cell, bound: Sequence[Bound]) -> dict[str, Measured]:
        if not bound:
            return {}
        seconds = self.seconds * len(bound)
        budget = Budget(seconds, self.min_blocks, self.max_blocks, self.block_s)
        samples = sample([one.entry for one in bound], self.clock, budget)
        found = {}
        for one in bound:
            times = times_of(samples[one.lane.name])
            figures = self.figures(cell, one.lane, times.median)
            found[one.lane.name] = Measured(times, figures, params=one.params)
        return found


def peer_named(name: str, backend: str, problem: Problem) -> Peer | str:
    """Return a peer that serves a problem, checked on small operands, or why it takes no part."""
    known = [peer for peer in registry.all_peers(backend) if peer.name == name]
    if not known:
        return f"no {'GPU' if backend == 'cuda' else 'CPU'} peer is called {name}"
    present, absent = registry.select(problem, backend, peers=known)
    return present[0] if present else absent[0].reason
