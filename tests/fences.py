"""Arrays between pages that nobody may read: what is read beyond them ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


def fenced(array: np.ndarray[Any, Any], at_end: bool, unit: int) -> np.ndarray[Any, Any]:
    """Return a copy that ends where a page ends, but for its alignment, or begins where one begins.

    It is aligned to `unit` bytes as the array is; what lies between its elements is copied, too.
    The pages in front of it and behind it are in nobody's reach, the rest of its own holds 0xFF.
    """
    if not array.size:
        return array
    low, high = np.lib.array_utils.byte_bounds(array)
    extent, off = high - low, low % unit
    pages = -(-(extent + off + unit - 1) // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    held = np.frombuffer(memory, np.uint8)
    start = ((pages + 1) * PAGE - extent - off) // unit * unit + off if at_end else PAGE + off
    held[PAGE : (pages + 1) * PAGE] = 0xFF
    ctypes.memmove(held.ctypes.data + start, low, extent)
    for page in (held.ctypes.data, held.ctypes.data + (pages + 1) * PAGE):
        assert _LIBC.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0  # PROT_NONE
    first = start + array.__array_interface__["data"][0] - low
    return np.ndarray(array.shape, array.dtype, held, first, array.strides)
