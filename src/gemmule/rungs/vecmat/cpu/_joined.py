"""Products whose shares each sum a part of all columns: the parts are added at the end, in shares.

Both ways of a call run the same two steps: from Python, and bound as a builtin function.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from gemmule.backends.cpu.atomics import packed, unpacked, write
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.backends.cpu.pool import Pooled, in_pool, share_count
from gemmule.backends.cpu.shares import run_shares

FEWEST = 64  # results that a share adds up at least


class Sums(NamedTuple):
    """The parts' sums: `parts` times `m` numbers of a dtype, `rest` more bytes behind them."""

    parts: int
    m: int
    dtype: str
    rest: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the room that a product takes."""
        return self.parts * self.m * np.dtype(self.dtype).itemsize + self.rest

    @property
    def joins(self) -> int:
        """In how many shares the parts are added up."""
        return share_count(self.nbytes - self.rest, self.m // FEWEST, 1)


@functools.cache
def join_of(working: str, y: str) -> Pooled:
    """Return the second step, with words (room, y, m, parts, joins): y is the sum of the parts.

    One part after another is added to the first, which is rounded once to y's dtype.
    """
    get, put, put_y = load(working, working), store(working, working), store(y, working)
    size = np.dtype(working).itemsize

    @kernel
    def join(number: int, room: int, y: int, m: int, parts: int, joins: int) -> None:
        first, end = number * m // joins, (number + 1) * m // joins
        for part in range(1, parts):
            other = room + part * m * size
            for i in range(first, end):
                put(room, i, get(room, i) + get(other, i))
        for i in range(first, end):
            put_y(y, i, get(room, i))

    return in_pool(join, 5)


def joined_job(
    spread: Pooled, words: tuple[int, ...], places: tuple[int, int, int], sums: Sums, y: str
) -> Job:
    """Return both steps as what a builtin function is bound to.

    spread: the first step, in shares of `words`, `sums.parts` in all. places: where among them the
    addresses of the matrix, the vector and the room go.
    """
    helpers, pool = spread.helpers(sums.parts)
    steps, sizes = (spread.address, join_of(sums.dtype, y).address), (sums.parts, sums.nbytes)
    offsets = [8 * place for place in places]
    head = (pool, helpers, *steps, *sizes, *offsets, sums.m, sums.joins)
    return Job(_job(len(words)).address(4, returns=True), (*head, *words), pool)


@functools.cache
def _job(words: int) -> Kernel:
    """Return what `joined_job` binds, for shares that take so many words."""
    load_head, load_words = unpacked(11), unpacked(words)

    @kernel
    def job(at: int, A: int, x: int, y: int) -> int:
        pool, helpers, task, join, parts, nbytes, of_A, of_x, of_room, m, joins = load_head(at)
        room = np.empty(nbytes, np.uint8)
        place = room.ctypes.data
        copied = packed(load_words(at + 88))
        write(copied + of_A, A)
        write(copied + of_x, x)
        write(copied + of_room, place)
        run_shares(pool, helpers, task, copied, parts)
        run_shares(pool, helpers, join, packed((place, y, m, parts, joins)), joins)
        room[0] = 0  # Numba frees it behind the place that names it last
        return 0

    return job
