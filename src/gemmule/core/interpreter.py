"""Which Python runs this, where less was tried than elsewhere."""

from __future__ import annotations

import sys
import warnings

from gemmule.errors import GemmuleWarning


def is_free_threaded() -> bool:
    """Whether this CPython has no global lock, and objects of another layout for it."""
    return "t" in getattr(sys, "abiflags", "")


def tell() -> None:
    """Warn, where Python is free-threaded, of what was not tried there and what is slower."""
    if is_free_threaded():
        warnings.warn(
            "gemmule was not tried on a free-threaded Python. Planned products of small matrices "
            "are slower there, as their arguments are checked in Python; calls from several "
            "threads are meant to be safe, and no test has shown it. Use a Python with the "
            "global lock where that matters.",
            GemmuleWarning,
            stacklevel=3,
        )
