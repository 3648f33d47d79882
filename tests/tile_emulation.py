"""Tile registers in memory: the kernels of matrix products by AMX run on any processor.

Takes the place of the operations of `_tile_steps`; the blocks, the packing and the host's side are
the product's own. Each block has memory of its own that stands for its registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gemmule.backends.cpu import amx
from gemmule.backends.cpu.intrinsics import load, store
from gemmule.backends.cpu.jit import Kernel, kernel
from gemmule.core.caches import forget_plans
from gemmule.rungs.matmul.cpu import _tile_blocks, _tile_steps, tile_products
from gemmule.rungs.quantized.cpu import rounded_tiles
from gemmule.rungs.quantized.cpu.blocks import rounded

WORDS = _tile_steps.SUMS_BYTES // 4


def _start() -> Kernel:
    write = store("int32", "int32")

    @kernel
    def start(registers: int) -> None:
        for i in range(WORDS):
            write(registers, i, 0)

    return start


def _moved(keep: bool) -> Kernel:
    read, write = load("int32", "int32"), store("int32", "int32")
    pitch = _tile_steps.SUMS_PITCH

    @kernel
    def move(registers: int, sums: int) -> None:
        for i in range(WORDS):
            tile, row = i // 256, i % 256 // 16
            place = pitch * (tile // 2 * 16 + row) + tile % 2 * 16 + i % 16
            if keep:
                write(sums, place, read(registers, i))
            else:
                write(registers, i, read(sums, place))

    return move


def _add(pieces: tuple[int, int]) -> Kernel:
    """Sums of even and of odd terms apart, then both together, as the processor has it."""
    half, number, write = (
        load("bfloat16", "float32"),
        load("float32", "float32"),
        store("float32", "float32"),
    )
    of_a, of_b = pieces
    pairs = sum(1 << (of_b * a + b) for a, b in _tile_steps.PRODUCTS[pieces])

    @kernel
    def add(registers: int, a: int, b: int, panel_a: int, panel_b: int) -> None:
        for total in range(4):
            left, right = a + total // 2 * panel_a * of_a, b + total % 2 * panel_b * of_b
            for pair_of_pieces in range(of_a * of_b):
                if pairs >> pair_of_pieces & 1 == 0:
                    continue
                first, second = pair_of_pieces // of_b, pair_of_pieces % of_b
                for row in range(16):
                    for column in range(16):
                        even = odd = number(registers, 0) * 0
                        for pair in range(16):
                            one = left + 1024 * first + 64 * row + 4 * pair
                            two = right + 1024 * second + 64 * pair + 4 * column
                            even += half(one, 0) * half(two, 0)
                            odd += half(one, 1) * half(two, 1)
                        at = 256 * total + 16 * row + column
                        write(registers, at, number(registers, at) + (even + odd))

    return add


def _nothing(*shapes: Any) -> Kernel:
    @kernel
    def nothing() -> None:
        pass

    return nothing


@contextmanager
def emulated_tiles() -> Iterator[None]:
    """Let the rung run here; undone afterwards."""
    patch = pytest.MonkeyPatch()
    made = {pieces: _add(pieces) for pieces in _tile_steps.PRODUCTS}
    start, resume, keep, nothing = _start(), _moved(False), _moved(True), _nothing()
    patch.setattr(_tile_steps, "start_sums", lambda: start)
    patch.setattr(_tile_steps, "resume_rows", lambda: resume)
    patch.setattr(_tile_steps, "keep_rows", lambda: keep)
    patch.setattr(_tile_steps, "add_products", lambda pieces, streamed="": made[pieces])
    for module in (_tile_blocks, amx):
        patch.setattr(module, "configured", lambda *shapes: nothing)
        patch.setattr(module, "released", lambda: nothing)
    for rung in (tile_products, rounded_tiles):
        patch.setattr(rung, "missing_tiles", lambda kind: None)
    _forget()
    try:
        yield
    finally:
        patch.undo()
        _forget()


def _forget() -> None:
    for made in (_tile_blocks.block_shares, _tile_blocks.block_kernel, _tile_blocks.small_kernel):
        made.cache_clear()
    _tile_blocks.sums_kernel.cache_clear()
    for made in (rounded.groups_kernel, rounded.rows_kernel, rounded.columns_kernel):
        made.cache_clear()
    forget_plans()
