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

    The pages in front of it and behind it are in nobody's reach.
    """
    low, high = np.lib.array_utils.byte_bounds(array)
    extent = -(-(high - low) // unit) * unit
    pages = -(-extent // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    held = np.frombuffer(memory, np.uint8)
    start = (pages + 1) * PAGE - extent if at_end else PAGE
    copy: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype, held, start, array.strides)
    copy[...] = array
    address = held.ctypes.data
    for page in (address, address + (pages + 1) * PAGE):
        assert _LIBC.mprotect(ctypes.c_void_p(page), PAGE, 0) == 0  # PROT_NONE
    return copy
