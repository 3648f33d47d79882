"""Orders in which the codes of a quantised matrix lie in memory.

A layout is a pure bijection between the canonical order ``row`` and another order of the same
codes. It never looks at the values of scales or zero points, but says in which order they lie.
Every layout stores its codes as a 2-D uint8 array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Codes: TypeAlias = NDArray[np.uint8]

_BLOCK_ELEMENTS = 1 << 18
"""Elements handled at a time: temporaries stay in the L2 cache and far below the matrix."""

_TILE_ROWS = 16
_TILE_BYTES = 512
"""One mma16 tile: 32 lanes of one 16-byte load each."""


def row_blocks(rows: int, columns: int, elements: int = _BLOCK_ELEMENTS) -> Iterator[slice]:
    """Cut ``rows`` rows of ``columns`` elements into consecutive slices, cache-sized by default.

    Yields nothing when there is no element at all, however many rows an empty matrix has.
    """
    if columns == 0:
        return
    step = max(1, elements // columns)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def pack_nibbles(codes: Codes) -> Codes:
    """Pack 4-bit codes two a byte along the last axis: low nibble = even column.

    ``codes``: uint8 ``(m, n)``, values 0..15. Returns ``(m, ceil(n / 2))``; with odd n the high
    nibble of the last column is 0. Raises ValueError for a code above 15.

    >>> pack_nibbles(np.array([[1, 2, 15]], np.uint8)).tolist()
    [[33, 15]]
    """
    if 0 not in codes.shape and codes.max() > 15:
        raise ValueError(f"4-bit codes lie in 0..15, got {codes.max()}; quantise with bits=8")
    packed = codes[:, 0::2] + 0  # a copy, of NumPy's, PyTorch's and CuPy's arrays alike
    packed[:, : codes.shape[1] // 2] |= codes[:, 1::2] << 4
    return packed


def unpack_nibbles(packed: Codes, columns: int) -> Codes:
    """Undo `pack_nibbles`: uint8 ``(m, ceil(columns / 2))`` to ``(m, columns)`` of values 0..15.

    >>> unpack_nibbles(np.array([[33, 15]], np.uint8), 3).tolist()
    [[1, 2, 15]]
    """
    codes = np.empty((packed.shape[0], columns), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, 0::2])
    np.right_shift(packed[:, : columns // 2], 4, out=codes[:, 1::2])
    return codes


@dataclass(frozen=True, slots=True)
class Layout:
    """A named order of the codes of a stored ``(m, n)`` matrix of ``bits``-bit codes.

    - ``scale_order``: how scales and zero points ``(m, n_groups)`` lie beside such codes: ``"C"``,
      a row's next to each other, or ``"F"``, those of neighbouring rows in one group.

    - ``storage_shape(m, n, bits)``: the shape of the 2-D uint8 storage.
    - ``from_row(row, m, n, bits)`` and ``to_row(storage, m, n, bits)``: inverse to each other on
      row storage and on storage whose padding is zero. Both leave their argument unchanged.
    - ``padding_is_zero(storage, m, n, bits)``: whether all bits that hold no code are zero, that
      is whether ``storage`` is the image of some row storage.

    Arguments are trusted here; `gemmule.quant.matrix.QuantizedMatrix.from_parts` checks them.
    """

    name: str
    idea: str
    storage_shape: Callable[[int, int, int], tuple[int, int]]
    from_row: Callable[[Codes, int, int, int], Codes]
    to_row: Callable[[Codes, int, int, int], Codes]
    padding_is_zero: Callable[[Codes, int, int, int], bool]
    scale_order: Literal["C", "F"] = "C"


def row_codes(row: Codes, rows: slice, n: int, bits: int) -> Codes:
    """Return the codes of some rows of row storage, one a byte: uint8 ``(rows, n)``.

    For 8-bit codes this is a view of ``row``.
    """
    return unpack_nibbles(row[rows], n) if bits == 4 else row[rows]


def _row_shape(m: int, n: int, bits: int) -> tuple[int, int]:
    return (m, (n + 1) // 2) if bits == 4 else (m, n)


def _row_identity(storage: Codes, m: int, n: int, bits: int) -> Codes:
    return storage


def _row_padding_is_zero(storage: Codes, m: int, n: int, bits: int) -> bool:
    return bits == 8 or n % 2 == 0 or not bool(np.any(storage[:, -1] >> 4))


# mma16: fragment order for mma.m16n8k16 with the weights as the 16-row A operand.
#
# A tile is 16 rows by 64 columns (4-bit) or 32 columns (8-bit). Its 512 bytes are 32 lanes of 16
# bytes, so that a warp fetches a tile with one coalesced 16-byte load a lane. Lane 4 g + t owns
# rows g and g + 8 and the columns 16 t .. 16 t + 15 (8 t .. 8 t + 7 for 8-bit) of the tile.
# Step j of the lane's 4 (2) mma uses its columns 4 j .. 4 j + 3: column 4 j + 2 p + e of row
# g + 8 hi is half e of the A register a[hi + 2 p]. The mma therefore sees the columns permuted;
# a kernel permutes x alike, by giving the lane x at the same four columns as b0 and b1.
#   4-bit: step j is the 32-bit word j; the code for (p, hi, e) sits at bit 16 e + 8 p + 4 hi, so
#          that (word >> 4 r) & 0x000f000f holds both halves of register a[r].
#   8-bit: step j is the words 2 j + p; the code for (hi, e) sits at bit 16 e + 8 hi, so that
#          (word >> 8 hi) & 0x00ff00ff holds both halves of register a[hi + 2 p].
# Rows and columns that pad the last tiles hold code 0.


# Codes that are floats have other bits in each half of a word, so that few shifts bring them to
# where a float16 or a bfloat16 has its own (`woven`).


def _mma16_tile_columns(bits: int) -> int:
    return 64 if bits == 4 else 32


def _mma16_shape(m: int, n: int, bits: int) -> tuple[int, int]:
    return -(-m // _TILE_ROWS), -(-n // _mma16_tile_columns(bits)) * _TILE_BYTES


def _mma16_pack(codes: Codes, bits: int) -> Codes:
    """Whole tiles of one-a-byte codes ``(16 T, tile_columns B)`` to storage ``(T, 512 B)``."""
    tiles = codes.shape[0] // _TILE_ROWS
    # axes: tile row, hi, g, tile column, t, j, p, e
    lanes = codes.reshape(tiles, 2, 8, -1, 4, _mma16_tile_columns(bits) // 16, 2, 2)
    if bits == 4:
        both_rows: Codes = lanes[:, 0] | (lanes[:, 1] << np.uint8(4))
        return both_rows.transpose(0, 2, 1, 3, 4, 6, 5).reshape(tiles, -1)
    return lanes.transpose(0, 3, 2, 4, 5, 6, 7, 1).reshape(tiles, -1)


def _mma16_unpack(storage: Codes, bits: int) -> Codes:
    """Undo `_mma16_pack`."""
    tiles = storage.shape[0]
    columns = storage.shape[1] // _TILE_BYTES * _mma16_tile_columns(bits)
    if bits == 4:
        # axes: tile row, tile column, g, t, j, e, p
        both_rows = storage.reshape(tiles, -1, 8, 4, 4, 2, 2).transpose(0, 2, 1, 3, 4, 6, 5)
        lanes = np.stack((both_rows & 15, both_rows >> 4), axis=1)
    else:
        # axes: tile row, tile column, g, t, j, p, e, hi
        lanes = storage.reshape(tiles, -1, 8, 4, 2, 2, 2, 2).transpose(0, 7, 2, 1, 3, 4, 5, 6)
    return lanes.reshape(tiles * _TILE_ROWS, columns)


def _mma16_from_row(row: Codes, m: int, n: int, bits: int) -> Codes:
    storage = np.empty(_mma16_shape(m, n, bits), np.uint8)
    columns = storage.shape[1] // _TILE_BYTES * _mma16_tile_columns(bits)
    for tiles in row_blocks(storage.shape[0], _TILE_ROWS * columns):
        rows = slice(tiles.start * _TILE_ROWS, min(tiles.stop * _TILE_ROWS, m))
        padded = np.zeros(((tiles.stop - tiles.start) * _TILE_ROWS, columns), np.uint8)
        padded[: rows.stop - rows.start, :n] = row_codes(row, rows, n, bits)
        storage[tiles] = _mma16_pack(padded, bits)
    return storage


def _mma16_to_row(storage: Codes, m: int, n: int, bits: int) -> Codes:
    row = np.empty(_row_shape(m, n, bits), np.uint8)
    for tiles in row_blocks(storage.shape[0], _TILE_ROWS * n):
        rows = slice(tiles.start * _TILE_ROWS, min(tiles.stop * _TILE_ROWS, m))
        codes = _mma16_unpack(storage[tiles], bits)[: rows.stop - rows.start, :n]
        row[rows] = pack_nibbles(codes) if bits == 4 else codes
    return row


def _mma16_padding_is_zero(storage: Codes, m: int, n: int, bits: int) -> bool:
    if storage.size == 0:
        return True
    rows, columns = m % _TILE_ROWS, n % _mma16_tile_columns(bits)
    if rows and bool(np.any(_mma16_unpack(storage[-1:], bits)[rows:])):
        return False
    return not columns or not bool(
        np.any(_mma16_unpack(storage[:, -_TILE_BYTES:], bits)[:, columns:])
    )


def woven(storage: Codes) -> Codes:
    """Return mma16 storage of 4-bit codes with each one's sign apart, as kernels read floats.

    Of the four codes of 16 bits, code r goes from bit 4 r on to bit 15 - r, its highest, and from
    bit (6 + 3 r) % 12 on, the other three. Zeros stay zeros.

    >>> woven(np.array([[0x08, 0x00], [0x71, 0x00]], np.uint8)).tolist()
    [[0, 128], [64, 14]]
    """
    halves = storage.view("<u2")
    found = np.zeros_like(halves)
    for r in range(4):
        found |= (halves >> (4 * r + 3) & 1) << (15 - r)
        found |= (halves >> 4 * r & 7) << (6 + 3 * r) % 12
    return found.view(np.uint8)


def unwoven(storage: Codes) -> Codes:
    """Undo `woven`."""
    halves = storage.view("<u2")
    found = np.zeros_like(halves)
    for r in range(4):
        found |= (halves >> (15 - r) & 1) << (4 * r + 3)
        found |= (halves >> (6 + 3 * r) % 12 & 7) << 4 * r
    return found.view(np.uint8)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            Layout(
                "row",
                "rows one after the other; 4-bit: low nibble = even column",
                _row_shape,
                _row_identity,
                _row_identity,
                _row_padding_is_zero,
            ),
            Layout(
                "mma16",
                "one coalesced 16-byte load a lane yields A fragments of mma.m16n8k16",
                _mma16_shape,
                _mma16_from_row,
                _mma16_to_row,
                _mma16_padding_is_zero,
                scale_order="F",
            ),
        )
    }
)
"""Every layout by name. Files always hold ``row``."""


def get_layout(name: str) -> Layout:
    """Return the layout called ``name``; ValueError, with the known names, when there is none."""
    try:
        return LAYOUTS[name]
    except (KeyError, TypeError):
        known = ", ".join(repr(known) for known in LAYOUTS)
        raise ValueError(f"layout is {name!r}; known layouts are {known}") from None
