"""What the pool of threads is made of, as LLVM code: atomic words, waiting, and packed arguments.

All words are int64 at int64 addresses, read and written in one total order; the word that threads
sleep on is its lower half.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable
from typing import Any

from gemmule.backends.cpu import ir
from gemmule.backends.cpu.intrinsics import declare, stack_room
from gemmule.backends.cpu.jit import Intrinsic, intrinsic, operation

_ORDER = "seq_cst"
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE = 128, 129  # of this process alone
_MONOTONIC = 1 if sys.platform == "linux" else 6
_POLL_US = 200  # where no futex wakes a thread
# Linux has futexes; other Unixes poll. Elsewhere there are no threads but the caller's.
SUPPORTED = _FUTEX is not None or sys.platform == "darwin"


def _pointer(builder: Any, address: Any, bits: int = 64) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


def _swapped(builder: Any, address: Any, expected: Any, wanted: Any) -> Any:
    pair = builder.cmpxchg(_pointer(builder, address), expected, wanted, _ORDER, _ORDER)
    return builder.zext(builder.extract_value(pair, 1), expected.type)


def _declared(builder: Any, name: str, result: Any, arguments: list[Any], *, more: bool) -> Any:
    return declare(builder, name, ir.FunctionType(result, arguments, var_arg=more))


def _futex(builder: Any, address: Any, what: int, value: Any) -> None:
    word = ir.IntType(64)
    if _FUTEX is None:
        number = ir.IntType(32)
        if what == _WAIT:
            sleep = _declared(builder, "usleep", number, [number], more=False)
            builder.call(sleep, [number(_POLL_US)])
        return
    syscall = _declared(builder, "syscall", word, [word], more=True)
    builder.call(syscall, [word(_FUTEX), address, word(what), value, *[word(0)] * 3])


def _pause(builder: Any) -> None:
    if platform.machine() in ("x86_64", "AMD64"):
        name, arguments = "llvm.x86.sse2.pause", []
    elif platform.machine() in ("aarch64", "arm64"):
        name, arguments = "llvm.aarch64.hint", [ir.IntType(32)(1)]
    else:
        return
    kinds = [one.type for one in arguments]
    builder.call(_declared(builder, name, ir.VoidType(), kinds, more=False), arguments)


def _yield(builder: Any) -> None:
    builder.call(_declared(builder, "sched_yield", ir.IntType(32), [], more=False), [])


def _now(builder: Any) -> Any:
    word, number = ir.IntType(64), ir.IntType(32)
    cell = stack_room(builder, ir.ArrayType(word, 2))
    first = builder.bitcast(cell, word.as_pointer())
    clock = _declared(builder, "clock_gettime", number, [number, first.type], more=False)
    builder.call(clock, [number(_MONOTONIC), first])
    seconds = builder.load(first)
    rest = builder.load(builder.gep(first, [word(1)], source_etype=word))
    return builder.add(builder.mul(seconds, word(10**9)), rest)


def _operation(name: str, emit: Callable[..., Any]) -> Intrinsic:
    return operation(f"{__name__} {name}", emit)


def _written(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, _pointer(builder, address), _ORDER, 8)


def _added(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("add", _pointer(builder, address), value, _ORDER)


read = _operation("read", lambda b, at: b.load_atomic(_pointer(b, at), _ORDER, 8))
write = _operation("write", _written)
add = _operation("add", _added)
swap_if = _operation("swap_if", _swapped)
sleep_while = _operation("sleep_while", lambda b, at, seen: _futex(b, at, _WAIT, seen))
wake = _operation("wake", lambda b, at, count: _futex(b, at, _WAKE, count))
pause = _operation("pause", _pause)
give_way = _operation("give_way", _yield)
now_ns = _operation("now_ns", _now)


def _copied(builder: Any, address: Any, count: Any) -> Any:
    word = ir.IntType(64)
    cell = builder.alloca(word, size=count)
    place = builder.ptrtoint(cell, word)
    pointers = [builder.inttoptr(one, ir.IntType(8).as_pointer()) for one in (place, address)]
    kinds = [pointers[0].type] * 2 + [word, ir.IntType(1)]
    copy = _declared(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), kinds, more=False)
    builder.call(copy, [*pointers, builder.mul(count, word(8)), ir.IntType(1)(0)])
    return place


copied = _operation("copied", _copied)
"""``f(address, count)``: the address of a copy of so many words, which lasts as long as the caller.

Each use takes more of the stack: not for loops.
"""


@intrinsic
def packed(builder: Any, words: Any) -> Any:
    """``f(words)``: the address of a tuple of int64 in memory that lasts as long as the caller."""
    kind = ir.ArrayType(ir.IntType(64), len(words))
    cell, whole = stack_room(builder, kind), kind(ir.Undefined)
    for i, one in enumerate(words):
        whole = builder.insert_value(whole, one, i)
    builder.store(whole, cell)
    return builder.ptrtoint(cell, ir.IntType(64))


@functools.cache
def unpacked(count: int) -> Intrinsic:
    """Return ``f(address)``: the tuple of `count` int64 that lies there."""

    def emit(builder: Any, address: Any) -> list[Any]:
        return _words_at(builder, address, count)

    return Intrinsic(emit, f"{__name__} unpacked {count}")


@functools.cache
def unpacked_as(kind: type) -> Intrinsic:
    """Return ``f(address)``: the named tuple of int64 of this class that lies there."""
    fields = kind._fields  # type: ignore[attr-defined]

    def emit(builder: Any, address: Any) -> Any:
        return kind(*_words_at(builder, address, len(fields)))

    return Intrinsic(emit, f"{__name__} unpacked {kind.__module__}.{kind.__qualname__}")


def _words_at(builder: Any, address: Any, count: int) -> list[Any]:
    word = ir.IntType(64)
    first = builder.inttoptr(address, word.as_pointer())
    return [builder.load(builder.gep(first, [word(i)])) for i in range(count)]
