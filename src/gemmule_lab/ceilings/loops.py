"""The loops that reach a CPU's ceilings, written as LLVM code so that each load is the one named.

What is read is folded into sums that the loops return, else the compiler would leave it out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cpu.intrinsics import declare, stack_room, store
from gemmule.backends.cpu.jit import Intrinsic, kernel
from gemmule.backends.cpu.pool import in_pool
from gemmule.backends.cpu.simd import counted
from gemmule.backends.cpu.target import vector_bytes

STEP_BYTES = 256  # what one step of a loop takes from each stream
ACCUMULATORS = 16  # independent chains: enough for two multiply-adds a cycle of latency 4

Emit = Callable[[Any, Any, Any, Any], Any]


@functools.cache
def read_loop(streams: int, lanes: int) -> Callable[..., int]:
    """Return the kernel ``f(address, 0, length, step, threads)`` that reads.

    Thread t reads `streams` consecutive stretches of `length` bytes (a multiple of 256) side by
    side, beginning at ``address + t * step``, by loads of `lanes` 8-byte words.
    """

    def emit(builder: Any, address: Any, other: Any, length: Any) -> Any:
        from llvmlite import ir

        word = ir.VectorType(ir.IntType(64), lanes) if lanes > 1 else ir.IntType(64)
        starts = [builder.add(address, builder.mul(length, length.type(s))) for s in range(streams)]
        sums = [_cell(builder, word(None)) for _ in range(2)]
        with counted(builder, builder.udiv(length, length.type(STEP_BYTES))) as turn:
            offset = builder.mul(turn, length.type(STEP_BYTES))
            for start in starts:
                for inside in range(0, STEP_BYTES, 8 * lanes):
                    place = builder.add(builder.add(start, offset), length.type(inside))
                    total = sums[inside // (8 * lanes) % 2]
                    value = _load(builder, place, word)
                    builder.store(builder.xor(builder.load(total), value), total)
        return _fold(builder, builder.xor(*(builder.load(s) for s in sums)))

    return _per_thread(f"read {streams} {lanes}", emit)


@functools.cache
def copy_loop(streaming: bool) -> Callable[..., int]:
    """Return the kernel ``f(address, other, length, step, threads)`` that copies.

    Thread t copies `length` bytes (a multiple of 256) from ``address + t * step`` to `other` bytes
    further on, both aligned to 64; `streaming` stores pass the cache by.
    """
    lanes = vector_bytes() // 8

    def emit(builder: Any, address: Any, other: Any, length: Any) -> Any:
        from llvmlite import ir

        word = ir.VectorType(ir.IntType(64), lanes)
        hint = builder.module.add_metadata([ir.IntType(32)(1)])
        with counted(builder, builder.udiv(length, length.type(STEP_BYTES))) as turn:
            offset = builder.mul(turn, length.type(STEP_BYTES))
            for inside in range(0, STEP_BYTES, 8 * lanes):
                source = builder.add(builder.add(address, offset), length.type(inside))
                target = builder.inttoptr(builder.add(source, other), word.as_pointer())
                store = builder.store(_load(builder, source, word), target, align=8 * lanes)
                if streaming:
                    store.set_metadata("nontemporal", hint)
        return length

    return _per_thread(f"copy {streaming} {lanes}", emit)


@functools.cache
def fma_loop(dtype: str, lanes: int) -> Callable[..., int]:
    """Return the kernel ``f(0, 0, steps, 0, threads)``: per step one FMA on every accumulator."""

    def emit(builder: Any, address: Any, other: Any, length: Any) -> Any:
        from llvmlite import ir

        element = ir.FloatType() if dtype == "float32" else ir.DoubleType()
        vector = ir.VectorType(element, lanes)
        half = vector([0.5] * lanes)
        # Each chain starts elsewhere: equal ones would be merged into a single chain.
        starts = [vector([i / 16] * lanes) for i in range(ACCUMULATORS)]
        cells = [_cell(builder, start) for start in starts]
        shape = ir.FunctionType(vector, [vector] * 3)
        name = f"llvm.fma.v{lanes}f{32 if dtype == 'float32' else 64}"
        fma = declare(builder, name, shape)
        with counted(builder, length):
            for cell in cells:
                builder.store(builder.call(fma, [builder.load(cell), half, half]), cell)
        total = functools.reduce(builder.fadd, [builder.load(cell) for cell in cells])
        words = ir.VectorType(ir.IntType(64), lanes * (4 if dtype == "float32" else 8) // 8)
        return _fold(builder, builder.bitcast(total, words))

    return _per_thread(f"fma {dtype} {lanes}", emit)


def _per_thread(name: str, emit: Emit) -> Callable[..., int]:
    """Return ``f(address, other, length, step, threads)``; `emit` writes one thread's part.

    That is ``body(address, other, length)``, all int64, whose results are summed.
    """
    body, put = Intrinsic(emit, f"{__name__} {name}"), store("int64", "int64")

    @kernel
    def share(number: int, address: int, other: int, length: int, step: int, sums: int) -> None:
        put(sums, number, body(address + number * step, other, length))

    pooled = in_pool(share, 5)

    def run(address: int, other: int, length: int, step: int, threads: int) -> int:
        sums = np.zeros(threads, np.int64)
        pooled(threads, address, other, length, step, sums.ctypes.data)
        return int(sums.sum())

    return run


def _cell(builder: Any, value: Any) -> Any:
    """Return a pointer to a variable on the stack that begins with a value."""
    cell = stack_room(builder, value.type)
    builder.store(value, cell)
    return cell


def _load(builder: Any, address: Any, word: Any) -> Any:
    """Emit one load; a scalar one is atomic, so that the compiler widens no row of them."""
    pointer = builder.inttoptr(address, word.as_pointer())
    if hasattr(word, "count"):
        return builder.load(pointer, align=8)
    return builder.load_atomic(pointer, "monotonic", 8)


def _fold(builder: Any, value: Any) -> Any:
    """Emit the exclusive or of a vector's words."""
    from llvmlite import ir

    if not hasattr(value.type, "count"):
        return value
    words = [builder.extract_element(value, ir.IntType(32)(i)) for i in range(value.type.count)]
    return functools.reduce(builder.xor, words)
