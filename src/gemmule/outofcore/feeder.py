"""The way of panels to a GPU: threads fill page-locked slots ahead of time and send what is filled.

Whoever fills the next piece in line gives it, and what waits behind it, to the stream of copies, so
that the link never waits for the thread that starts kernels. That one opens panels, as soon as what
lies in their place has been read, and asks whether they were sent.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from gemmule.backends.cuda.streams import Event, Stream
from gemmule.outofcore import staging
from gemmule.outofcore.pieces import Piece, Transfer, pieces
from gemmule.outofcore.staging import SLOTS, Slot, ended, give_lane, take_lane


def _growing() -> Iterator[int]:
    """Yield sizes of pieces: small ones first, so that the link has not long to wait."""
    for number in itertools.count():
        yield staging.CHUNK_BYTES >> max(0, 3 - number // 4)


@dataclass(slots=True)
class _Item:
    """A piece on its way, or where it has none the end of a panel.

    slot: where it is filled, None for what needs no filling.
    """

    piece: Piece | None
    slot: Slot | None = None
    filled: bool = False


@dataclass(frozen=True, slots=True)
class _Task:
    """An item whose slot is to be filled; used: a copy used that slot before."""

    item: _Item
    piece: Piece
    slot: Slot
    used: bool

    def run(self) -> None:
        if self.used:
            self.slot.copied.synchronize()
        for array, start in self.piece.parts:
            np.copyto(self.slot.like(array.shape, array.dtype, start), array)


def _items(panels: Iterator[list[Transfer]]) -> Iterator[_Item]:
    sizes = _growing()
    for panel in panels:
        yield from map(_Item, pieces(panel, sizes))
        yield _Item(None)


class Feeder:
    """Sends panels to the device in the order given.

    For each panel in turn call `open`, once it may go, and `sent`, before it is used.
    """

    def __init__(self, panels: Iterator[list[Transfer]], ordinal: int) -> None:
        self.ordinal, self.lane = ordinal, take_lane(ordinal, SLOTS)
        self.stream = self.lane.stream
        self._lock = threading.Lock()  # of all that follows
        self._to_fill, self._to_send = (threading.Condition(self._lock) for _ in range(2))
        self._free = deque((slot, False) for slot in self.lane.slots)
        self._coming = _items(panels)
        self._next: _Item | None = None  # the first to come, which found no slot
        self._line: deque[_Item] = deque()  # in the order in which they are sent
        self._tasks: deque[_Task] = deque()  # of these, what nobody fills yet
        self._opened: deque[tuple[Event | None, Event | None]] = deque()
        self._begun = False  # the first of the opened panels has been
        self._sent = self._taken = 0  # panels
        self._over = False  # nothing more is to be filled
        self._error: BaseException | None = None
        self._workers: list[Future[None]] = []
        with self._lock:
            self._advance()

    def open(self, read: Event | None = None, arrived: Event | None = None) -> None:
        """Let the next panel go, behind `read`; `arrived` is recorded behind it."""
        with self._lock:
            self._opened.append((read, arrived))
            self._advance()

    def sent(self) -> None:
        """Wait until the next panel's copies were given to the stream; raise what prevents it."""
        with self._lock:
            self._taken += 1
            while self._sent < self._taken and self._error is None:
                self._to_send.wait()
            error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would keep itself alive, with all memory of the product

    def close(self) -> None:
        """Wait for what is under way and give the slots back."""
        with self._lock:
            self._over = True
            self._tasks.clear()
            self._to_fill.notify_all()
        ended(self._workers)
        self._error = None
        self.stream.synchronize()
        give_lane(self.lane, self.ordinal)

    def _advance(self) -> None:
        """Send what is next in line, and hand out slots for what comes."""
        while not self._over:
            self._send()
            if not self._take():
                return

    def _send(self) -> None:
        while self._line and self._opened and (item := self._line[0]).filled:
            read, arrived = self._opened[0]
            if not self._begun:
                self._begun = True
                if read is not None:
                    self.stream.wait(read)
            self._line.popleft()
            if item.piece is None:
                if arrived is not None:
                    self.stream.record(arrived)
                self._opened.popleft()
                self._begun = False
                self._sent += 1
                self._to_send.notify()
            elif item.slot is None:
                _copy_direct(self.stream, item.piece)
            else:
                self.stream.copy(item.piece.address, item.slot.pointer, item.piece.nbytes)
                self.stream.record(item.slot.copied)
                self._free.append((item.slot, True))

    def _take(self) -> bool:
        """Put the next items in line; tell whether there is something to send."""
        ready = False
        while len(self._line) < 2 * len(self.lane.slots):
            item = self._next or next(self._coming, None)
            self._next = None
            if item is None:
                if not self._line:
                    self._over = True
                    self._to_fill.notify_all()
                break
            if item.piece is None or item.piece.direct:
                item.filled = ready = True
            elif not self._free:
                self._next = item
                break
            else:
                item.slot, used = self._free.popleft()
                self._hand_out(_Task(item, item.piece, item.slot, used))
            self._line.append(item)
        return ready and self._line[0].filled and bool(self._opened)

    def _hand_out(self, task: _Task) -> None:
        self._tasks.append(task)
        if not self._workers:
            threads = self.lane.threads
            self._workers = [self.lane.pool.submit(self._fill) for _ in range(threads)]
        self._to_fill.notify()

    def _fill(self) -> None:
        """Fill slots until all is filled or something went wrong."""
        try:
            while (task := self._task()) is not None:
                task.run()
                with self._lock:
                    task.item.filled = True
                    self._advance()
        except BaseException as error:
            with self._lock:
                self._error, self._over = error, True
                self._to_send.notify()
                self._to_fill.notify_all()

    def _task(self) -> _Task | None:
        with self._lock:
            while not self._tasks and not self._over:
                self._to_fill.wait()
            return self._tasks.popleft() if self._tasks and not self._over else None


def _copy_direct(stream: Stream, piece: Piece) -> None:
    array, _ = piece.parts[0]
    lines, length = array.shape
    pointer, width = array.__array_interface__["data"][0], length * array.itemsize
    if lines == 1 or array.strides[0] == width:
        stream.copy(piece.address, pointer, lines * width)
    else:
        stream.copy_lines(piece.address, pointer, width, lines, array.strides[0])
