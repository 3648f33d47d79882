"""Calling a C function of many arguments that lie in one block of memory.

ctypes converts each argument of each call: sixteen take the host 1.4 us, a block's address 0.1. So
a few instructions load them from there, in the order of the x86-64 ABI of System V. On other
machines, and where memory may not be run, ctypes calls the function as ever.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import struct
from collections.abc import Callable, Sequence
from typing import Any

# endbr64; push rbp; mov rbp, rsp; mov rax, rdi
_BEGIN = bytes.fromhex("f30f1efa 55 4889e5 4889f8")
_PUSH = bytes.fromhex("ffb0")  # qword [rax + ..]
# rdi, rsi, rdx, rcx, r8, r9 from [rax + ..]
_REGISTERS = tuple(map(bytes.fromhex, ("488bb8", "488bb0", "488b90", "488b88", "4c8b80", "4c8b88")))
_CALL, _END = bytes.fromhex("ff90"), bytes.fromhex("c9 c3")  # leave; ret
_PAGE = 4096


def _code(places: Sequence[int], function: int) -> bytes:
    """Return instructions that call a function by a block: ``int f(void **block)``.

    places: of each argument in the block, in words of 8 bytes; function: of the function's address.
    """
    left, behind = places[: len(_REGISTERS)], places[len(_REGISTERS) :]
    if len(behind) % 2:  # the stack is aligned to 16 bytes
        behind = [*behind, behind[-1]]
    parts = [_BEGIN]
    parts += [_PUSH + struct.pack("<i", 8 * at) for at in behind[::-1]]
    parts += [_REGISTERS[i] + struct.pack("<i", 8 * at) for i, at in enumerate(left)]
    return b"".join([*parts, _CALL, struct.pack("<i", 8 * function), _END])


@functools.cache
def entry(places: tuple[int, ...], function: int) -> Callable[[Any], int] | None:
    """Return what calls by the address of a block, or None where no memory may be run."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return None
    page = mmap.mmap(-1, _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.write(_code(places, function))
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    # Never writable and run at once; a system that permits neither after the other says so here.
    where = ctypes.c_void_p(address), ctypes.c_size_t(_PAGE)
    if ctypes.CDLL(None).mprotect(*where, mmap.PROT_READ | mmap.PROT_EXEC):
        return None
    # A launch is too short to drop the interpreter's lock.
    call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)
    call.page = page  # type: ignore[attr-defined]
    return call


def caller(function: Any, block: Any, places: tuple[int, ...], at: int) -> Callable[[], int]:
    """Return ``call()`` of a function of ctypes by a block of its arguments, one thread's own.

    places: of the arguments, in words; word `at` is written here.
    """
    loaded = entry(places, at) if hasattr(function, "argtypes") else None
    if loaded is not None:
        address = ctypes.cast(function, ctypes.c_void_p).value
        struct.pack_into("<Q", block, 8 * at, address)
        return functools.partial(loaded, ctypes.c_void_p(ctypes.addressof(block)))
    words = struct.Struct(f"<{len(block) // 8}Q")

    def call() -> int:
        given = words.unpack_from(block)
        return int(function(*(given[place] for place in places)))

    return call
