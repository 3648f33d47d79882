"""A product as steps, each cut into shares: described once, called from Python or bound.

A product is described by int64 *words*, which the shares of all its steps read. Where an operand or
the buffer is named among them, a call writes that address; all else is the same in every call. One
compiled kernel runs every product: it copies the words, writes the addresses, prepares the vector
where that is asked for, and runs one step after the other.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import copied, unpacked
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import call_c, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import pool_address, team
from gemmule.backends.cpu.shares import run_shares

# The buffer begins at a pair of a cache's lines, as processors fetch them: threads that write to
# neighbouring parts of it would take each other's lines else.
ALIGNMENT = 128

_MOST_KEPT = 16
# The word that says where the buffer's memory begins; 0: each call has its own.
MEMORY = 4
_HEAD, _STEP, _PLACE = 8, 4, 3  # words of each
_load_head, _load_step, _load_place = unpacked(_HEAD), unpacked(_STEP), unpacked(_PLACE)
_put = store("int64", "int64")


class Place(NamedTuple):
    """An address that each call knows anew: that of an operand or the buffer, plus some bytes."""

    of: int
    offset: int = 0


A, X, Y = Place(0), Place(1), Place(2)


def buffer(offset: int = 0) -> Place:
    """Return the place so many bytes behind the beginning of a call's buffer."""
    return Place(3, offset)


Words = tuple[int | Place, ...]


class Step(NamedTuple):
    """One step: ``task(words, number)`` for each of some shares.

    task: the address of a C function; first: the number of the word at which its words begin;
    alone: on the calling thread.
    """

    task: int
    shares: int
    first: int = 0
    alone: bool = False


class Prepare(NamedTuple):
    """What writes x to the buffer first: ``f(x, length, 1, buffer, 0)``, not 0 if it cannot."""

    kernel: Kernel
    length: int


class Steps:
    """A product in steps, as a call of now runs it: with these threads and their pool.

    buffer_bytes: of memory that a call has for itself. alone: by the calling thread. kept: what
    addresses among words point to.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        words: Words,
        *,
        buffer_bytes: int = 0,
        prepare: Prepare | None = None,
        kept: Any = None,
    ) -> None:
        told = [(*one[:3], 0 if one.alone else team()[0] - 1) for one in steps]
        self.alone = all(one.alone for one in steps)
        helped = any(shares > 1 and helpers > 0 for _, shares, _, helpers in told)
        places = [(i, *w) for i, w in enumerate(words) if isinstance(w, Place)]
        fixed = [0 if isinstance(w, Place) else w for w in words]
        first = (0, 0) if prepare is None else (prepare.kernel.address(5), prepare[1])
        self.pool = pool_address() if helped else 0
        self.buffer_bytes = buffer_bytes + ALIGNMENT if buffer_bytes > 0 else 0
        head = (self.pool, *first, self.buffer_bytes, 0, len(told), len(places), len(fixed))
        flat = [number for row in (*told, *places) for number in row]
        self.words, self.kept = np.array((*head, *flat, *fixed), np.int64), kept
        self._call = functools.partial(_by_address, run_address(), self.words.ctypes.data)

    def __call__(self, A: int, x: int, y: int) -> bool:
        """Multiply operands at these addresses; return False where x cannot be prepared."""
        return not self._call(A, x, y)

    def job(self) -> Job:
        """Return the product as what a builtin function is bound to."""
        return Job(run_address(), tuple(self.words.tolist()), self.pool, self.kept)


def per_team(build: Callable[..., Steps]) -> Callable[..., Steps]:
    """Return `build`, its results kept for as long as the threads and their pool are the same."""
    alone: dict[Any, Steps] = {}  # of the calling thread, whatever others there are
    kept: dict[Any, Steps] = {}

    def now(*given: Any) -> Steps:
        found = alone.get(given) or kept.get((team(), given))
        if found is None:
            found = build(*given)
            some, key = (alone, given) if found.alone else (kept, (team(), given))
            if len(some) >= _MOST_KEPT:
                some.clear()
            some[key] = found
        return found

    return now


@kernel
def _run(at: int, A: int, x: int, y: int) -> Any:
    pool, prepare, length, nbytes, place, steps, places, count = _load_head(at)
    own = nbytes > 0 and place == 0
    if own:
        memory = np.empty(nbytes, np.uint8)
        place = memory.ctypes.data
    place = (place + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    table = at + 8 * _HEAD
    listed = table + 8 * _STEP * steps
    words, refused = copied(listed + 8 * _PLACE * places, count), 0
    if prepare != 0:
        refused = call_c(prepare, (x, length, 1, place, 0))
    if refused == 0:
        for i in range(places):
            to, of, offset = _load_place(listed + 8 * _PLACE * i)
            start = A if of == 0 else x
            start = start if of < 2 else (y if of == 2 else place)
            _put(words, to, start + offset)
        for i in range(steps):
            task, shares, first, helpers = _load_step(table + 8 * _STEP * i)
            run_shares(pool, helpers, task, words + 8 * first, shares)
    return refused


def by_address(job: Job) -> Callable[[int, int], bool]:
    """Return ``f(x, y)`` for operands at these addresses; False: nothing was done, or x refused."""
    words = np.array(job.words, np.int64)
    run, at = job.address, words.ctypes.data

    def call(x: int, y: int, kept: Any = (words, job)) -> bool:
        refused = ctypes.c_int64()
        return not (_by_address(run, at, ctypes.addressof(refused), x, y) or refused.value)

    return call


@functools.cache
def run_address() -> int:
    """Return the address of what runs products, compiled once: a C function of four words."""
    return _run.address(4)


@kernel
def _by_address(run: int, at: int, A: int, x: int, y: int) -> Any:
    return call_c(run, (at, A, x, y))
