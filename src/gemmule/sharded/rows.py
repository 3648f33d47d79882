"""The rows of a sharded matrix that each rank has, and where each rank's results go.

A result travels in words of 8 bytes: 4 bytes of it and the number of the product
(`rungs/_cuda/peers.cuh` says how they are waited for). So a float16 takes a word, a float64 two.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass

from gemmule.core.problem import ITEMSIZE

WORD_BYTES = 8
STATE_BYTES = 16  # 64 for each product gathered; whether one failed
# Of the struct `Peers`, behind the addresses of all inboxes: this rank's inbox, state, alarm,
# result; half, patience_ns; world, first, sent_empty, words, out_words, row_blocks. Then the ends
# of all ranks' words.
_REST = struct.Struct("<4QqQ6i")


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows of a matrix each rank has, in order."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 0:
            raise ValueError(f"rows are shared out as {self.counts}; each rank has 0 or more.")

    @property
    def total(self) -> int:
        """Rows of the whole matrix."""
        return sum(self.counts)

    def first(self, rank: int) -> int:
        """Return the first row of a rank."""
        return sum(self.counts[:rank])

    def empty(self) -> tuple[int, ...]:
        """Return the ranks without rows: each sends a word of its own, behind the result's."""
        return tuple(rank for rank, count in enumerate(self.counts) if not count)

    def words(self, dtype: str) -> int:
        """Return how many words a rank waits for."""
        return self.total * words_of(dtype) + len(self.empty())

    def ends(self, dtype: str) -> tuple[int, ...]:
        """Return the word behind the last of each rank."""
        return tuple(end * words_of(dtype) for end in itertools.accumulate(self.counts))


def words_of(dtype: str) -> int:
    """Return the words that one number of a result takes."""
    return 2 if ITEMSIZE[dtype] == 8 else 1


def half_words(most_rows: int, world: int) -> int:
    """Return the words of half an inbox, for results of this many rows of any dtype."""
    return -(-(2 * most_rows + world) // 32) * 32  # whole lines of 256 bytes


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place among its peers: addresses as this rank's device sees them.

    inboxes: of every rank, two halves of `half` words each. state: `STATE_BYTES` of its own device.
    alarm: 8 bytes of page-locked host memory.
    """

    rank: int
    inboxes: tuple[int, ...]
    state: int
    alarm: int
    half: int
    patience_s: float = 10.0

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.inboxes)

    @property
    def room(self) -> int:
        """Addresses in the struct: a power of two, so that few kernels serve all worlds."""
        return max(2, 1 << (self.world - 1).bit_length())

    def pack(self, rows: Rows, dtype: str, row_blocks: int) -> bytes:
        """Return the struct `Peers` of peers.cuh, its result's address null; see `out_at`."""
        each, empty = words_of(dtype), rows.empty()
        absent = rows.total * each + empty.index(self.rank) if self.rank in empty else -1
        spare = (0,) * (self.room - self.world)
        inboxes = struct.pack(f"<{self.room}Q", *self.inboxes, *spare)
        ends = struct.pack(f"<{self.room}i", *rows.ends(dtype), *spare)
        rest = _REST.pack(
            self.inboxes[self.rank],
            self.state,
            self.alarm,
            0,
            self.half,
            round(self.patience_s * 1e9),
            self.world,
            rows.first(self.rank) * each,
            absent,
            rows.words(dtype),
            rows.total * each,
            row_blocks,
        )
        return inboxes + rest + ends

    @property
    def out_at(self) -> int:
        """The place of the result's address in the struct."""
        return 8 * (self.room + 3)
