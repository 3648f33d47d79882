"""The order of a blocked product's steps, and the slots on the device that its panels lie in.

The product (m x k) (k x n) is cut into tiles. A step multiplies a panel of the left operand with
one of the right into a tile of the result. Panels lie in slots on the device; as the whole order is
known, the panel that goes is the one needed again last (L. A. Belady, "A study of replacement
algorithms for a virtual-storage computer", 1966), but for those of the step before, whose kernel
may still be reading when the next panel should already be on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NEVER = 1 << 62
Place = tuple[int, int]  # of a panel: along its rows, along its columns


@dataclass(frozen=True, slots=True)
class Sizes:
    """A product of an m x k and a k x n matrix; a vector is a matrix of one row or column."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a full tile, and how many panels of each operand, tiles of the result, are held."""

    tile: Sizes
    left_slots: int
    right_slots: int
    out_slots: int

    def counts(self, whole: Sizes) -> Sizes:
        """Return the number of tiles along each axis."""
        tile = self.tile
        return Sizes(
            math.ceil(whole.m / tile.m), math.ceil(whole.n / tile.n), math.ceil(whole.k / tile.k)
        )


@dataclass(frozen=True, slots=True)
class Load:
    """A panel goes to a slot, as soon as step `after` (-1: none) has read what is there now."""

    side: str
    place: Place
    slot: int
    after: int


@dataclass(frozen=True, slots=True)
class Step:
    """One product of panels: tile (i, j) of the result, a part of its sum.

    first: the tile's sums begin; last: the tile is whole afterwards.
    """

    i: int
    j: int
    part: int
    loads: tuple[Load, ...]
    left: int
    right: int
    out: int
    first: bool
    last: bool


class _Slots:
    """The slots of one operand."""

    def __init__(self, side: str, count: int, needed: list[Place]) -> None:
        self.side = side
        self.held: list[Place | None] = [None] * count
        self.read: list[int] = [-1] * count  # the last step that did
        self.uses: dict[Place, list[int]] = {}
        for step in range(len(needed) - 1, -1, -1):  # the next use is the last of a list
            self.uses.setdefault(needed[step], []).append(step)

    def take(self, place: Place, step: int) -> tuple[int, Load | None]:
        """Return the slot that holds a panel at a step, and what has to be loaded for that."""
        self.uses[place].pop()
        load = None
        if place in self.held:
            slot = self.held.index(place)
        else:
            slot = self._leaving(step)
            load = Load(self.side, place, slot, self.read[slot])
            self.held[slot] = place
        self.read[slot] = step
        return slot, load

    def _leaving(self, step: int) -> int:
        free = [slot for slot, last in enumerate(self.read) if last < step - 1 or last < 0]
        return max(free or range(len(self.held)), key=lambda s: (self._next(s), -self.read[s]))

    def _next(self, slot: int) -> int:
        place = self.held[slot]
        if place is None:
            return NEVER + 1
        uses = self.uses[place]
        return uses[-1] if uses else NEVER


def steps(whole: Sizes, tiling: Tiling) -> Iterator[Step]:
    """Yield the steps in their order: to and fro along columns, so that turns need no new panel."""
    counts = tiling.counts(whole)
    order = list(_order(counts))
    left = _Slots("left", tiling.left_slots, [(i, p) for i, j, p in order])
    right = _Slots("right", tiling.right_slots, [(p, j) for i, j, p in order])
    tile = -1
    for number, (i, j, part) in enumerate(order):
        summed = number % counts.k
        tile += summed == 0
        a, load_a = left.take((i, part), number)
        b, load_b = right.take((part, j), number)
        loads = tuple(load for load in (load_a, load_b) if load is not None)
        out = tile % tiling.out_slots
        yield Step(i, j, part, loads, a, b, out, summed == 0, summed == counts.k - 1)


def _order(counts: Sizes) -> Iterator[tuple[int, int, int]]:
    turn = 0
    for i in range(counts.m):
        columns = range(counts.n) if i % 2 == 0 else range(counts.n - 1, -1, -1)
        for j in columns:
            depth = range(counts.k) if turn % 2 == 0 else range(counts.k - 1, -1, -1)
            turn += 1
            yield from ((i, j, part) for part in depth)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a schedule should take: seconds, and bytes to and from the device."""

    seconds: float
    bytes_in: int
    bytes_out: int


def forecast(
    whole: Sizes,
    tiling: Tiling,
    itemsizes: tuple[float, float, float],
    link: float,
    step_s: Callable[[Sizes], float],
) -> Forecast:
    """Return what a tiling should take, with copies both ways and kernels side by side.

    itemsizes: bytes an element of the left, the right operand and the result; link: bytes a second
    each way; step_s: seconds of a tile's product.
    """
    tile = tiling.tile
    arrived = computed = stored = 0.0
    moved_in = moved_out = 0.0
    ends: list[float] = []
    freed = [0.0] * tiling.out_slots
    full = step_s(tile)
    for step in steps(whole, tiling):
        rows = min(tile.m, whole.m - step.i * tile.m)
        cols = min(tile.n, whole.n - step.j * tile.n)
        depth = min(tile.k, whole.k - step.part * tile.k)
        for load in step.loads:
            of_left = load.side == "left"
            nbytes = (rows if of_left else cols) * depth * itemsizes[0 if of_left else 1]
            begun = max(arrived, ends[load.after] if load.after >= 0 else 0.0)
            arrived = begun + nbytes / link
            moved_in += nbytes
        begun = max(computed, arrived, freed[step.out] if step.first else 0.0)
        share = rows * cols * depth / max(1, tile.m * tile.n * tile.k)
        computed = begun + full * share
        ends.append(computed)
        if step.last:
            nbytes = rows * cols * itemsizes[2]
            stored = max(stored, computed) + nbytes / link
            freed[step.out] = stored
            moved_out += nbytes
    return Forecast(max(stored, computed), int(moved_in), int(moved_out))
