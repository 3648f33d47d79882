"""What kernels are compiled for: this CPU, less what Numba's variables leave out of it.

Kernels are compiled for the CPU they run on unless ``NUMBA_CPU_NAME``, ``NUMBA_CPU_FEATURES`` or
``NUMBA_ENABLE_AVX`` tell otherwise, as they tell Numba. Rungs are offered, and forms of kernels
chosen, by what that target has, so that a CPU with AVX-512 can stand for one without
(docs/environment.md).
"""

from __future__ import annotations

import functools
import os

from gemmule.backends.cpu.features import host_features as _host_features
from gemmule.backends.cpu.jit import unavailable


@functools.cache
def target_features() -> tuple[frozenset[str], str | None]:
    """Return the target's features and the variable that takes some away, read once as by Numba."""
    features = _host_features()
    stated = os.environ.get("NUMBA_CPU_FEATURES")
    if stated is not None:
        # What Numba's CPU_NAME has besides is LLVM's to know: only what is named counts.
        named = {word[1:] for word in stated.split(",") if word.startswith("+")}
        return features & named, "NUMBA_CPU_FEATURES"
    if os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic":
        return frozenset(), "NUMBA_CPU_NAME"
    if os.environ.get("NUMBA_ENABLE_AVX") == "0":
        return frozenset(f for f in features if not f.startswith("avx")), "NUMBA_ENABLE_AVX"
    return features, None


def missing_features(*wanted: str) -> str | None:
    """Return why kernels that use these CPU features cannot run here, or None."""
    reason = unavailable()
    if reason is not None:
        return reason
    features, variable = target_features()
    absent = [name for name in wanted if name not in features]
    if not absent:
        return None
    lacks = f"lacks {', '.join(absent)}"
    if variable is not None and not set(absent) - _host_features():
        return f"{variable} is set, and the CPU that is compiled for {lacks}; unset it"
    return f"this CPU {lacks}"


def vector_bytes() -> int:
    """Return the width of the target's vector registers; 64 means that there are 32 of them."""
    features = target_features()[0]
    if {"avx512f", "avx512bw", "avx512dq"} <= features:
        return 64
    return 32 if "avx2" in features else 16


def has_wide_vectors() -> bool:
    """Whether a vector of 16 lanes is one register; else it is two, by AVX2."""
    return vector_bytes() == 64


def missing_vectors() -> str | None:
    """Return why kernels of 16 lanes, in one register or two, cannot run here, or None."""
    reason = unavailable()
    if reason is not None or has_wide_vectors():
        return reason
    return missing_features("avx2", "fma", "f16c")
