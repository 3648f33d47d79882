"""Threads that fill page-locked host memory ahead of copies to a GPU, and empty it behind them.

A GPU copies at its link's speed from page-locked memory alone, and one thread fills that at a
fraction of it. So a `Lane` of page-locked slots is kept, threads fill them ahead of time from
wherever the array lies (a file's map too), and its stream empties them in order.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.streams import Event, PinnedBlock, Stream, enter, is_pinned

Array = np.ndarray[Any, Any]
CHUNK_BYTES = 8 << 20
SLOTS, MOST_THREADS = 16, 8


class Slot:
    """A piece of page-locked memory, and the copy that used it last."""

    def __init__(self, memory: Array, pointer: int, ordinal: int) -> None:
        self.memory, self.pointer = memory, pointer
        self.copied = Event(ordinal)

    def like(self, shape: tuple[int, ...], dtype: np.dtype[Any], start: int = 0) -> Array:
        """Return the slot's memory, from byte `start` on, as an array."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return self.memory[start : start + nbytes].view(dtype).reshape(shape)


class Lane:
    """Page-locked slots, a stream, and threads that fill or empty slots; kept for later."""

    def __init__(self, ordinal: int, count: int) -> None:
        self.block = PinnedBlock(count * CHUNK_BYTES, ordinal)
        memory = self.block.bytes
        self.slots = [
            Slot(memory[at : at + CHUNK_BYTES], self.block.pointer + at, ordinal)
            for at in range(0, self.block.nbytes, CHUNK_BYTES)
        ]
        self.stream = Stream(ordinal)
        self.threads = _threads()
        self.pool = ThreadPoolExecutor(self.threads, "gemmule-copy", enter, (ordinal,))
        self.leader = ThreadPoolExecutor(1, "gemmule-store", enter, (ordinal,))
        self._ordinal, self._events = ordinal, list[Event]()

    def events(self) -> Iterator[Event]:
        """Yield events for one product: those that served the last one, and more."""
        for number in itertools.count():
            if number == len(self._events):
                self._events.append(Event(self._ordinal))
            yield self._events[number]


spare_lanes: dict[tuple[int, int], list[Lane]] = {}
_lock = threading.Lock()


def take_lane(ordinal: int, count: int) -> Lane:
    """Return a lane of so many slots that nobody uses; give it back with `give_lane`."""
    with _lock:
        spare = spare_lanes.setdefault((ordinal, count), [])
        if spare:
            return spare.pop()
    return Lane(ordinal, count)


def give_lane(lane: Lane, ordinal: int) -> None:
    """Keep a lane, on which nothing is under way, for the next product; one of a kind is kept."""
    with _lock:
        spare = spare_lanes.setdefault((ordinal, len(lane.slots)), [])
        if not spare:
            spare.append(lane)


_links: dict[int, float] = {}


def link_bytes_per_s(ordinal: int, nbytes: int) -> float:
    """Return the rate of copies to a device, measured once a process by one of at most `nbytes`."""
    if ordinal not in _links:
        lane, size = take_lane(ordinal, SLOTS), min(nbytes, CHUNK_BYTES)
        target = DeviceArray.empty((size,), "uint8", ordinal)
        with driver.on_device(ordinal):
            for turns in (1, 6):  # the first wakes the link
                start = time.perf_counter()
                for slot in lane.slots[:turns]:
                    lane.stream.copy(target.pointer, slot.pointer, size)
                lane.stream.synchronize()
                elapsed = time.perf_counter() - start
        give_lane(lane, ordinal)
        _links[ordinal] = 6 * size / max(elapsed, 1e-9)
    return _links[ordinal]


def _threads() -> int:
    """Return how many threads fill slots: as many as there are cores, at most eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(MOST_THREADS, cores or 1)


def pinned(array: Array, ordinal: int) -> bool:
    """Tell whether all of an array lies in page-locked memory."""
    if array.size == 0:
        return False
    low, high = np.lib.array_utils.byte_bounds(array)
    return is_pinned(low, high - low, ordinal)


def ended(futures: Iterable[Future[None]]) -> None:
    """Call off what has not begun and wait for the rest, however it ends."""
    wait([one for one in futures if not one.cancel()])


Finish = Callable[[Array, Array], None]  # (the result's part, the sums that arrived)


class Drain:
    """Brings finished tiles of the result to the host, beside everything else."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.lane = ordinal, take_lane(ordinal, SLOTS // 4)
        self.stream, self.pool = self.lane.stream, self.lane.pool
        self.used: list[Future[None] | None] = [None] * len(self.lane.slots)
        self.tiles: list[Future[None]] = []
        self.turn = 0

    def store(
        self, target: Array, address: int, dtype: np.dtype[Any], whole: Event, finish: Finish
    ) -> Future[None]:
        """Store a C-ordered tile at an address into `target`, once `whole` has come."""
        future = self.lane.leader.submit(self._store, target, address, dtype, whole, finish)
        self.tiles.append(future)
        return future

    def _store(
        self, target: Array, address: int, dtype: np.dtype[Any], whole: Event, finish: Finish
    ) -> None:
        whole.synchronize()
        lines, length = target.shape
        elements = CHUNK_BYTES // dtype.itemsize
        tall, wide = max(1, elements // max(1, length)), min(length, elements)
        pending: list[Future[None]] = []
        for first in range(0, lines, tall):
            for start in range(0, length, max(1, wide)):
                part = target[first : first + tall, start : start + wide]
                source = address + (first * length + start) * dtype.itemsize
                pending.append(self._piece(part, source, dtype, finish))
        for one in pending:
            one.result()

    def _piece(
        self, part: Array, source: int, dtype: np.dtype[Any], finish: Finish
    ) -> Future[None]:
        number = self.turn % len(self.used)
        self.turn += 1
        before, slot = self.used[number], self.lane.slots[number]
        if before is not None:
            before.result()
        self.stream.copy(slot.pointer, source, part.size * dtype.itemsize)
        self.stream.record(slot.copied)

        def finished() -> None:
            slot.copied.synchronize()
            finish(part, slot.like(part.shape, dtype))

        future = self.used[number] = self.pool.submit(finished)
        return future

    def close(self) -> None:
        """Wait for what is under way and give the slots back."""
        ended(self.tiles)
        ended(one for one in self.used if one is not None)
        self.stream.synchronize()
        give_lane(self.lane, self.ordinal)
