"""Which Python runs this, where less was tried than elsewhere."""

from __future__ import annotations

import sys

UNTRIED = (
    "gemmule was not tried on a free-threaded Python. Planned products of small matrices are "
    "slower there, as their arguments are checked in Python; calls from several threads are meant "
    "to be safe, and no test has shown it. Use a Python with the global lock where that matters."
)


def is_free_threaded() -> bool:
    """Whether this CPython has no global lock, and objects of another layout for it."""
    return "t" in getattr(sys, "abiflags", "")
