"""The fast path of products of NumPy arrays, quantised and prepared matrices on the host.

A `HostCall` compares what a call brings with what was planned, attribute by attribute, and goes
straight to the kernel: 2 us instead of 15 for the general path through operands, 4 instead of 28
beside a quantised matrix. Vectors' products by our own kernels, and BLAS's where Numba is there, go
from the second call on by a builtin function that compares, allocates and launches in half a
microsecond (`backends.cpu.calls`). Whatever it does not know (another library, other strides, a
questionable `out`) it leaves to the general path, which accepts or refuses it with an explanation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.arrays.interop import quantized_form
from gemmule.arrays.prepared import PreparedMatrix
from gemmule.backends.base import HostRun
from gemmule.core.canonical import Call
from gemmule.core.operand import Form
from gemmule.core.problem import DTYPES, ITEMSIZE, numpy_dtype
from gemmule.quant.matrix import QuantizedMatrix

# What tells operands apart: dtype, shape and strides of an array; the form of a prepared matrix; of
# a quantised one a number that stands for its form, because a form of codes is slow to hash.
Signature = Any
# (a, b, out) -> the product, in `out` where given, or None: nothing was done, take the general path
FastCall = Callable[[Any, Any, Any], Any | None]


class HostCall:
    """One product of operands of exactly the planned dtypes, shapes and strides.

    Both names are one function, which returns the product, in `out` where given, or None: nothing
    was done, take the general path. It compares the operands itself, so nobody has to before.
    """

    __slots__ = ("checked", "trusted")

    def __init__(self, run: HostRun, call: Call, a: Form, b: Form) -> None:
        trusted = _trusted(run, call, a, b)
        if a.ready is None is b.ready and a.quant is None is b.quant:
            self.checked = _arrays(run, trusted, _signature(a), _signature(b))
        elif a.ready is None is b.ready and (a.quant is None) != (b.quant is None):
            self.checked = _codes(run, trusted, a, b)
        else:
            self.checked = _any(trusted, _signature(a), _signature(b))
        self.trusted = self.checked


def _trusted(run: HostRun, call: Call, a: Form, b: Form) -> FastCall:
    """Return the product of operands that are known to be of the planned forms."""
    product, swapped = run.product, call.swapped
    see_a, see_b = _reader(a, run.packed[0]), _reader(b, run.packed[1])
    reads = see_a is not None or see_b is not None
    shape, dtype = call.out_shape, numpy_dtype(call.problem.out)
    array, empty, may_share = np.ndarray, np.empty, np.may_share_memory

    def trusted(a: Any, b: Any, out: Any) -> Any | None:
        if out is None:
            out = empty(shape, dtype)
        elif type(out) is not array or out.dtype != dtype or out.shape != shape:
            return None
        else:
            flags = out.flags
            if not flags.carray:  # C-contiguous, aligned, writable; native as the dtypes are equal
                return None
            owns = flags.owndata  # two arrays that own their memory share none: twice as quick
            for one in (a, b):  # what a matrix of this package's own holds is never written
                if type(one) is array and (
                    one is out if owns and one.flags.owndata else may_share(out, one)
                ):
                    return None
        if reads:
            a = a if see_a is None else see_a(a)
            b = b if see_b is None else see_b(b)
        if swapped:
            product(b, a, out)
        else:
            product(a, b, out)
        return out

    return trusted


def _reader(form: Form, rung: str | None) -> Callable[[Any], Any] | None:
    """Return what takes of a prepared operand what a product reads; None: it is not prepared."""
    if form.ready is None:
        return None
    return operator.attrgetter("array") if rung is None else operator.methodcaller("packed", rung)


def _arrays(run: HostRun, trusted: FastCall, of_a: Signature, of_b: Signature) -> FastCall:
    """Return the call of two arrays: each further function would cost 0.1 us."""
    array, bind, fresh = np.ndarray, run.bound, run.fresh
    (a_dtype, a_shape, a_strides), (b_dtype, b_shape, b_strides) = of_a, of_b
    builtin: Callable[..., Any | None] | None = None

    def checked(a: Any, b: Any, out: Any) -> Any | None:
        nonlocal bind, builtin
        if builtin is not None:
            result = builtin(a, b) if out is None else builtin(a, b, out)
            if result is not None:
                return result
        if (
            type(a) is not array
            or type(b) is not array
            or a.shape != a_shape
            or b.shape != b_shape
            or a.strides != a_strides
            or b.strides != b_strides
            # The planned dtypes are native, so a foreign byte order compares unequal.
            or a.dtype != a_dtype
            or b.dtype != b_dtype
            or not (a.flags.aligned and b.flags.aligned)
        ):
            return None
        result = fresh(a, b) if out is None and fresh is not None else trusted(a, b, out)
        if bind is not None and result is not None:
            builtin, bind = bind(a, b), None
        return result

    return checked


def _codes(run: HostRun, trusted: FastCall, a: Form, b: Form) -> FastCall:
    """Return the call of a matrix of codes and an array; the matrix keeps its builtin function."""
    first, codes, array = a.quant is not None, QuantizedMatrix, np.ndarray
    planned, (dtype, shape, strides) = (a, _signature(b)) if first else (b, _signature(a))
    number, like = number_of(planned), np.empty(shape, dtype)
    bind = run.bound

    def builtin_of(matrix: Any) -> Callable[..., Any | None]:
        if bind is None or matrix.kept(known_number) != number:
            return _nothing
        return (bind(matrix, like) if first else bind(like, matrix)) or _nothing

    def checked(a: Any, b: Any, out: Any) -> Any | None:
        matrix, x = (a, b) if first else (b, a)
        if type(matrix) is not codes:
            return None
        if bind is not None:
            builtin = matrix.kept(builtin_of)
            result = builtin(a, b) if out is None else builtin(a, b, out)
            if result is not None:
                return result
        if (
            type(x) is not array
            or x.shape != shape
            or x.strides != strides
            or x.dtype != dtype
            or not x.flags.aligned
            or matrix.kept(known_number) != number
        ):
            return None
        return trusted(a, b, out)

    return checked


def _nothing(a: Any, b: Any, out: Any = None) -> None:
    return None


def _any(trusted: FastCall, of_a: Signature, of_b: Signature) -> FastCall:
    """Return the call of operands of which one is prepared."""

    def checked(a: Any, b: Any, out: Any) -> Any | None:
        fits = seen(a) == of_a and seen(b) == of_b and _aligned(a) and _aligned(b)
        return trusted(a, b, out) if fits else None

    return checked


def general(a: Any, b: Any, out: Any) -> None:
    """Do nothing: the fast call of operands that have none."""


def key(op: str, a: Any, b: Any) -> Any | None:
    """Return what tells a product's operands apart, quick to hash; None: not all are on the host.

    Two plain arrays have one of their own, made where it is needed.
    """
    seen_a, seen_b = seen(a), seen(b)
    return None if seen_a is None or seen_b is None else (op, seen_a, seen_b)


def _aligned(operand: Any) -> bool:
    return type(operand) is not np.ndarray or operand.flags.aligned


def seen(operand: Any) -> Signature | None:
    """Return what tells an operand apart, or None: it is for the general path."""
    if type(operand) is np.ndarray:
        return operand.dtype, operand.shape, operand.strides
    if type(operand) is QuantizedMatrix:
        return operand.kept(known_number) or None
    if type(operand) is PreparedMatrix and not operand.is_cuda:
        return operand.form
    return None


def form(operand: Any) -> Form | None:
    """Return an operand's form, or None: it is for the general path."""
    if type(operand) is QuantizedMatrix:
        return operand.kept(quantized_form) if operand.device == "cpu" else None
    if type(operand) is not np.ndarray:
        return operand.form if type(operand) is PreparedMatrix and not operand.is_cuda else None
    dtype, size, strides = operand.dtype, operand.itemsize, operand.strides
    odd = not operand.flags.aligned or any(step % size for step in strides)
    if odd or not dtype.isnative or dtype.name not in DTYPES:
        return None
    steps = tuple([step // size for step in strides])
    return Form(operand.shape, steps, dtype.name, min(size, 16))


_forms: dict[Form, Form] = {}


def number_of(form: Form) -> int:
    """Return the number, never 0, that stands for a form of codes in this process."""
    return id(_forms.setdefault(form, form))  # what is kept for good has an id of its own


def known_number(matrix: QuantizedMatrix) -> int:
    """Return that of a matrix on the host, 0 of one on a device; to be kept with the matrix."""
    return number_of(quantized_form(matrix)) if matrix.device == "cpu" else 0


def _signature(form: Form) -> Signature:
    if form.ready is not None:
        return form
    if form.quant is not None:
        return number_of(form)
    strides = tuple(step * ITEMSIZE[form.dtype] for step in form.strides)
    return numpy_dtype(form.dtype), form.shape, strides
