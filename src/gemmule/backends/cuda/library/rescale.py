"""Scalars of `gemm` beside a library's product: applied to whole sums, each with one rounding.

A library may multiply operands or partial sums by alpha on its way: an infinite one makes NaN of
zeros, a large one overflows, and sums that cancel keep the rounding errors of their terms. So it is
given 1 and 0, and one pass over the result does the rest, as the kernels of this package do behind
their own sums.
"""

from __future__ import annotations

import math

from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import convert
from gemmule.backends.cuda.epilogue import Pass, Place
from gemmule.core.operand import Operand, c_strides
from gemmule.core.problem import COMPLEX, ITEMSIZE

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
    form = out.form
    here, kept = Place(out.pointer, form.strides), Place(old, c_strides(form.shape))
    finish = Pass(form.dtype, None, device_arrays.ordinal_of(out))
    finish(form.shape, (here, here), scale, {"C": kept} if scale[1] else {}, stream)
