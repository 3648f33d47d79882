"""AMX tile registers in kernels: permission to use them, their shapes, LLVM code of single steps.

A tile register holds 16 rows of 64 bytes. Kernels name the eight registers by number and give them
shapes before their first use (`configured`); both are per thread, so a task does so at its start,
and gives the registers back at its end (`released`), which spares the system saving them.

Linux wants a process to ask before its first use of a tile. `missing_tiles` asks, once; compiled
kernels come from the disk cache too, so whoever binds one calls it first.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import Any

from gemmule.backends.cpu import ir
from gemmule.backends.cpu.intrinsics import declare, stack_room
from gemmule.backends.cpu.jit import Intrinsic, operation
from gemmule.backends.cpu.simd import (
    Value,
)
from gemmule.backends.cpu.target import missing_features

TILE_ROWS = 16
TILE_BYTES = 1024

# Linux's arch_prctl on x86-64, and what it is asked for: the state component of tile data.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

Shape = tuple[int, int]  # rows, bytes of a row


def missing_tiles(kind: str) -> str | None:
    """Return why kernels on tiles cannot run here, or None; `kind` is ``int8`` or ``bf16``.

    Asks the system for permission where the processor has tiles.
    """
    halves = ("avx512fp16",) if kind == "bf16" else ()  # codes become bfloat16 by way of float16
    reason = missing_features("avx512f", "avx512bw", "amx-tile", f"amx-{kind}", *halves)
    return refusal() if reason is None else reason


@functools.cache
def refusal() -> str | None:
    """Ask for tiles, for this process and its future children; return why they are refused."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "tile registers are asked for as Linux on x86-64 wants it only"
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_long(v) for v in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    if libc.syscall(*arguments) == 0:
        return None
    return f"the system does not permit tile registers (error {ctypes.get_errno()})"


@functools.cache
def configured(*shapes: Shape) -> Intrinsic:
    """Return ``f()``: give tile i the shape ``shapes[i]``; palette 1 has eight tiles."""
    rows = [count for count, _ in shapes]
    widths = [width for _, width in shapes]
    block = [1] + [0] * 63
    block[16 : 16 + 2 * len(widths)] = [part for w in widths for part in (w & 255, w >> 8)]
    block[48 : 48 + len(rows)] = rows

    def emit(builder: Any) -> None:
        kind = ir.VectorType(ir.IntType(8), 64)
        place = stack_room(builder, kind)
        builder.store(kind(block), place, align=1)
        _tile_call(builder, "ldtilecfg", builder.bitcast(place, ir.IntType(8).as_pointer()))

    return operation(f"configured {shapes}", emit)


@functools.cache
def released() -> Intrinsic:
    """Return ``f()``: forget the tiles of this thread."""

    def emit(builder: Any) -> None:
        _tile_call(builder, "tilerelease")

    return operation("released", emit)


def load_tile(builder: Any, tile: int, address: Value, step: Value | int, bytes_on: int) -> None:
    """Emit a load of a tile from rows `step` bytes apart; 0 repeats one row."""
    _move(builder, "tileloadd64", tile, address, step, bytes_on)


def stream_tile(builder: Any, tile: int, address: Value, step: Value | int, bytes_on: int) -> None:
    """Emit a load of a tile that is read once, and shall not take the place of others in L1."""
    _move(builder, "tileloaddt164", tile, address, step, bytes_on)


def store_tile(builder: Any, tile: int, address: Value, bytes_on: int, step: int = 64) -> None:
    """Emit a store of a tile to rows `step` bytes apart."""
    _move(builder, "tilestored64", tile, address, step, bytes_on)


def zero_tile(builder: Any, tile: int) -> None:
    """Emit zeros into a tile."""
    _tile_call(builder, "tilezero", tile)


def multiply_tiles(builder: Any, name: str, total: int, left: int, right: int) -> None:
    """Emit ``total += left * right`` by the dot product instruction called `name`."""
    _tile_call(builder, name, total, left, right)


def _move(
    builder: Any, name: str, tile: int, address: Value, step: Value | int, bytes_on: int
) -> None:
    place = builder.add(address, address.type(bytes_on))
    pointer = builder.inttoptr(place, ir.IntType(8).as_pointer())
    _tile_call(builder, name, tile, pointer, address.type(step) if isinstance(step, int) else step)


def _tile_call(builder: Any, name: str, *arguments: Value | int) -> None:
    """Emit a call of one of LLVM's tile functions; integers become its immediate bytes."""
    byte = ir.IntType(8)
    values = [byte(a) if isinstance(a, int) else a for a in arguments]
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    builder.call(declare(builder, f"llvm.x86.{name}", kind), values)
