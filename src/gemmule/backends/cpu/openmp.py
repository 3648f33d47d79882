"""PyTorch's OpenMP team for shares of ours, where PyTorch asks for a product.

Between two of PyTorch's own parallel loops its threads spin for some milliseconds, and OpenBLAS's
for tens of them after each product; whoever comes to the other's core then waits for the end of a
slice of the scheduler. In a model, where both alternate every millisecond, that is most of the
time. So there products are parallel regions of the library that PyTorch was linked with, called
by address: the same threads go from its loops to our shares and back.

A forked child has no such team, and asking for one would wait for ever: it never does.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gemmule.backends.cpu.threads import LENT, processors
from gemmule.settings import borrows_threads

T = TypeVar("T")
_NAMES = ("GOMP_parallel", "omp_get_thread_num")
_forked = False


@functools.cache
def functions() -> tuple[int, ...]:
    """Return the addresses of `_NAMES` in PyTorch's OpenMP library; none where it has none."""
    torch = sys.modules.get("torch")
    place = Path(getattr(torch, "__file__", None) or "").parent / "lib" / "libtorch_cpu.so"
    if torch is None or not place.exists() or not borrows_threads():
        return ()
    try:
        library = ctypes.CDLL(str(place))  # it and what it was linked with
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _NAMES]
    except (OSError, AttributeError):
        return ()
    return tuple(address for address in found if address)


def forget() -> None:
    """Note that this process was forked."""
    global _forked
    _forked = True


def lent(torch: Any) -> int:
    """Return how many threads PyTorch's team has for the calling thread's products, or 0."""
    if _forked or not functions():
        return 0
    return max(1, min(int(torch.get_num_threads()), processors()))


def by_pytorch(torch: Any, multiply: Callable[..., T], *arguments: Any) -> T:
    """Call what multiplies, its shares for PyTorch's team, as large as the calling thread's is."""
    before = LENT.count
    LENT.count = lent(torch) or before
    try:
        return multiply(*arguments)
    finally:
        LENT.count = before
