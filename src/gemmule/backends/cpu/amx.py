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
from typing import Any, NamedTuple

from gemmule.backends.cpu.intrinsics import declare
from gemmule.backends.cpu.jit import Intrinsic, kernel
from gemmule.backends.cpu.simd import (
    LANES,
    Value,
    fused,
    load_vector,
    masked_load,
    operation,
    splat,
    store_vector,
    vector_type,
    void,
)
from gemmule.backends.cpu.target import missing_features

TILE_ROWS = 16
TILE_BYTES = 1024

# Linux's arch_prctl on x86-64, and what it is asked for: the state component of tile data.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18

Shape = tuple[int, int]  # rows, bytes of a row


class AmxJob(NamedTuple):
    """What a product works on: addresses, steps in bytes, counts.

    A chunk is 64 bytes of a row, and one row of scales has `groups` of them, `scale_step` elements
    from the next row's (0: one scale for all). chunks_per_group: chunks from one change of scales
    to the next. x holds for every sixteen columns of the result `panel_bytes` of packed
    activations. While rows are in work, lines are asked for, `line_step` bytes apart and from one
    chunk to the next `line_on` bytes on: from the rows below on, and for float activations from
    `line_ahead` bytes behind where the rows begin. Those also need factor: bits of a float32 that
    sums are multiplied by; window: address of tables.
    """

    codes: int
    row_bytes: int
    m: int
    scales: int
    zeros: int
    scale_step: int
    groups: int
    chunks_per_group: int
    x: int
    panel_bytes: int
    y: int
    columns: int
    line_step: int
    line_on: int
    line_ahead: int = 0
    factor: int = 0
    window: int = 0


def missing_tiles(kind: str) -> str | None:
    """Return why kernels on tiles cannot run here, or None; `kind` is ``int8`` or ``bf16``.

    Asks the system for permission where the processor has tiles.
    """
    halves = ("avx512fp16",) if kind == "bf16" else ()  # codes become bfloat16 by way of float16
    reason = missing_features("avx512f", "avx512bw", "amx-tile", f"amx-{kind}", *halves)
    return _refused() if reason is None else reason


@functools.cache
def _refused() -> str | None:
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
        from llvmlite import ir
        from numba.core import cgutils

        kind = ir.VectorType(ir.IntType(8), 64)
        place = cgutils.alloca_once(builder, kind)
        builder.store(kind(block), place, align=1)
        _tile_call(builder, "ldtilecfg", builder.bitcast(place, ir.IntType(8).as_pointer()))

    return operation(f"configured {shapes}", void, "", emit)


@functools.cache
def released() -> Intrinsic:
    """Return ``f()``: forget the tiles of this thread."""

    def emit(builder: Any) -> None:
        _tile_call(builder, "tilerelease")

    return operation("released", void, "", emit)


def load_tile(builder: Any, tile: int, address: Value, step: Value | int, bytes_on: int) -> None:
    """Emit a load of a tile from rows `step` bytes apart; 0 repeats one row."""
    _move(builder, "tileloadd64", tile, address, step, bytes_on)


def store_tile(builder: Any, tile: int, address: Value, bytes_on: int) -> None:
    """Emit a store of a tile to rows 64 bytes apart."""
    _move(builder, "tilestored64", tile, address, 64, bytes_on)


def zero_tile(builder: Any, tile: int) -> None:
    """Emit zeros into a tile."""
    _tile_call(builder, "tilezero", tile)


def multiply_tiles(builder: Any, name: str, total: int, left: int, right: int) -> None:
    """Emit ``total += left * right`` by the dot product instruction called `name`."""
    _tile_call(builder, name, total, left, right)


def _move(
    builder: Any, name: str, tile: int, address: Value, step: Value | int, bytes_on: int
) -> None:
    from llvmlite import ir

    place = builder.add(address, address.type(bytes_on))
    pointer = builder.inttoptr(place, ir.IntType(8).as_pointer())
    _tile_call(builder, name, tile, pointer, address.type(step) if isinstance(step, int) else step)


def _tile_call(builder: Any, name: str, *arguments: Value | int) -> None:
    """Emit a call of one of LLVM's tile functions; integers become its immediate bytes."""
    from llvmlite import ir

    byte = ir.IntType(8)
    values = [byte(a) if isinstance(a, int) else a for a in arguments]
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    builder.call(declare(builder, f"llvm.x86.{name}", kind), values)


def spread(builder: Any, address: Value, bytes_on: int) -> Value:
    """Emit the float at an address in every lane; LLVM folds it into the next instruction."""
    from llvmlite import ir

    place = builder.add(address, address.type(bytes_on))
    return splat(
        builder, builder.load(builder.inttoptr(place, ir.FloatType().as_pointer()), align=4)
    )


def row_of_codes(
    builder: Any, address: Value, step: Value, i: int, edge: tuple[Value, Value] | None
) -> Value:
    """Emit a load of 64 bytes of the i-th row.

    edge: the number of the last row, which stands for those behind it, and how many bytes of a row
    there are; None: all sixteen rows and 64 bytes are there, which takes half the instructions.
    """
    from llvmlite import ir

    row = address.type(i)
    if edge is None:
        start = builder.add(address, builder.mul(row, step))
        kind = ir.VectorType(ir.IntType(8), 64)
        return builder.load(builder.inttoptr(start, kind.as_pointer()), align=1)
    last, count = edge
    row = builder.select(builder.icmp_signed("<=", row, last), row, last)
    start = builder.add(address, builder.mul(row, step))
    return masked_load(builder, start, ir.IntType(8), 64, count)


def load_long(builder: Any, address: Value, index: int) -> Value:
    """Emit a load of the index-th int64 at an address."""
    from llvmlite import ir

    place = builder.add(address, address.type(8 * index))
    return builder.load(builder.inttoptr(place, ir.IntType(64).as_pointer()), align=8)


def fetch_line(builder: Any, address: Value) -> None:
    """Emit a request for the line at any address, into the second level."""
    from llvmlite import ir

    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = declare(builder, "llvm.prefetch.p0", kind)
    builder.call(function, [builder.inttoptr(address, byte), word(0), word(2), word(1)])


@functools.cache
def fetch_lines() -> Intrinsic:
    """Return ``f(address, step_bytes)``: ask for sixteen lines."""

    def emit(builder: Any, address: Value, step: Value) -> None:
        for i in range(TILE_ROWS):
            fetch_line(builder, builder.add(address, builder.mul(step, step.type(i))))

    return operation("fetch_lines", void, "ii", emit)


def _copy(builder: Any, source: Value, target: Value, count: Value) -> None:
    from llvmlite import ir

    lanes = vector_type("int32")
    numbers = splat(builder, builder.trunc(count, ir.IntType(32)))
    mask = builder.icmp_signed("<", lanes(list(range(LANES))), numbers)
    row = load_vector(builder, source, "float32")
    pointer = builder.inttoptr(target, row.type.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [row.type, pointer.type, ir.IntType(32), mask.type])
    function = declare(builder, "llvm.masked.store.v16f32.p0", kind)
    builder.call(function, [row, pointer, ir.IntType(32)(1), mask])


_copy_some = operation("amx copy_some", void, "iii", _copy)  # the first `count` of 16 floats


@kernel
def put_rows(job: AmxJob, totals: int, row: int, last: int, panel: int) -> None:
    """Write rows of sixteen totals where they belong in the result."""
    for i in range(last + 1):
        target = job.y + 4 * ((row + i) * job.columns + LANES * panel)
        _copy_some(totals + 64 * i, target, job.columns - LANES * panel)


def add_to_totals(builder: Any, parts: list[Value], scales: Value, totals: Value) -> None:
    """Emit ``totals[i] += parts[i] * scales[i]`` for rows of a tile, all in memory but `parts`."""
    for i, part in enumerate(parts):
        total = load_vector(builder, totals, "float32", 64 * i)
        total = fused(builder, part, spread(builder, scales, 4 * i), total)
        store_vector(builder, total, totals, 64 * i)
