"""What the CPU and its system offer, and for what LLVM compiles: read without asking LLVM.

``NUMBA_CPU_NAME``, ``NUMBA_CPU_FEATURES`` and ``NUMBA_ENABLE_AVX`` are obeyed as Numba obeys them.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path


def _cpuinfo() -> dict[str, str]:
    """Return what Linux tells of the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


@functools.cache
def processor_vendor() -> str:
    """Return who made this CPU, in the processor's words, or an empty text."""
    return _cpuinfo().get("vendor_id", "")


@functools.cache
def host_features() -> frozenset[str]:
    """Return what this CPU and its system offer, in LLVM's words."""
    told = _cpuinfo().get("flags")
    if told is None or platform.machine() != "x86_64":
        return _features_by_llvm()
    return frozenset(_llvm_word(flag) for flag in told.split())


def _llvm_word(flag: str) -> str:
    """Return LLVM's word for a feature that Linux names."""
    if flag.startswith(("avx512_", "avx_")):
        return flag.replace("_", "", 1)
    return flag.replace("amx_", "amx-").replace("sse4_", "sse4.")


@functools.cache
def target_features() -> tuple[frozenset[str], str | None]:
    """Return the target's features and the variable that takes some away, read once as by Numba."""
    features = host_features()
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


def _features_by_llvm() -> frozenset[str]:
    import llvmlite.binding

    try:
        known = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know the features of this platform
        return frozenset()
    return frozenset(name for name, present in known.items() if present)


def cpu_and_features() -> tuple[str, str]:
    """Return for what LLVM is to compile: the name of a CPU, and its features."""
    import llvmlite.binding

    name = os.environ.get("NUMBA_CPU_NAME") or llvmlite.binding.get_host_cpu_name()
    stated = os.environ.get("NUMBA_CPU_FEATURES")
    if stated is not None:
        return name, stated
    if name.lower() == "generic":
        return name, ""
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:
        return name, ""
    if os.environ.get("NUMBA_ENABLE_AVX") == "0":
        for one in features:
            features[one] = features[one] and not one.startswith("avx")
    return name, features.flatten()


def identity() -> str:
    """Return a text that is equal where the same code may run, without asking LLVM."""
    told = _cpuinfo()
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    variables = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")
    return repr(
        (
            platform.machine(),
            [told.get(name) for name in names],
            [os.environ.get(name) for name in variables],
        )
    )
