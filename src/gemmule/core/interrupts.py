"""Work that Ctrl-C must not cut in two: the interrupt comes as soon as it is done.

An import of Numba or a compilation that is left half way leaves modules and caches that no retry
mends; both take seconds at most.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _Recorder:
    """Takes the place of the handler of Ctrl-C, and keeps that it came."""

    came: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = number, frame


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let Ctrl-C, in the main thread, take effect at the end of the block.

    Other threads are never interrupted; what is no Python function handles the signal as before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or isinstance(before, _Recorder):
        yield
        return
    recorder = _Recorder()
    try:
        signal.signal(signal.SIGINT, recorder)
    except ValueError:  # the main thread of another interpreter than the first
        yield
        return
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is recorder:
            signal.signal(signal.SIGINT, before)
        if recorder.came is not None:
            before(*recorder.came)
