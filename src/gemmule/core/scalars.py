"""The scalars alpha and beta of gemv and gemm: what a result takes, and what a double carries.

A CUDA kernel gets both as doubles (``args.cuh``). A double holds every int32, but not every 64-bit
integer; those that it does not are spread over several launches, whose exact sum modulo 2^64 is
the same.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gemmule.core.problem import COMPLEX, INTEGERS

Number = int | float | complex
Pass = tuple[float, float]  # alpha and beta of one launch
_MODULUS = 2**64
_LOW = 2**32 - 1


def checked(name: str, value: Any, dtype: str) -> Number:
    """Return `value`, the scalar called `name`, as a Python number of the kind of `dtype`.

    TypeError for what is no number of that kind; ValueError where `dtype` cannot hold it, or where
    it is an integer beyond the largest double.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kinds: tuple[Any, ...] = (int, float, complex)
    if dtype in INTEGERS:
        kinds = (int,)
    elif dtype not in COMPLEX:
        kinds = (int, float)
    if not isinstance(value, kinds):
        raise TypeError(
            f"{name} is {value!r} of type {type(value).__name__}; the result is {dtype}, so it "
            f"must be {' or '.join(kind.__name__ for kind in kinds)}."
        )
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        if not limits.min <= int(value) <= limits.max:
            raise ValueError(
                f"{name} is {_shown(value)}, which {dtype}, the result's dtype, cannot hold."
            )
        return int(value)
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(
                f"{name} is {_shown(value)}; beside a result of {dtype} it must be at most "
                "1.8e308, the largest double. Scale the operands instead."
            ) from None
    number: Number = value
    return number


def _shown(value: int) -> str:
    """Return an integer for a message, a long one by its size alone."""
    return str(value) if abs(value) < 10**40 else f"an integer of {value.bit_length()} bits"


def passes(alpha: Number, beta: Number, dtype: str) -> tuple[Pass, ...]:
    """Return the launches ``out = alpha product + beta out`` that make up one, doubles all.

    One where doubles hold both scalars. Another integer alpha is the sum of a multiple of 2^32 and
    what is left; another beta is, modulo 2^64, a product of two integers below 2^53, of which the
    first scales the old result alone. Each launch costs a product of its own.

    >>> passes(2.5, 1, "float32")
    ((2.5, 1.0),)
    >>> passes(2**53 + 1, 0, "int64")
    ((9007199254740992.0, 0.0), (1.0, 1.0))
    """
    if dtype not in ("int64", "uint64"):
        return ((float(alpha.real), float(beta.real)),)
    whole, kept = _signed(int(alpha.real)), _signed(int(beta.real))
    first: tuple[Pass, ...] = ()
    if not _is_double(kept):
        scale, kept = _factors(kept)
        first = ((0.0, float(scale)),)
    if _is_double(whole):
        return (*first, (float(whole), float(kept)))
    high, low = whole & ~_LOW, whole & _LOW
    return (*first, (float(high), float(kept)), (float(low), 1.0))


def _signed(value: int) -> int:
    """Return the integer of -2^63 to 2^63 - 1 that equals `value` modulo 2^64."""
    return (value + 2**63) % _MODULUS - 2**63


def _is_double(value: int) -> bool:
    return int(float(value)) == value


@functools.lru_cache(maxsize=256)
def _factors(value: int) -> tuple[int, int]:
    """Return two integers that doubles hold and whose product is `value` modulo 2^64.

    An odd integer has an inverse modulo 2^64, so to each odd factor belongs another; one in a
    thousand of those is below 2^53 in size, and the search takes about a millisecond.
    """
    shift = (value & -value).bit_length() - 1
    odd = value >> shift
    factor = 1
    while True:
        factor += 2
        other = _signed(odd * pow(factor, -1, _MODULUS))
        if _is_double(other):
            return _signed(factor << shift), other
