"""Forks and Ctrl-C that leave no import and no compilation half done.

``os.fork`` copies one thread, and the locks that others hold stay held in the child for good: of a
module being imported, of LLVM. So the package imports its parts and builds its
kernels under one lock, `WHOLE`, and a fork waits for it and for the locks given to `hold`: at most
as long as the kernel being compiled takes. What is not covered: locks of other libraries, such as
those of a BLAS whose threads are at work (``docs/threads.md``).
"""

from __future__ import annotations

import contextlib
import logging  # noqa: F401  registers its own lock for forks; see the end
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

WHOLE = threading.RLock()


class _Recorder:
    """Takes the place of the handler of Ctrl-C, and keeps that it came."""

    came: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = number, frame


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C, in the main thread, take effect at the end of the block.

    An import or a compilation that is left half way leaves modules and caches that no
    retry mends; both take seconds at most.
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


class Lock(Protocol):
    """What can be acquired by the thread that forks, and released by it in parent and child."""

    def acquire(self) -> object:
        """Wait for the lock."""
        ...

    def release(self) -> object:
        """Give it back."""
        ...


_held: dict[str, Lock] = {}


def hold(name: str, lock: Lock) -> None:
    """Make every later fork wait for `lock` too, after those named before it; one lock a name."""
    with WHOLE:
        _held.setdefault(name, lock)


class _Mine(threading.local):
    """The locks that this thread took for the fork it is about to make."""

    def __init__(self) -> None:
        self.taken: list[Lock] = []


_mine = _Mine()


def _before() -> None:
    _take(WHOLE)
    for lock in _held.values():  # read now: what had WHOLE may have added to them
        _take(lock)


def _take(lock: Lock) -> None:
    lock.acquire()
    _mine.taken.append(lock)  # one by one: a signal handler may raise while one is waited for


def _after() -> None:
    while _mine.taken:
        _mine.taken.pop().release()


# What is registered last waits first. Logging takes its lock for a fork too, and a thread that
# imports or compiles may log: so logging has to be imported, and wait, after this.
os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
