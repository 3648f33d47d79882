"""The prefetch of panels to a GPU: threads fill page-locked slots and enqueue copies of full ones.

The thread that fills a piece enqueues its copy, and the copies that waited behind it, on the copy
stream, so that the link never waits for the thread that launches kernels. That thread opens panels
(once what lies in their place has been read) and waits for their copies to be enqueued.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from gemmule.backends.cuda.streams import Event, Stream
from gemmule.core.memory import check_map
from gemmule.outofcore import staging
from gemmule.outofcore.pieces import Piece, Transfer, pieces
from gemmule.outofcore.staging import SLOTS, Lane, Slot, ended, give_lane, take_lane


def _growing() -> Iterator[int]:
    """Yield sizes of pieces: small ones first, so that the link has not long to wait."""
    for number in itertools.count():
        yield staging.CHUNK_BYTES >> max(0, 3 - number // 4)


@dataclass(slots=True)
class _Item:
    """A piece on its way, or where it has none the end of a panel.

    slot: where it is filled, None for what needs no filling; used: a copy used that slot before.
    """

    piece: Piece | None
    slot: Slot | None = None
    used: bool = False
    filled: bool = False

    def fill(self) -> None:
        """Fill the slot, as soon as the copy that used it last is over."""
        if self.piece is None or self.slot is None:
            return
        if self.used:
            self.slot.copied.synchronize()
        for array, start in self.piece.parts:
            check_map(array)
            np.copyto(self.slot.like(array.shape, array.dtype, start), array)


_Opened = tuple[Event | None, Event | None]  # a panel may go behind the first; then the second


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
        self._told: SimpleQueue[_Item | _Opened] = SimpleQueue()
        self._to_fill: SimpleQueue[_Item | None] = SimpleQueue()
        self._sent: SimpleQueue[BaseException | None] = SimpleQueue()  # a word for each panel
        self._sending = threading.Lock()  # of the line
        self._workers: list[Future[None]] = []
        self._line = _Line(_items(panels), self.lane, self._sent)
        try:
            with self._sending:
                self._line.begin()
                self._line.advance(self._hand_out)
            self._send()
        except BaseException:
            self.close()
            raise

    def open(self, read: Event | None = None, arrived: Event | None = None) -> None:
        """Let the next panel go, behind `read`; `arrived` is recorded behind it."""
        self._tell((read, arrived))

    def sent(self) -> None:
        """Wait until the next panel's copies were given to the stream; raise what prevents it."""
        error = self._sent.get()
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would keep itself alive, with all memory of the product

    def close(self) -> None:
        """Wait for what is under way and give the slots back."""
        with self._sending:
            self._line.over = True
        with contextlib.suppress(Empty):
            while True:
                self._to_fill.get_nowait()
        self._to_fill.put(None)
        ended(self._workers)
        with contextlib.suppress(Empty):
            while True:  # errors of several threads would keep themselves alive, as in `sent`
                self._sent.get_nowait()
        self.lane.stream.synchronize()
        give_lane(self.lane, self.ordinal)

    def _tell(self, what: _Item | _Opened) -> None:
        """Leave word for whoever is sending, or send: nobody waits for another thread."""
        self._told.put(what)
        self._send()

    def _send(self) -> None:
        # Who sends looks again after letting go: word may have come just before.
        while not self._told.empty() and self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(Empty):
                    while True:
                        self._line.take_in(self._told.get_nowait())
                self._line.advance(self._hand_out)
            except BaseException:
                self._line.over = True
                raise
            finally:
                self._sending.release()

    def _hand_out(self, item: _Item | None) -> None:
        """Let a thread fill an item, one more as long as there are few; None: no more will come."""
        self._to_fill.put(item)
        if item is not None and len(self._workers) < self.lane.threads:
            self._workers.append(self.lane.pool.submit(self._fill))

    def _fill(self) -> None:
        try:
            while (item := self._to_fill.get()) is not None:
                item.fill()
                self._tell(item)
            self._to_fill.put(None)  # for the next thread
        except BaseException as error:
            self._sent.put(error)


class _Line:
    """What is on its way, in the order in which it is sent; of one thread at a time.

    sent: told of each panel.
    """

    def __init__(
        self,
        coming: Iterator[_Item],
        lane: Lane,
        sent: SimpleQueue[BaseException | None],
    ) -> None:
        self.coming, self.stream, self.sent = coming, lane.stream, sent
        self.free = deque((slot, False) for slot in lane.slots)
        self.next: _Item | None = None  # to come
        self.line: deque[_Item] = deque()
        self.most = 2 * len(lane.slots)
        self.opened: deque[_Opened] = deque()
        self.begun = False  # the first of the opened panels has been
        self.over = False

    def begin(self) -> None:
        """Fetch the first to come."""
        self.next = next(self.coming, None)

    def take_in(self, told: _Item | _Opened) -> None:
        """Note that an item is filled, or that a panel may go."""
        if isinstance(told, _Item):
            told.filled = True
        else:
            self.opened.append(told)

    def advance(self, hand_out: Callable[[_Item | None], None]) -> None:
        """Send what is next in line, and hand out what comes: each item that needs filling.

        Behind the last of all `hand_out` gets None.
        """
        while not self.over:
            self._send()
            if not self._take(hand_out):
                return

    def _send(self) -> None:
        while self.line and self.opened and (item := self.line[0]).filled:
            read, arrived = self.opened[0]
            if not self.begun:
                self.begun = True
                if read is not None:
                    self.stream.wait(read)
            self.line.popleft()
            if item.piece is None:
                if arrived is not None:
                    self.stream.record(arrived)
                self.opened.popleft()
                self.begun = False
                self.sent.put(None)
            elif item.slot is None:
                _copy_direct(self.stream, item.piece)
            else:
                self.stream.copy(item.piece.address, item.slot.pointer, item.piece.nbytes)
                self.stream.record(item.slot.copied)
                self.free.append((item.slot, True))

    def _take(self, hand_out: Callable[[_Item | None], None]) -> bool:
        """Put the next items in line; tell whether there is something to send."""
        ready = False
        while (item := self.next) is not None and len(self.line) < self.most:
            if item.piece is None or item.piece.direct:
                item.filled = ready = True
            elif not self.free:
                break
            else:
                item.slot, item.used = self.free.popleft()
                hand_out(item)
            self.line.append(item)
            self.next = next(self.coming, None)
            if self.next is None:
                hand_out(None)  # threads are gone before the last kernel is
        return ready and self.line[0].filled and bool(self.opened)


def _copy_direct(stream: Stream, piece: Piece) -> None:
    array, _ = piece.parts[0]
    lines, length = array.shape
    pointer, width = array.__array_interface__["data"][0], length * array.itemsize
    if lines == 1 or array.strides[0] == width:
        stream.copy(piece.address, pointer, lines * width)
    else:
        stream.copy_lines(piece.address, pointer, width, lines, array.strides[0])
