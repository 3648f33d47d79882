"""The back ends: siblings behind one small Protocol. Neither imports the other."""

from __future__ import annotations

import functools

from gemmule.backends.base import Backend
from gemmule.core import fork


@functools.cache
def get(name: str) -> Backend:
    """Return the back end called ``"cpu"`` or ``"cuda"``, importing it on first use."""
    with fork.WHOLE:
        if name == "cpu":
            from gemmule.backends.cpu.launch import CpuBackend

            return CpuBackend()
        if name == "cuda":
            from gemmule.backends.cuda.launch import CudaBackend

            return CudaBackend()
    raise ValueError(f"backend is {name!r}; it must be 'cpu' or 'cuda'.")
