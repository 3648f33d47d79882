"""How a product is cut for a device: tiles that fit its memory and keep link and kernels busy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gemmule.errors import DeviceError
from gemmule.outofcore.schedule import Forecast, Sizes, Tiling, forecast

PANEL_BYTES = 64 << 20  # of a matrix that is read once: well above what starting a copy costs
EDGE = 64  # tiles begin at multiples of it, so that panels keep their alignment
EDGES = tuple(2**power for power in range(5, 18))
MOST_STEPS, MOST_COMPARED = 2048, 24  # of a schedule, and of schedules
FEW_SLOTS, OUT_SLOTS = 3, 2
ROUNDING = 3 * 64  # what the parts of a panel lose to their alignment


@dataclass(frozen=True, slots=True)
class Demand:
    """What decides a tiling.

    itemsizes: bytes an element of the left, the right operand and of the sums on the device;
    budget: bytes there; link: bytes a second each way. step: seconds and workspace bytes of a
    tile's product. slow_left, slow_right: the axis along which an operand's lines follow each other
    in memory, 0 or 1.
    """

    whole: Sizes
    itemsizes: tuple[float, float, float]
    budget: int
    link: float
    step: Callable[[Sizes], tuple[float, int]]
    slow_left: int = 0
    slow_right: int = 0

    def memory(self, tiling: Tiling) -> float:
        """Return the bytes that a tiling takes on the device."""
        tile, (left, right, out) = tiling.tile, self.itemsizes
        panels = (
            tiling.left_slots * (tile.m * tile.k * left + ROUNDING)
            + tiling.right_slots * (tile.k * tile.n * right + ROUNDING)
            + tiling.out_slots * tile.m * tile.n * out
        )
        return panels + sum({self.step(one)[1] for one in self._sizes(tile)})

    def _sizes(self, tile: Sizes) -> Iterator[Sizes]:
        """Yield the sizes of tiles, those at the edges too: each may want another workspace."""
        whole = self.whole
        for rows in {tile.m, whole.m % tile.m or tile.m}:
            for cols in {tile.n, whole.n % tile.n or tile.n}:
                for depth in {tile.k, whole.k % tile.k or tile.k}:
                    yield Sizes(rows, cols, depth)

    def forecast(self, tiling: Tiling) -> Forecast:
        """Return what a tiling should take."""
        step_s, _ = self.step(tiling.tile)
        return forecast(self.whole, tiling, self.itemsizes, self.link, lambda tile: step_s)


def chosen(demand: Demand) -> Tiling:
    """Return the tiling for a demand; DeviceError where not even the smallest fits."""
    whole = demand.whole
    if whole.m == 1 or whole.n == 1:
        return _of_vector(demand)
    fitting = _compared(demand)
    if not fitting:
        raise _too_small(demand)
    return min(fitting, key=lambda one: (demand.forecast(one).seconds, demand.memory(one)))


def _of_vector(demand: Demand) -> Tiling:
    """Return the tiling of a matrix by a vector: panels in the order in which the matrix lies."""
    whole, left_is_matrix = demand.whole, demand.whole.n == 1
    rows = whole.m if left_is_matrix else whole.k
    cols = whole.k if left_is_matrix else whole.n
    itemsize = demand.itemsizes[0 if left_is_matrix else 1]
    slow = demand.slow_left if left_is_matrix else demand.slow_right
    nbytes = float(PANEL_BYTES)
    while nbytes >= EDGE * itemsize:
        tall, wide = _panel(rows, cols, slow, nbytes / itemsize)
        tile = Sizes(tall, 1, wide) if left_is_matrix else Sizes(1, wide, tall)
        counts = Tiling(tile, 1, 1, 1).counts(whole)
        few = min(FEW_SLOTS, max(counts.m * counts.k, counts.k * counts.n))
        vector = tile.k * demand.itemsizes[1 if left_is_matrix else 0]
        parts = min(counts.k, max(FEW_SLOTS, int(demand.budget / 4 / vector)))
        tiling = Tiling(
            tile,
            few if left_is_matrix else parts,
            parts if left_is_matrix else few,
            min(16, counts.m * counts.n),
        )
        if demand.memory(tiling) <= demand.budget:
            return tiling
        nbytes /= 2
    raise _too_small(demand)


def of_rows(demand: Demand, *, in_left: bool) -> Tiling:
    """Return the tiling where one operand comes in whole stored rows; the other stays as a whole.

    in_left: it is the left one. DeviceError where that does not fit.
    """
    whole = demand.whole
    slow = demand.slow_left if in_left else demand.slow_right
    along_k = slow == (1 if in_left else 0)  # stored rows follow each other along the sum
    lines = whole.k if along_k else whole.m if in_left else whole.n
    length = (whole.m if in_left else whole.n) if along_k else whole.k
    itemsize = demand.itemsizes[0 if in_left else 1]
    width = whole.n if in_left else whole.m  # of the other operand: columns at a time
    while width:
        tall = _edged(max(1.0, PANEL_BYTES / max(1.0, length * itemsize)), lines)
        while tall:
            tiling = _rows_tiling(demand, tall, width, in_left=in_left, along_k=along_k)
            if demand.memory(tiling) <= demand.budget:
                return tiling
            tall //= 2
        width //= 2
    raise _too_small(demand)


def _rows_tiling(demand: Demand, tall: int, width: int, *, in_left: bool, along_k: bool) -> Tiling:
    whole = demand.whole
    across = whole.m if in_left else whole.n
    mine, depth = (across, tall) if along_k else (tall, whole.k)
    tile = Sizes(mine, width, depth) if in_left else Sizes(width, mine, depth)
    counts = Tiling(tile, 1, 1, 1).counts(whole)
    panels = counts.k if along_k else counts.m if in_left else counts.n
    few, parts = min(FEW_SLOTS, panels), counts.k
    outs = min(OUT_SLOTS, counts.m * counts.n)
    return Tiling(tile, few if in_left else parts, parts if in_left else few, outs)


def _panel(rows: int, cols: int, slow: int, elements: float) -> tuple[int, int]:
    """Return rows and columns of about so many elements: whole lines, or parts of single ones."""
    lines, length = (rows, cols) if slow == 0 else (cols, rows)
    if length > elements:
        tall, wide = 1, _edged(elements, length)
    else:
        tall, wide = _edged(elements / max(1, length), lines), length
    return (tall, wide) if slow == 0 else (wide, tall)


def _edged(wanted: float, most: int) -> int:
    size = int(wanted)
    if size >= most:
        return most
    return max(1, size - size % EDGE if size > EDGE else size)


def _compared(demand: Demand) -> list[Tiling]:
    """Return tilings that fit: of tiles about square, those with the least traffic first seen."""
    whole = demand.whole
    depths = {whole.k, *(depth for depth in EDGES if depth < whole.k)}
    tiles = {
        Sizes(min(height, whole.m), min(width, whole.n), depth)
        for height in EDGES
        for width in EDGES
        for depth in depths
        if max(height, width) <= 4 * min(height, width)
    }
    found: list[Tiling] = []
    for tile in sorted(tiles, key=lambda one: (_traffic(demand, one), one.m, one.n, one.k)):
        if math.prod(_counts(whole, tile)) > MOST_STEPS and found:
            continue
        found += [one for one in _slotted(demand, tile) if demand.memory(one) <= demand.budget]
        if len(found) >= MOST_COMPARED:
            break
    return found


def _traffic(demand: Demand, tile: Sizes) -> tuple[bool, float]:
    """Return bytes that go over the link if nothing is kept; a few larger tiles hide nothing."""
    whole, (left, right, out) = demand.whole, demand.itemsizes
    counts = _counts(whole, tile)
    held = tile.m * tile.k * left + tile.k * tile.n * right + tile.m * tile.n * out
    moved = counts[1] * whole.m * whole.k * left + counts[0] * whole.k * whole.n * right
    return held > demand.budget / 2, moved + whole.k / tile.k * whole.m * whole.n * out / 16


def _counts(whole: Sizes, tile: Sizes) -> tuple[int, int, int]:
    counts = Tiling(tile, 1, 1, 1).counts(whole)
    return counts.m, counts.n, counts.k


def _slotted(demand: Demand, tile: Sizes) -> Iterator[Tiling]:
    """Yield the tile with two slots a side at least where there are panels, the rest shared out."""
    tiles_m, tiles_n, parts = _counts(demand.whole, tile)
    most_left, most_right = tiles_m * parts, parts * tiles_n
    outs = min(OUT_SLOTS, tiles_m * tiles_n)
    of_left = tile.m * tile.k * demand.itemsizes[0]
    of_right = tile.k * tile.n * demand.itemsizes[1]
    for left in sorted({min(most_left, n) for n in (2, parts + 1, 2 * parts)}):
        rest = demand.budget - demand.memory(Tiling(tile, left, 0, outs))
        right = min(most_right, int(rest // max(1.0, of_right)))
        if right < min(2, most_right):
            continue
        rest -= right * of_right
        more = min(most_left, left + int(rest // max(1.0, of_left)))
        yield Tiling(tile, more, right, outs)


def _too_small(demand: Demand) -> DeviceError:
    whole = demand.whole
    return DeviceError(
        f"a product of {whole.m} x {whole.k} and {whole.k} x {whole.n} finds no room in the "
        f"{demand.budget:,} bytes that it may take on the GPU, not even panel by panel. Free GPU "
        "memory or raise GEMMULE_DEVICE_BUDGET."
    )
