"""Benchmark entries, and the clocks that time them.

A clock prepares an entry and hands back a runner of timed blocks. `HostClock` times CPU code;
a GPU back end brings its own, which times replays of captured graphs.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Note = int | float | str

# How the pause between two entries is made (see `HostClock`). OpenBLAS's threads spin for 2^26
# cycles, some 20 ms; GNU OpenMP's for 300,000 turns, some 1 to 10 ms.
REST_STEP_S = 1e-3
IDLE_SHARE = 0.1
LONGEST_REST_S = 0.1
LONG_REST_MS = 2.0
# Then its threads have to find a core each: woken on one core, they take turns there by the tick of
# the scheduler, 8 ms instead of 0.5 ms a call, until the kernel moves one some 60 to 100 ms later,
# 450 ms where the host takes processors away (two cores of an Intel Xeon with AVX-512 under KVM,
# Linux 6, November 2026).
# Twenty calls in a row show it too, which keeps short calls, most of them serial, from waiting.
SETTLED_WITHIN, SETTLED_S, SETTLED_CALLS, LONGEST_SETTLING_S = 1.5, 0.03, 20, 0.6
LEAST_SETTLING_S = 0.15  # what is waited for at the most where waiting longer was in vain


@dataclass(frozen=True, slots=True)
class Entry:
    """A benchmark entry: one implementation under the clock, of whatever origin.

    ``call(i)`` runs it once on operand set i, ``0 <= i < sets``. Entries that share their operand
    sets must give the same `sets`, so that the rotation goes on across them. about: what the one
    who made it knows of it, and reads when it has been timed.
    """

    name: str
    call: Callable[[int], object]
    sets: int = 1
    about: Any = None

    def __post_init__(self) -> None:
        if self.sets < 1:
            raise ValueError(
                f"entry {self.name!r} has sets={self.sets}; it needs at least one set."
            )


def entry_over(
    name: str, calls: Sequence[Callable[[], object]], about: Any = None, *, keep: object = None
) -> Entry:
    """Return the entry of one call for each operand set; `keep` lives as long as it does."""

    def call(index: int, _keep: object = keep) -> object:
        return calls[index]()

    return Entry(name, call, len(calls), about)


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed block: its length, how many calls it held, and what was noticed meanwhile.

    `calls` may exceed what was asked for: a captured graph replays whole rotations. `notes` are
    annotations such as clocks, power or throttle reasons; blocks are marked by them, never dropped.
    """

    seconds: float
    calls: int
    notes: Mapping[str, Note] = field(default_factory=dict)


class BlockRunner(Protocol):
    """An entry made ready: runs and times `calls` calls, beginning at operand set `first`."""

    def __call__(self, first: int, calls: int) -> Timing:
        """Run one block; `first` counts on from the block before and wraps at `sets`."""


class Clock(Protocol):
    """What times blocks: the host's counter, or a GPU's events around graph replays."""

    @property
    def name(self) -> str:
        """What is read, in words for the results file."""

    @property
    def overhead_s(self) -> float:
        """Seconds that timing an empty block would report."""

    def now(self) -> float:
        """Return a monotonic time in seconds, for the cap on the whole run."""

    def prepare(self, entry: Entry) -> BlockRunner:
        """Return the entry's runner; captures graphs or compiles where the clock needs it."""


@dataclass(frozen=True, slots=True)
class Host:
    """What a `HostClock` needs of the machine; a made-up one stands for it in tests.

    wall_ns: monotonic time. cpu_ns: processor time that all threads of the process have used.
    """

    wall_ns: Callable[[], int] = time.perf_counter_ns
    cpu_ns: Callable[[], int] = time.process_time_ns
    sleep: Callable[[float], None] = time.sleep


class HostClock:
    """Wall time by ``perf_counter_ns`` around synchronous calls: right for CPU code.

    Thread pools keep their threads spinning for a while after a call (OpenBLAS some 20 ms, GNU
    OpenMP some milliseconds), and a spinning thread holds the core that another library's call
    wants: on two cores, calls of two libraries in turn stall each other by 4 to 16 ms. So whenever
    the entry changes, the clock first waits until the process uses no more processor time
    than a sleeping one does (at most `longest_rest_s`), then makes untimed calls, which wake the
    newcomer's own threads, until they have been as fast for a while as its untimed calls were
    before (within half; 20 calls or 30 ms, at most 0.6 s); only then it times. Where that is in
    vain, since other programs are at work, the next wait is half as long at most, down to 0.15 s.
    Untimed calls repeat the operand set used last, so that they bring nothing into the cache that a
    timed call reads next.

    A block is marked with ``preempted``, the number of times that the kernel took a CPU away from
    the process during it, where the system counts that; with ``rest_ms`` where there was a wait;
    and with ``restless`` where that wait ended with threads of the process still running.
    """

    name = "host perf_counter_ns"

    def __init__(
        self,
        host: Host | None = None,
        *,
        longest_rest_s: float = LONGEST_REST_S,
        settled_s: float = SETTLED_S,
    ) -> None:
        self._settled_s = settled_s
        self._host = Host() if host is None else host
        self._longest_rest_s = longest_rest_s
        self._latest: Entry | None = None
        self._longest_settling_s = LONGEST_SETTLING_S
        self._quickest: dict[str, float] = {}  # call of each entry, in nanoseconds
        ticks = []
        for _ in range(64):
            start = self._host.wall_ns()
            ticks.append(self._host.wall_ns() - start)
        self.overhead_s = float(np.median(ticks)) * 1e-9

    def now(self) -> float:
        """Return the monotonic time in seconds."""
        return self._host.wall_ns() * 1e-9

    def prepare(self, entry: Entry) -> BlockRunner:
        """Return a runner that calls the entry in a plain loop, garbage collection off."""
        call, sets, wall_ns = entry.call, entry.sets, self._host.wall_ns

        def run(first: int, calls: int) -> Timing:
            order = [(first + i) % sets for i in range(calls)]
            with _no_garbage_collection():
                notes = self._take_over(entry, (first - 1) % sets)
                before = _preemptions()
                start = wall_ns()
                for index in order:
                    call(index)
                elapsed = wall_ns() - start
                after = _preemptions()
            if before is not None and after is not None:
                notes["preempted"] = after - before
            if calls:
                self._note_pace(entry, elapsed / calls)
            return Timing(elapsed * 1e-9, calls, notes)

        return run

    def _take_over(self, entry: Entry, index: int) -> dict[str, Note]:
        """Let the threads of whoever ran before come to rest and wake the entry's own."""
        if entry is self._latest:
            return {}
        self._latest = entry
        notes = self._rest()
        self._settle(entry, index)
        return notes

    def _settle(self, entry: Entry, index: int) -> None:
        """Call until the newcomer has been as fast for a while as it was before."""
        wall_ns = self._host.wall_ns
        start, good = wall_ns(), 0.0
        while True:
            began = wall_ns()
            entry.call(index)
            end = wall_ns()
            taken = float(end - began)
            quickest = self._note_pace(entry, taken)
            good = good + taken if taken <= SETTLED_WITHIN * quickest else 0.0
            if good >= min(self._settled_s * 1e9, SETTLED_CALLS * quickest):
                self._longest_settling_s = LONGEST_SETTLING_S
                return
            if end - start > self._longest_settling_s * 1e9:
                self._longest_settling_s = max(self._longest_settling_s / 2, LEAST_SETTLING_S)
                return

    def _note_pace(self, entry: Entry, taken: float) -> float:
        """Take note of one call's nanoseconds; return the fewest of this entry's calls."""
        quickest = min(taken, self._quickest.get(entry.name, taken))
        self._quickest[entry.name] = quickest
        return quickest

    def _rest(self) -> dict[str, Note]:
        """Sleep until the process is idle; return how long it took, where that was long."""
        host, start = self._host, self._host.wall_ns()
        limit = start + self._longest_rest_s * 1e9
        while (began := host.wall_ns()) < limit:
            used = host.cpu_ns()
            host.sleep(REST_STEP_S)
            end = host.wall_ns()
            if host.cpu_ns() - used <= IDLE_SHARE * (end - began):
                waited = (end - start) * 1e-6
                return {"rest_ms": waited} if waited >= LONG_REST_MS else {}
        return {"rest_ms": (began - start) * 1e-6, "restless": 1}


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _preemptions() -> int | None:
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
