"""Memory that kernels work in, kept for the next product.

An allocator gives large blocks back to the system, so memory asked for anew is fresh pages in every
product, some hundred page faults. Here a share of a product claims a part that nobody else works
in, and releases it. A part that no share has claimed yet is addresses without pages, and the first
ones are claimed first: so there are pages for as many as were ever in use at once.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

from gemmule.backends.cpu.atomics import give_way, read, swap_if, write
from gemmule.backends.cpu.jit import kernel
from gemmule.backends.cpu.threads import processors
from gemmule.core import fork

_PAGE = 4096
_LEAST_BYTES = 64 << 10  # of a part
_MOST_BYTES = 1 << 30  # of the parts beyond one for each processor
_COUNT, _BYTES, _FIRST, _TAKEN = 0, 8, 16, 64  # of a workspace, in bytes; flags follow
_KEPT: list[np.ndarray[Any, Any]] = []  # heads of all workspaces, which a forked child clears
_MEMORY: list[np.ndarray[Any, Any]] = []  # their parts


def workspace(nbytes: int) -> int:
    """Return the address of the workspace whose parts have at least so many bytes.

    There is one for each power of two, for all products; it lasts as long as the process.
    """
    with fork.WHOLE:
        return _made(max(nbytes - 1, _LEAST_BYTES - 1).bit_length())


@functools.cache
def _made(bits: int) -> int:
    # Callers may be more than processors, and who finds none free waits: so large parts, whose
    # addresses count where a system limits them, are one for each processor.
    parts = min(2 * processors(), max(processors(), _MOST_BYTES >> bits))
    memory = np.empty((parts << bits) + _PAGE, np.uint8)
    head = np.zeros(_TAKEN // 8 + parts, np.int64)
    first = -(-memory.ctypes.data // _PAGE) * _PAGE
    head[[_COUNT // 8, _BYTES // 8, _FIRST // 8]] = parts, 1 << bits, first
    _KEPT.append(head)
    _MEMORY.append(memory)
    return head.ctypes.data


@kernel
def claimed(at: int) -> Any:
    """Return the address of a part of the workspace at an address: nobody else's until released."""
    count, nbytes, first = read(at + _COUNT), read(at + _BYTES), read(at + _FIRST)
    while True:
        for i in range(count):
            flag = at + _TAKEN + 8 * i
            if read(flag) == 0 and swap_if(flag, 0, 1) != 0:
                return first + i * nbytes
        give_way()


@kernel
def release(at: int, part: int) -> None:
    """Give a part of a workspace back."""
    write(at + _TAKEN + 8 * ((part - read(at + _FIRST)) // read(at + _BYTES)), 0)


def _forget() -> None:
    """Begin anew in a forked child, which has none of the threads that were in a share."""
    for head in _KEPT:
        head[_TAKEN // 8 :] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
