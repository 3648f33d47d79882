"""Cutting arrays into pieces of one copy each: long ones in parts, short ones together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
GAP_BYTES = 64  # between arrays that go in one copy: less than what they are aligned to


@dataclass(frozen=True, slots=True)
class Transfer:
    """Lines of a host array, to be copied to a device address without what lies between them.

    array: 2-D, its first axis the lines; direct: it lies in page-locked memory.
    """

    array: Array
    address: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """What one copy brings to a device address.

    parts: arrays, each with the byte of the piece at which it begins; direct: its one part lies in
    page-locked memory, and no slot is needed.
    """

    parts: tuple[tuple[Array, int], ...]
    address: int
    nbytes: int
    direct: bool = False


def pieces(panel: list[Transfer], sizes: Iterator[int]) -> Iterator[Piece]:
    """Cut a panel into pieces, each of the next of `sizes` in bytes; what is direct may stay whole.

    Transfers that follow each other at the device share pieces, whatever lies in the few bytes
    between them: a copy costs a start, and a slot as long as it is held.
    """
    cut = _Cut(sizes)
    for transfer in panel:
        array = transfer.array
        if array.size == 0:
            continue
        lines, length = array.shape
        in_line = length == 1 or array.strides[1] == array.itemsize
        if (
            transfer.direct
            and in_line
            and (lines == 1 or array.strides[0] >= length * array.itemsize)
        ):
            yield from cut.finished()
            yield Piece(((array, 0),), transfer.address, array.nbytes, direct=True)
        else:
            yield from cut.taken(transfer)
    yield from cut.finished()


class _Cut:
    """The piece that is being put together."""

    def __init__(self, sizes: Iterator[int]) -> None:
        self.sizes, self.parts = sizes, list[tuple[Array, int]]()
        self.address = self.used = self.size = 0

    def taken(self, transfer: Transfer) -> Iterator[Piece]:
        """Yield the pieces that a transfer makes whole."""
        array, itemsize = transfer.array, transfer.array.itemsize
        lines, length = array.shape
        first = start = 0
        while first < lines:
            address = transfer.address + (first * length + start) * itemsize
            if not 0 <= address - self.address - self.used < GAP_BYTES:
                yield from self.finished()
            if not self.parts:
                self.address, self.used, self.size = address, 0, next(self.sizes)
            at = address - self.address
            elements = (self.size - at) // itemsize
            if self.parts and elements < (length if start == 0 else 1):
                yield from self.finished()
                continue
            whole = start == 0 and elements >= length
            tall, wide = (elements // length, length) if whole else (1, max(1, elements))
            part = array[first : first + tall, start : start + wide]
            self.parts.append((part, at))
            self.used = at + part.nbytes
            start += wide
            if start >= length:
                first, start = first + tall, 0

    def finished(self) -> Iterator[Piece]:
        """Yield what there is, and begin anew."""
        if self.parts:
            yield Piece(tuple(self.parts), self.address, self.used)
        self.parts = []
