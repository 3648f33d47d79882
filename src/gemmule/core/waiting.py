"""Telling, once a process, that compiling takes long, and which command compiles ahead.

Who compiles ahead (`ahead`) is told nothing of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

log = logging.getLogger("gemmule")
LONG_S = 1.0
_watch: ContextVar[Callable[[str], None] | None] = ContextVar("gemmule compiling", default=None)
_ahead: ContextVar[bool] = ContextVar("gemmule compiles ahead", default=False)


@contextmanager
def ahead() -> Iterator[None]:
    """Compile in the block because that is what is wanted now."""
    token = _ahead.set(True)
    try:
        yield
    finally:
        _ahead.reset(token)


@contextmanager
def watched(watch: Callable[[str], None]) -> Iterator[None]:
    """Call ``watch(what)`` where something is compiled within the block, ``watch("")`` after it."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


class Wait:
    """The time that a process waited for compilers of one kind."""

    def __init__(self, what: str, command: str) -> None:
        self._what, self._command, self._seconds = what, command, 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add what the block takes; where the sum passes a second, tell so."""
        begin, watch = time.perf_counter(), _watch.get()
        if watch is not None:
            watch(self._what)
        try:
            yield
        finally:
            if watch is not None:
                watch("")
        if _ahead.get():
            return
        before, self._seconds = self._seconds, self._seconds + time.perf_counter() - begin
        if before < LONG_S <= self._seconds:
            log.warning(
                "compiling %s took %.1f s so far; it is kept for later processes. "
                "`%s` compiles ahead what default choices need.",
                self._what,
                self._seconds,
                self._command,
            )
