"""Shares of a product, claimed by whoever is there: no barrier, and nobody waits for the absent.

The caller writes its product into a free slot, asks for helpers, and begins at once to claim
shares itself; a helper that comes claims those of its own range, then what others have left, and
one that does not come costs nothing. A range is the same thread's in the next product, so that what
a core's own caches hold of a matrix is read from there. And a core that another program's threads
spin on, or that the system took away, costs its own share of the speed and no more; only a share
that a helper has begun is waited for. Several Python threads may call at once: each has a slot, and
helpers go where shares are left.

Helpers are the threads of NumPy's OpenBLAS where they can be borrowed (`blas_threads`): what
NumPy's last product left awake is there at once, and two libraries do not fight over the cores.
Else they are threads of our own, which spin for some microseconds after a product, then sleep. A
borrowed thread that comes late finds the slot closed, or helps with the product after it.

Where PyTorch asks for a product, its own OpenMP team shares it (`openmp`).

A fork, and the end of the interpreter, first wait until every borrowed thread has left: OpenBLAS
ends its threads before a fork and would wait for ever for one that is still in a share. A forked
child begins with a pool of its own.
"""

from __future__ import annotations

import _thread
import atexit
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu import blas_threads, openmp, shares
from gemmule.backends.cpu.atomics import packed, read, unpacked, write
from gemmule.backends.cpu.blas_threads import ENTRY_BYTES
from gemmule.backends.cpu.intrinsics import call_c, enter, load
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.threads import (
    LENT,
    SMALL_SHARE_BYTES,
    processors,
    shares_for,
    thread_count,
)
from gemmule.core import fork
from gemmule.settings import borrows_threads

log = logging.getLogger("gemmule")
_int32 = load("int32", "int64")
_END_S = 2.0  # how long the end of the interpreter waits for helpers, and a fork
_FORK_S = 60.0


@kernel
def _launch(run: int, pool: int, helpers: int, task: int, count: int, *words: int) -> None:
    """Run shares by `shares.run_shares` at an address: compiled once, whatever number of words."""
    enter(run, (pool, helpers, task, packed(words), count))


# Shares a thread at most, the default first: small ones, so that nobody waits long for the last.
SHARES_PER_THREAD = (8, 4, 2, 1)


def share_count(nbytes: int, units: int, per_thread: int) -> int:
    """Return in how many shares to cut a product that reads so many bytes, in `units` at finest.

    Small products stay whole, and so with the caller alone.
    """
    return shares_for(nbytes, units, per_thread, thread_count())


def team() -> tuple[int, int]:
    """Return how many threads may share a product now, and their pool, 0 before it is started."""
    return thread_count(), _current().address


def own_cache_bytes() -> int:
    """Return how much of a matrix the threads' own caches hold between calls, in any pieces."""
    # Lines that lie a power of two apart share few places of a cache.
    return 4 * SMALL_SHARE_BYTES * thread_count()


class Pooled:
    """A product in shares: ``pooled(count, *words)`` runs ``share(number, *words)`` for each.

    words: integers, the same for all shares; they reach the shares through memory. Returns when
    every share is done. Thread-safe.
    """

    def __init__(self, task: Kernel, entry: Callable[[], int] | None = None) -> None:
        """Where an entry is given, what it returns is the last word of every share.

        So one compiled task serves the many kernels whose shares differ in nothing else (see
        `Kernel.entry`); they are compiled when the product is first called.
        """
        self.task, self._entry = task, entry

    @functools.cached_property
    def _last(self) -> tuple[int, ...]:
        return () if self._entry is None else (self._entry(),)

    @functools.cached_property
    def address(self) -> int:
        """Address of the compiled share, a C function of the words' address and a number."""
        return self.task.address(2)

    def __call__(self, count: int, *words: int) -> None:
        """Run all shares, on as many threads as the caller may use."""
        helpers = min(thread_count(), count) - 1
        pool = pool_address() if helpers > 0 else 0
        _launch(_run(), pool, helpers, self.address, count, *words, *self._last)

    def alone(self, count: int, *words: int) -> None:
        """Run all shares on the calling thread."""
        _launch(_run(), 0, 0, self.address, count, *words, *self._last)


@functools.cache
def _run() -> int:
    return shares.run_shares.address(5)


def in_pool(share: Kernel, words: int) -> Pooled:
    """Return the product whose shares are ``share(number, *words)`` with so many words."""
    return Pooled(_task(share, words))


@functools.cache
def _task(share: Kernel, words: int) -> Kernel:
    load_words = unpacked(words)

    @kernel
    def task(at: int, number: int) -> None:
        share(number, *load_words(at))

    return task


class _State:
    """The pool of this process: its memory, never given back, as threads look at it to the end."""

    memory: np.ndarray[Any, Any] | None = None
    address = 0
    helpers = ""
    ended = False


_state, _lent = _State(), _State()
_KEPT: list[Any] = []  # what threads may still look at


def pool_address() -> int:
    """Return the address of this process's pool, starting its threads on first use."""
    state = _current()
    return state.address or _started(state)


def _current() -> _State:
    return _lent if LENT.count > 0 else _state


def helpers() -> str:
    """Return in words whose threads help, and why not OpenBLAS's where they are our own."""
    if processors() == 1:
        return "none: products run on the calling thread"
    pool_address()
    return _state.helpers


def _started(state: _State) -> int:
    with fork.WHOLE:  # a fork meanwhile would leave half a pool to its child
        if state.address:
            return state.address
        memory, ranges = (
            np.zeros(shares.MEMORY + shares.SLOT, np.uint8),
            processors() * shares.RANGE_BYTES,
        )
        address = -(-memory.ctypes.data // shares.SLOT) * shares.SLOT
        words, room = _words(memory, address), np.zeros((shares.SLOTS + 1) * ranges, np.uint8)
        _KEPT.append(room)
        first = -(-room.ctypes.data // shares.RANGE_BYTES) * shares.RANGE_BYTES
        for i in range(shares.SLOTS):
            slot = shares.SLOTS_AT + i * shares.SLOT
            words[(slot + shares.SERIAL) // 8], words[(slot + shares.RANGES) // 8] = (
                1,
                first + i * ranges,
            )
        if state is _lent:
            _enlist(words, address)
        else:
            _find_helpers(words, address)
        state.memory, state.address = memory, address
        return address


def _find_helpers(words: np.ndarray[Any, Any], address: int) -> None:
    team = blas_threads.examined() if borrows_threads() else "GEMMULE_POOL is own"
    if _state.ended:
        words[shares.LEAVE // 8] = 1  # each caller alone
    elif isinstance(team, str):
        _state.helpers = f"threads of gemmule's own ({team})"
        _start_threads(words, address)
    else:
        _state.helpers = f"threads of NumPy's {team.words}"
        _borrow(team, words, address)


def _enlist(words: np.ndarray[Any, Any], address: int) -> None:
    """Make the pool one whose products are shared by PyTorch's OpenMP team."""
    words[[shares.PARALLEL // 8, shares.NUMBER // 8]] = openmp.functions()
    words[shares.MEMBER // 8] = shares.member.address(1)
    for i in range(shares.SLOTS):
        slot = shares.SLOTS_AT + i * shares.SLOT
        words[(slot + shares.HOME) // 8] = address


def _words(memory: np.ndarray[Any, Any], address: int) -> np.ndarray[Any, Any]:
    return memory[address - memory.ctypes.data :][: shares.MEMORY].view(np.int64)


def _start_threads(words: np.ndarray[Any, Any], address: int) -> None:
    for started in range(processors() - 1):
        words[shares.ALIVE // 8] += 1
        try:
            _thread.start_new_thread(shares.work, (address,))
        except RuntimeError as error:  # the system gives no more threads: fewer will do
            words[shares.ALIVE // 8] -= 1
            log.warning("only %d helper threads could be started: %s", started, error)
            break


def _borrow(team: blas_threads.Team, words: np.ndarray[Any, Any], address: int) -> None:
    """Make the pool's slots ready for OpenBLAS's threads."""
    count, routine = max(processors() - 1, 1), shares.lent.address(1)
    room = np.zeros(shares.SLOTS * count * ENTRY_BYTES, np.uint8)
    _KEPT.append(room)
    for i in range(shares.SLOTS):
        slot, at = shares.SLOTS_AT + i * shares.SLOT, i * count * ENTRY_BYTES
        part = room[at : at + count * ENTRY_BYTES]
        blas_threads.write_entries(part.data, part.ctypes.data, count, routine, address + slot + 1)
        words[(slot + shares.HOME) // 8], words[(slot + shares.ENTRIES) // 8] = (
            address,
            part.ctypes.data,
        )
        words[(slot + shares.CUT) // 8] = count
    words[shares.RUNNING // 8], words[shares.START // 8] = team.running, team.start
    words[shares.TEAM // 8], words[shares.QUEUE // 8], words[shares.WAIT // 8] = (
        team.size,
        team.queue,
        team.wait,
    )


@kernel
def _set_leave(pool: int, value: int) -> None:
    write(pool + shares.LEAVE, value)


@kernel
def _inside(pool: int) -> Any:
    """Return how many borrowed threads are in our code or will come, and callers that ask."""
    return read(pool + shares.SUBMITTING) + read(pool + shares.PENDING)


@kernel
def _wait_idle(pool: int, slot: int) -> None:
    """Wait until OpenBLAS has noted that those which helped at a slot are idle.

    Between a fork and the next product there are none, and nothing that would ever be noted.
    """
    if _int32(read(pool + shares.RUNNING), 0) != 0:
        call_c(read(pool + shares.WAIT), (read(slot + shares.CUT), read(slot + shares.ENTRIES)))


def _send_home(limit_s: float) -> None:
    """Let helpers leave after the shares they are in, and wait for those of OpenBLAS."""
    address, memory = _state.address, _state.memory
    if not address or memory is None:
        return
    _set_leave(address, 1)
    words, until = _words(memory, address), time.monotonic() + limit_s
    if words[shares.QUEUE // 8] == 0:
        return
    while _inside(address) > 0:
        if time.monotonic() > until:
            log.warning("OpenBLAS's threads are still busy after %.0f s", limit_s)
            return
        time.sleep(2e-5)
    for i in range(shares.SLOTS):
        slot = shares.SLOTS_AT + i * shares.SLOT
        if words[(slot + shares.SERIAL) // 8] != 1:  # it was used
            _wait_idle(address, address + slot)


class _ForFork:
    """What a fork takes and gives back: no borrowed thread is in our code between."""

    def acquire(self) -> None:
        try:
            _send_home(_FORK_S)
        except BaseException:  # of a signal handler: the fork goes on, and so do products
            self.release()
            raise

    def release(self) -> None:
        if _state.address and not _state.ended:
            _set_leave(_state.address, 0)


def _end() -> None:
    """Let no thread be in our code when the interpreter takes it down, nor come again."""
    _state.ended = True
    _send_home(_END_S)
    address, memory = _state.address, _state.memory
    if not address or memory is None:
        return
    shares.stop(address)
    words, until = _words(memory, address), time.monotonic() + _END_S
    while words[shares.ALIVE // 8] > 0 and time.monotonic() < until:
        time.sleep(1e-4)


def _forget() -> None:
    """Begin anew in a forked child, which has none of the threads; the old memory stays."""
    if _state.memory is not None:
        _KEPT.append(_state.memory)
        _words(_state.memory, _state.address)[shares.GONE // 8] = 1  # calls that are bound to it
    _state.memory, _state.address = None, 0
    openmp.forget()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    fork.hold("cpu pool", _ForFork())
    os.register_at_fork(after_in_child=_forget)
