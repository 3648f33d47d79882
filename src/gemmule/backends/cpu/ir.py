"""LLVM's types and values, as `llvmlite.ir` has them, imported when the first of them is asked for.

Kernels whose object code is at hand run without LLVM, so what emits code must not import it.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Return what `llvmlite.ir` calls `name`, kept here for the next time."""
    found = globals()[name] = getattr(importlib.import_module("llvmlite.ir"), name)
    return found
