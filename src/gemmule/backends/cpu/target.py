"""What kernels are compiled for: this CPU, less what Numba's variables leave out of it.

Kernels are compiled for the CPU they run on unless ``NUMBA_CPU_NAME``, ``NUMBA_CPU_FEATURES`` or
``NUMBA_ENABLE_AVX`` tell otherwise, as they tell Numba. Rungs are offered, and forms of kernels
chosen, by what that target has, so that a CPU with AVX-512 can stand for one without
(docs/environment.md).
"""

from __future__ import annotations

from gemmule.backends.cpu import features
from gemmule.backends.cpu.jit import unavailable


def missing_features(*wanted: str) -> str | None:
    """Return why kernels that use these CPU features cannot run here, or None."""
    reason = unavailable()
    if reason is not None:
        return reason
    present, variable = features.target_features()
    absent = [name for name in wanted if name not in present]
    if not absent:
        return None
    lacks = f"lacks {', '.join(absent)}"
    if variable is not None and not set(absent) - features.host_features():
        return f"{variable} is set, and the CPU that is compiled for {lacks}; unset it"
    return f"this CPU {lacks}"


def vector_bytes() -> int:
    """Return the width of the target's vector registers; 64 means that there are 32 of them."""
    present = features.target_features()[0]
    if {"avx512f", "avx512bw", "avx512dq"} <= present:
        return 64
    return 32 if "avx2" in present else 16


def has_wide_vectors() -> bool:
    """Whether a vector of 16 lanes is one register; else it is two, by AVX2."""
    return vector_bytes() == 64


def missing_vectors() -> str | None:
    """Return why kernels of 16 lanes, in one register or two, cannot run here, or None."""
    reason = unavailable()
    if reason is not None or has_wide_vectors():
        return reason
    return missing_features("avx2", "fma", "f16c")
