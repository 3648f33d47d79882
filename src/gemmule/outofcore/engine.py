"""Running a blocked product: copies in, kernels and copies out overlap."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemmule.backends.cuda import driver
from gemmule.backends.cuda.arrays import LEGACY_STREAM, sharing_workspaces
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.backends.cuda.streams import Event, Stream
from gemmule.core.operand import Operand, c_strides
from gemmule.core.problem import ITEMSIZE, numpy_dtype
from gemmule.outofcore.buffers import acquire_buffer, release_buffer
from gemmule.outofcore.feeder import Feeder
from gemmule.outofcore.pieces import Transfer
from gemmule.outofcore.schedule import Load, Place, Sizes, Step, Tiling, steps
from gemmule.outofcore.sources import Dense, Source, Window, on_device
from gemmule.outofcore.staging import Drain, Finish

Array = np.ndarray[Any, Any]
Launch = Callable[[Operand, Operand, Operand, complex, complex], None]
Watch = Callable[[int, int], None]  # (steps done, steps in all)

EVERYTHING = slice(None), slice(None)

_watch: ContextVar[Watch | None] = ContextVar("gemmule_outofcore_watch", default=None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Tell ``watch(done, steps)`` how far products in panels have come, within the block."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@dataclass(frozen=True, slots=True)
class Job:
    """A product ready to run.

    target: the host's result, 2-D; sums: the dtype in which tiles arrive there; finish: how a part
    of a tile goes into its part of the target; out_axes: the axes that the product's result has,
    of rows and columns. launch: out = alpha * left * right + beta * out, on the device.
    spare_bytes: of the device, what may be taken beyond the tiling's.
    """

    whole: Sizes
    tiling: Tiling
    left: Source
    right: Source
    target: Array
    sums: str
    finish: Finish
    out_axes: tuple[int, ...]
    launch: Launch
    alpha: complex
    ordinal: int
    spare_bytes: int


class _Held:
    """The slots of one operand on the device, from an address of a block on."""

    def __init__(self, source: Source, count: int, nbytes: int, block: DeviceArray) -> None:
        self.source, self.nbytes, self.count, self.block = source, nbytes, count, block
        self.arrived: list[Event] = []  # the panel of each slot
        self.read: list[Event] = []  # the last step that read it
        self._panels: dict[tuple[int, tuple[int, int]], Operand] = {}  # by slot and sizes

    def take(self, events: Iterator[Event]) -> None:
        """Take an event of either kind for each slot."""
        self.arrived = list(itertools.islice(events, self.count))
        self.read = list(itertools.islice(events, self.count))

    def address(self, slot: int) -> int:
        return self.block.pointer + slot * self.nbytes

    def panel(self, window: Window, slot: int, sizes: tuple[int, int]) -> Operand:
        """Return a slot's panel, made once: panels of equal sizes are the same addresses there.

        What is kept of a matrix on a GPU are its form and addresses, nothing read from it.
        """
        known = slot, sizes
        if known not in self._panels:
            self._panels[known] = self.source.panel(window, self.block, slot * self.nbytes)
        return self._panels[known]

    def at_once(self, counts: Sizes, depth: int) -> bool:
        """Tell whether one copy brings all panels: those of a vector, each in its slot."""
        source = self.source
        return (
            isinstance(source, Dense)
            and source.vector
            and self.count == counts.k
            and self.nbytes == depth * ITEMSIZE[source.dtype]
        )


def run(job: Job) -> None:
    """Compute the product; when this returns or raises, nothing is under way any more."""
    with driver.on_device(job.ordinal):
        _with_context(job)


def _with_context(job: Job) -> None:
    tile, tiling, ordinal = job.tiling.tile, job.tiling, job.ordinal
    size = job.left.bytes_of(tile.m, tile.k), job.right.bytes_of(tile.k, tile.n)
    parts = tiling.left_slots * size[0], tiling.right_slots * size[1]
    needed = sum(parts) + tiling.out_slots * tile.m * tile.n * ITEMSIZE[job.sums]
    buffer = acquire_buffer(needed, needed + job.spare_bytes, ordinal)
    size_of = buffer.shape[0]
    left, right, outs = (
        buffer.view((size_of - start,), (1,), start) for start in (0, parts[0], sum(parts))
    )
    held = {
        "left": _Held(job.left, tiling.left_slots, size[0], left),
        "right": _Held(job.right, tiling.right_slots, size[1], right),
    }
    every = _order(job.whole, tiling)
    feeder = Feeder(_panels(job, held, every), ordinal)
    try:
        drain = Drain(ordinal)
        try:
            with sharing_workspaces():
                _run(job, every, held, outs, feeder, drain)
        finally:
            drain.close()
    finally:
        feeder.close()
        Stream(ordinal, LEGACY_STREAM).synchronize()
        release_buffer(buffer)


def _panels(job: Job, held: dict[str, _Held], every: tuple[Step, ...]) -> Iterator[list[Transfer]]:
    counts, depth = job.tiling.counts(job.whole), job.tiling.tile.k
    whole = {side: one.at_once(counts, depth) for side, one in held.items()}
    for step in every:
        for load in step.loads:
            one = held[load.side]
            if not whole[load.side]:
                window = _window(job, load.side, load.place)
                yield one.source.transfers(window, one.address(load.slot))
            elif load.slot == 0:
                yield one.source.transfers(EVERYTHING, one.block.pointer)
            else:
                yield []


def _window(job: Job, side: str, place: Place) -> Window:
    tall, wide = _tile(job, side)
    rows = slice(place[0] * tall, (place[0] + 1) * tall)
    return rows, slice(place[1] * wide, (place[1] + 1) * wide)


def _tile(job: Job, side: str) -> tuple[int, int]:
    tile = job.tiling.tile
    return (tile.m, tile.k) if side == "left" else (tile.k, tile.n)


def _sizes(job: Job, side: str, place: Place) -> tuple[int, int]:
    """Return rows and columns of a panel, fewer than a tile's at the ends."""
    (tall, wide), whole = _tile(job, side), job.whole
    rows, cols = (whole.m, whole.k) if side == "left" else (whole.k, whole.n)
    return min(tall, rows - place[0] * tall), min(wide, cols - place[1] * wide)


@functools.lru_cache(maxsize=8)
def _order(whole: Sizes, tiling: Tiling) -> tuple[Step, ...]:
    return tuple(steps(whole, tiling))


def _run(
    job: Job,
    every: tuple[Step, ...],
    held: dict[str, _Held],
    out_block: DeviceArray,
    feeder: Feeder,
    drain: Drain,
) -> None:
    kernels = Stream(job.ordinal, LEGACY_STREAM)
    outs = range(job.tiling.out_slots)
    events = feeder.lane.events()
    for one in held.values():
        one.take(events)
    whole = list(itertools.islice(events, len(outs)))
    stored: list[Future[None] | None] = [None for _ in outs]
    watch = _watch.get()
    coming = deque(load for step in every for load in step.loads)
    _open(coming, -1, held, feeder)
    for number, step in enumerate(every):
        for load in step.loads:
            feeder.sent()
            kernels.wait(held[load.side].arrived[load.slot])
        if step.first and (before := stored[step.out]) is not None:
            before.result()
        result = _multiply(job, step, held, out_block)
        for side, slot in (("left", step.left), ("right", step.right)):
            kernels.record(held[side].read[slot])
        _open(coming, number, held, feeder)
        if step.last:
            kernels.record(whole[step.out])
            stored[step.out] = drain.store(
                _target(job, step),
                result.pointer,
                numpy_dtype(job.sums),
                whole[step.out],
                job.finish,
            )
        if watch is not None:
            watch(number + 1, len(every))
    for last in stored:
        if last is not None:
            last.result()


def _open(coming: deque[Load], done: int, held: dict[str, _Held], feeder: Feeder) -> None:
    """Let the next panels go whose slots no step behind `done` has still to read."""
    while coming and coming[0].after <= done:
        load = coming.popleft()
        one = held[load.side]
        # What no step of this run read yet is over at once.
        feeder.open(one.read[load.slot], one.arrived[load.slot])


def _multiply(job: Job, step: Step, held: dict[str, _Held], out_block: DeviceArray) -> Operand:
    left, right = (
        held[side].panel(_window(job, side, place), slot, _sizes(job, side, place))
        for side, place, slot in (
            ("left", (step.i, step.part), step.left),
            ("right", (step.part, step.j), step.right),
        )
    )
    tile = job.tiling.tile
    shape = tuple(_target(job, step).shape[axis] for axis in job.out_axes)
    offset = step.out * tile.m * tile.n * ITEMSIZE[job.sums]
    result = on_device(out_block, offset, shape, c_strides(shape), job.sums)
    job.launch(left, right, result, job.alpha, 0.0 if step.first else 1.0)
    return result


def _target(job: Job, step: Step) -> Array:
    tile = job.tiling.tile
    rows = slice(step.i * tile.m, (step.i + 1) * tile.m)
    return job.target[rows, step.j * tile.n : (step.j + 1) * tile.n]
