"""What the CPU rungs of floats and integers share: signatures, working dtypes, cost model."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.core.problem import FLOAT8, INTEGERS, Problem
from gemmule.core.rung import Arithmetic, Machine, Params, Signature, floats, integers

_BYTE = ctypes.c_char
_BITS = {1: np.uint8, 2: np.uint16}

FLOAT_SIGNATURES: tuple[Signature, ...] = floats("float64", "float32", "float16", "bfloat16")
SIGNATURES: tuple[Signature, ...] = (*FLOAT_SIGNATURES, *integers())
FLOAT8_SIGNATURES: tuple[Signature, ...] = tuple(
    (a, b, out) for a in FLOAT8 for b in FLOAT8 for out in ("float32", "float16", "bfloat16")
)

# Loop overhead in fused multiply-adds of a core: of a row in `four_rows`, of a column of one panel
# in `panels` (EPYC Zen 5, 2026-11: 0.4 and 1.3 ns at 95 of them a nanosecond).
ROW_FMAS = 40
COLUMN_FMAS = 120


def working_dtype(a: str, x: str, out: str) -> str:
    """Return the dtype that products are formed and summed in.

    Halves work in float32. 8-bit integers sum in int32 when the result is int32; all other
    integers in 64 bits, modulo 2^64, where signed and unsigned sums have the same bits.
    """
    if a in INTEGERS:
        return "int32" if out == "int32" else "int64"
    return "float64" if "float64" in (a, x) else "float32"


def problem_working_dtype(problem: Problem) -> str:
    """Return `working_dtype` of a problem's signature."""
    return working_dtype(problem.a, problem.b, problem.out)


def summed(chain: Callable[[Problem, Params], int]) -> Callable[[Problem], Arithmetic]:
    """Return the `arithmetic` of a rung that sums in the working dtype, along `chain` additions."""

    def arithmetic(problem: Problem) -> Arithmetic:
        working = problem_working_dtype(problem)
        return Arithmetic(accumulator=working, chain=chain, product=working)

    return arithmetic


def whole_reduction(problem: Problem, params: Params) -> int:
    """Return the longest chain when nothing is known of the order: every term in one sum."""
    return max(problem.reduction, 1)


# What rungs say of themselves that take every dtype and sum in an order of their own: of a vector's
# products, and of those of two matrices, in any memory order.
OF_VECTORS: dict[str, Any] = {"signatures": SIGNATURES, "arithmetic": summed(whole_reduction)}
OF_MATRICES: dict[str, Any] = {
    "signatures": (*SIGNATURES, *FLOAT8_SIGNATURES),
    "arithmetic": summed(whole_reduction),
    "layouts": ("row", "col", "strided"),
    "layouts_b": ("row", "col", "strided"),
}


def address(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array's first element."""
    if array.dtype.kind == "V":  # bfloat16 and float8 have no buffer, their bits have
        array = array.view(_BITS[array.itemsize])
    data: Any = array if array.flags.c_contiguous else array.T
    try:
        return ctypes.addressof(_BYTE.from_buffer(data))  # half of the other way's time
    except (TypeError, ValueError, BufferError):  # read-only, empty, or a view with gaps
        return array.ctypes.data


def placed(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """Return an array's address and strides, as kernels take a matrix."""
    return address(array), *array.strides


def blas_arithmetic(problem: Problem) -> Arithmetic:
    """A BLAS sums in its dtype, in an order of its own; a complex product is two additions."""
    terms = 2 if problem.a.startswith("complex") else 1
    return Arithmetic(
        accumulator=problem.a,
        chain=lambda p, params: max(p.reduction, 1) * terms,
        product=problem.a,
    )


def streaming_s(problem: Problem, machine: Machine, share: float, *, alone: bool = False) -> float:
    """Return the time to move a problem's bytes at a share of the rate of all threads, or of one.

    What fits in the last-level cache is read at the cores' own rate.
    """
    rates, alone = machine.rates, alone or problem.compulsory_bytes < SMALL_BYTES
    if problem.compulsory_bytes <= machine.cache_bytes // 2:
        rate = rates.core_cached * (1 if alone else machine.units)
    else:
        rate = rates.core_read if alone else machine.read_bytes_per_s
    return problem.compulsory_bytes / (share * rate)


SMALL_BYTES = 32 << 10  # products that read less stay on the calling thread


def spread_s(machine: Machine, nbytes: int = SMALL_BYTES) -> float:
    """Return the cost of a call whose shares helpers claim, for a product of so many bytes."""
    spread = nbytes >= SMALL_BYTES and machine.units > 1
    return machine.rates.call + (machine.rates.spread if spread else 0)


# What short stretches of memory lose where lines are not asked for, and what is short: 384 x 384
# halves take 5 us from a cache asked for or not, from memory 11 and 17 to 31; 4096 x 4096 the same
# time (two cores of an EPYC Zen 4, 2026-11). A plan knows not where a matrix will be: the middle.
_LOST, _SHORT_BYTES = 0.3, 4096


def unasked(stretch_bytes: float) -> float:
    """Return the share of a rate at which lines come that a kernel leaves to the processor.

    stretch_bytes: how many bytes lie side by side of what a thread reads in a row.
    """
    return 1 - _LOST * min(1.0, _SHORT_BYTES / max(stretch_bytes, 1.0))


class _Quiet(threading.local):
    """What calls NumPy without its warnings of NaN and infinity: they are the caller's numbers.

    ``QUIET.run(function, *arguments)``. A context of its own for each thread costs a call 0.1 us,
    and ``np.errstate`` 0.7 (EPYC Zen 5, 2026-11), a third of a small product.
    """

    def __init__(self) -> None:
        context = contextvars.Context()
        context.run(functools.partial(np.seterr, all="ignore"))
        self.run = context.run


QUIET = _Quiet()


# Multiply-adds of the packed matmul for each fused float32 one that a core can do, tile padding
# counted, and elements converted and packed (1024^3; float32 and halves EPYC Zen 4 with AVX2 alone,
# others EPYC Zen 5; packing EPYC Zen 4 with AVX-512; 2026-11).
_PACKED_SHARES = {"float32": 0.95, "float64": 0.37, "int32": 0.67, "int64": 0.3}
_PACKED_OF_A = 0.08
_PACKED_OF_B = {"row": 0.07, "col": 0.02}  # its columns are turned, a line of a cache at a time
_PACKED_NEAR, _NEAR_BYTES = 1.9, 1 << 20  # times as fast, where all is near by
_TILE = (12, 32)  # the float32 tile; small products are padded to it
_LOW_TILE = 4  # rows of that which takes the last ones


def packed_s(problem: Problem, machine: Machine, threads: int) -> float:
    """Return the time of the packed matmul of a problem on a number of cores."""
    tall = 2 if problem.n <= _TILE[1] // 2 else 1  # a tile of half as many columns
    rows, columns = _LOW_TILE * tall, _TILE[1] // tall
    m, n = -(-problem.m // rows) * rows, -(-problem.n // columns) * columns
    fma = machine.rates.fma * threads
    near = _PACKED_NEAR if problem.compulsory_bytes < _NEAR_BYTES else 1.0
    of_b = _PACKED_OF_B.get(problem.layout_b, _PACKED_OF_B["col"])
    lines = problem.m / (_PACKED_OF_A * near) + problem.n / (of_b * near)
    packed = problem.batch * lines * problem.k / fma
    products = problem.batch * float(m) * n * problem.k
    return products / (_PACKED_SHARES[problem_working_dtype(problem)] * fma) + packed
