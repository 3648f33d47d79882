"""What a host's cores, memory and BLAS do in a second: the coefficients of the CPU's cost model.

A rung holds a formula in these rates and in numbers without a dimension; the rates are data of one
machine. They come from `gemmule tune --device-model`, which measures them there, else they are the
cautious defaults below.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class HostRates:
    """The coefficients; bytes, operations and elements a second, and seconds.

    read: all threads from memory. core_read: one thread from memory; core_cached: from its caches,
    both as vectors are multiplied. fma: fused float32 multiply-adds of one core. blas: float32
    operations of NumPy's BLAS on all threads, at 1024 x 1024 x 1024. convert: elements that
    all threads turn from float16 to float32. call: from Python into a kernel and back;
    spread: what starting helpers adds; blas_call: a product by NumPy of a few elements. asked: how
    many times as fast long rows of halves come from memory where they are prefetched, a number
    without a unit. measured: the day, or "" for defaults.
    """

    read: float = 20e9
    core_read: float = 10e9
    core_cached: float = 20e9
    fma: float = 30e9
    blas: float = 60e9
    convert: float = 0.4e9
    call: float = 3e-6
    spread: float = 5e-6
    blas_call: float = 1e-6
    asked: float = 1.2
    measured: str = ""

    @classmethod
    def default(cls, threads: int) -> HostRates:
        """Return cautious rates of an unknown machine with so many threads.

        Memory channels, not cores, bound what many cores read.
        """
        return cls(read=20e9 * min(threads, 8), blas=60e9 * threads)


DEFAULT_RATES = HostRates()
# What any machine may be measured to do: more or less is a broken measurement.
PLAUSIBLE: dict[str, tuple[float, float]] = {
    "read": (1e8, 1e14),
    "core_read": (1e8, 1e13),
    "core_cached": (1e8, 1e14),
    "fma": (1e8, 1e13),
    "blas": (1e8, 1e16),
    "convert": (1e6, 1e13),
    "call": (1e-8, 1e-2),
    "spread": (1e-8, 1e-1),
    "blas_call": (1e-8, 1e-2),
    "asked": (0.05, 20.0),
}


def plausible(rates: HostRates) -> str:
    """Return which rate no machine has, in words, or ``""`` when all may be true."""
    for one in fields(HostRates):
        bounds = PLAUSIBLE.get(one.name)
        value = getattr(rates, one.name)
        if bounds is not None and not (type(value) is float and bounds[0] <= value <= bounds[1]):
            return f"{one.name} is {value}"
    return ""
