"""Scalars of `gemm` beside a library's product: applied to whole sums, each with one rounding.

A library may multiply operands or partial sums by alpha on its way: an infinite one makes NaN of
zeros, a large one overflows, and sums that cancel keep the rounding errors of their terms. So it is
given 1 and 0, and one pass over the result does the rest, as the kernels of this package do behind
their own sums.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import convert, starter
from gemmule.core.operand import Operand
from gemmule.core.problem import COMPLEX, ITEMSIZE
from gemmule.core.rung import Step

SOURCE = Path(__file__).with_suffix(".cu")
_SCALE = struct.Struct("<4d")  # alpha and beta, the real part of each first
EXACT = (0, 1, -1)  # values of alpha with which the library has nothing to round


def wanted(alpha: complex, dtype: str) -> bool:
    """Whether a result of this dtype is to be scaled apart: it has to be that of the sums."""
    return alpha not in EXACT and dtype in ("float32", "float64", *COMPLEX)


def old_bytes(out: Operand, beta: complex) -> int:
    """Return the bytes that `keep` writes: those of the result, or none where beta is 0."""
    return 0 if beta == 0 else math.prod(out.form.shape) * ITEMSIZE[out.form.dtype]


def keep(out: Operand, old: int, stream: int) -> None:
    """Copy the result's old values to an address, packed in C order."""
    convert.write(out, old, out.form.dtype, stream)


def rescale(out: Operand, old: int, scale: tuple[complex, complex], stream: int) -> None:
    """Set out = alpha * out + beta * old, in the dtype of out; beta == 0 does not read old."""
    form, item = out.form, ITEMSIZE[out.form.dtype]
    scalars = _SCALE.pack(*(part for value in scale for part in (value.real, value.imag)))
    kernel, ordinal = f"rescale<{convert.CTYPE[form.dtype]}>", device_arrays.ordinal_of(out)
    for first, offset, count, axes in convert.pieces(form):
        step = Step(kernel, convert.grid(count), (convert.THREADS, 1, 1))
        place = out.pointer + offset * item
        packed = convert.pack(old + first * item, place, count, axes) + scalars
        starter.run(SOURCE, step, packed, ordinal, stream)
