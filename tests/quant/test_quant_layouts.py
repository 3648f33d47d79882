"""Layouts are bijections, and mma16 is what mma.m16n8k16 wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmule.quant import layouts as layouts
from gemmule.quant.layouts import (
    LAYOUTS,
    get_layout,
    pack_nibbles,
    row_blocks,
    row_codes,
    unpack_nibbles,
)

pytestmark = pytest.mark.usefixtures("unwritten")

sizes = st.integers(0, 70)
any_bits = st.sampled_from([4, 8])


def random_row(m: int, n: int, bits: int, seed: int = 0) -> np.ndarray:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (m, n), dtype=np.uint8)
    return pack_nibbles(codes) if bits == 4 else codes


def test_every_byte_is_two_nibbles() -> None:
    low, high = np.arange(256) % 16, np.arange(256) // 16
    codes = np.stack((low, high), axis=1).astype(np.uint8)
    np.testing.assert_array_equal(pack_nibbles(codes)[:, 0], np.arange(256))
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(codes), 2), codes)
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(codes), 1), codes[:, :1])


def test_nibbles_above_15_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.\.15, got 16"):
        pack_nibbles(np.array([[3, 16]], np.uint8))


@given(sizes, sizes)
def test_odd_rows_end_in_a_zero_nibble(m: int, n: int) -> None:
    codes = np.random.default_rng(m).integers(0, 16, (m, n), dtype=np.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (m, (n + 1) // 2)
    np.testing.assert_array_equal(unpack_nibbles(packed, n), codes)
    if n % 2:
        assert not (packed[:, -1] >> 4).any()


@pytest.mark.parametrize("name", LAYOUTS)
@given(m=sizes, n=st.integers(0, 140), bits=any_bits, seed=st.integers(0, 9))
@settings(deadline=None)
def test_layouts_are_bijections(name: str, m: int, n: int, bits: int, seed: int) -> None:
    layout, row = get_layout(name), random_row(m, n, bits, seed)
    before = row.copy()
    storage = layout.from_row(row, m, n, bits)
    assert storage.shape == layout.storage_shape(m, n, bits)
    assert storage.dtype == np.uint8
    assert layout.padding_is_zero(storage, m, n, bits)
    np.testing.assert_array_equal(layout.to_row(storage, m, n, bits), row)
    np.testing.assert_array_equal(row, before)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("m", "n"), [(16, 64), (17, 65), (3, 31), (1, 1), (16, 65), (20, 64)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_stored_bit_is_a_code_bit_or_checked_padding(
    name: str, m: int, n: int, bits: int
) -> None:
    layout = get_layout(name)
    storage = layout.from_row(random_row(m, n, bits), m, n, bits)

    def codes(storage: np.ndarray) -> np.ndarray:
        return row_codes(layout.to_row(storage, m, n, bits), slice(None), n, bits)

    base, used = codes(storage).copy(), 0
    for index in range(storage.size):
        for bit in (0, 3, 4, 7):
            flipped = storage.copy()
            flipped.flat[index] ^= 1 << bit
            changed = not np.array_equal(codes(flipped), base)
            assert changed == layout.padding_is_zero(flipped, m, n, bits)
            used += changed
    assert used == m * n * bits // 2  # 4 of the 8 bits of each byte were tried


def test_a_layout_larger_than_a_block_is_a_bijection() -> None:
    m, n = 1003, 1501
    for bits in (4, 8):
        row = random_row(m, n, bits)
        storage = get_layout("mma16").from_row(row, m, n, bits)
        np.testing.assert_array_equal(get_layout("mma16").to_row(storage, m, n, bits), row)


def fragment_product(storage: np.ndarray, bits: int, x: np.ndarray) -> np.ndarray:
    """Do what a warp does: read words, cut out A registers, feed PTX's m16n8k16 fragments.

    Sixteen rows times ``x``. The fragment map is that of the PTX manual: lane 4 g + t holds in
    register a[r], half e, row g + 8 (r % 2) and column 2 t + e + 8 (r // 2); of B, in register
    b[r], half e, row 2 t + e + 8 r of the column it belongs to.
    """
    tile_columns, steps = (64, 4) if bits == 4 else (32, 2)
    words = storage.reshape(-1, 32, 16).view("<u4").astype(np.int64)
    y = np.zeros(16, np.int64)
    for tile, tile_words in enumerate(words):
        for j in range(steps):
            a, b = np.full((16, 16), -1, np.int64), np.full(16, -1, np.int64)
            for lane in range(32):
                g, t = divmod(lane, 4)
                first = tile * tile_columns + t * tile_columns // 4 + 4 * j
                for r in range(4):
                    if bits == 4:
                        register = (tile_words[lane, j] >> 4 * r) & 0x000F000F
                    else:
                        register = (tile_words[lane, 2 * j + r // 2] >> 8 * (r % 2)) & 0x00FF00FF
                    for e in range(2):
                        a[g + 8 * (r % 2), 2 * t + e + 8 * (r // 2)] = register >> 16 * e & 0xFFFF
                for r in range(2):
                    for e in range(2):
                        b[2 * t + e + 8 * r] = x[first + 2 * r + e]
            assert a.min() >= 0
            y += a @ b
    return y


def check_fragments(bits: int) -> None:
    n = 192
    codes = np.random.default_rng(bits).integers(0, 2**bits, (16, n), dtype=np.uint8)
    x = np.random.default_rng(9).integers(0, 1000, n)
    row = pack_nibbles(codes) if bits == 4 else codes
    storage = get_layout("mma16").from_row(row, 16, n, bits)
    np.testing.assert_array_equal(fragment_product(storage, bits, x), codes.astype(np.int64) @ x)


@pytest.mark.parametrize("bits", [4, 8])
def test_mma16_is_the_fragment_order_of_m16n8k16(bits: int) -> None:
    check_fragments(bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axes", [(0, 1), (8, 9), (16, 24)])
def test_the_fragment_check_kills_misplaced_bytes(
    bits: int, axes: tuple[int, int], fault: Callable[..., Any]
) -> None:
    def swapped(sound: Any, codes: np.ndarray, bits: int) -> np.ndarray:
        storage = sound(codes, bits).copy()
        first, second = axes
        storage[:, [first, second]] = storage[:, [second, first]]
        return storage

    fault(layouts, "_mma16_pack", swapped)
    with pytest.raises(AssertionError):
        check_fragments(bits)


def test_unknown_layouts_are_named() -> None:
    with pytest.raises(ValueError, match="'col'; known layouts are 'row', 'mma16'"):
        get_layout("col")
    with pytest.raises(ValueError, match="known layouts"):
        get_layout(["row"])  # type: ignore[arg-type]


def test_row_blocks_cover_every_row_once() -> None:
    for rows, columns in [(0, 5), (7, 1), (1000, 3000), (3, 1 << 20)]:
        covered = [i for block in row_blocks(rows, columns) for i in range(rows)[block]]
        assert covered == list(range(rows))
    assert list(row_blocks(1 << 40, 0)) == []
    for rows, columns, elements, sizes in [
        (7, 5, 10, [2, 2, 2, 1]),
        (7, 5, 14, [2, 2, 2, 1]),
        (3, 5, 4, [1, 1, 1]),
        (3, 5, 15, [3]),
    ]:
        found = [block.stop - block.start for block in row_blocks(rows, columns, elements)]
        assert found == sizes
