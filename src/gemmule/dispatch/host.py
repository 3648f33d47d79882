"""The short way of a product of plain NumPy arrays, quantised and prepared matrices on the host.

A `HostCall` compares what a call brings with what was planned, attribute by attribute, and goes
straight to the kernel: 2 us instead of 15 for the general way through operands, 4 instead of 28
beside a quantised matrix. Vectors' products by our own kernels, and BLAS's where Numba is there, go
from the second call on by a builtin function that compares, allocates and launches in half a
microsecond (`backends.cpu.calls`). Whatever it does not know (another library, other strides, a
questionable `out`) it leaves to that way, which accepts or refuses it with an explanation.
"""

from __future__ import annotations

import functools
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

# What tells operands apart: dtype, shape and strides of an array, the form of a matrix of codes.
Signature = tuple[Any, ...]


Way = Callable[[Any, Any, Any], Any]


class HostCall:
    """One product of operands of exactly the planned dtypes, shapes and strides.

    Both ways return the product, in `out` where given, or None: nothing was done, go the general
    way. `checked` looks at the operands, `trusted` knows that they are of the planned forms.
    """

    __slots__ = ("checked", "trusted")

    def __init__(self, run: HostRun, call: Call, a: Form, b: Form) -> None:
        product = _exchanged(run.product) if call.swapped else run.product
        product = _unwrapping(product, _reader(a, run.packed[0]), _reader(b, run.packed[1]))
        shape, dtype = call.out_shape, numpy_dtype(call.problem.out)
        self.trusted = _trusted(product, shape, dtype)
        if a.quant is None is b.quant and a.ready is None is b.ready:
            fresh = run.fresh
            self.checked = _checked_arrays(
                product, fresh, (shape, dtype), _signature(a), _signature(b)
            )
        elif (a.quant is None) != (b.quant is None) and a.ready is None is b.ready:
            self.checked = _checked_codes(self.trusted, _signature(a), _signature(b))
        else:
            self.checked = _checked(self.trusted, _signature(a), _signature(b))
        if run.bound is not None and a.ready is None is b.ready:
            of = _by_array if a.quant is None is b.quant else functools.partial(_by_matrix, a, b)
            self.checked, self.trusted = of(run.bound, self.checked, self.trusted)


Bind = Callable[[Any, Any], Callable[..., Any | None] | None]


def _by_array(bind: Bind, *ways: Way) -> tuple[Way, ...]:
    """Return ways of two arrays that try the shorter way first, from the second product on."""
    call: Callable[..., Any | None] | None = None
    wanted = True

    def first(way: Way) -> Way:
        def shortly(a: Any, b: Any, out: Any) -> Any | None:
            nonlocal call, wanted
            if call is not None:
                result = call(a, b) if out is None else call(a, b, out)
                if result is not None:
                    return result
            result = way(a, b, out)
            if wanted and result is not None:
                call, wanted = bind(a, b), False
            return result

        return shortly

    return tuple(first(way) for way in ways)


def _by_matrix(a: Form, b: Form, bind: Bind, *ways: Way) -> tuple[Way, ...]:
    """Return ways of a matrix of codes that try the shorter way first; the matrix keeps it."""
    left, codes = a.quant is not None, QuantizedMatrix
    planned, plain = (a, b) if left else (b, a)
    x = np.empty(plain.shape, numpy_dtype(plain.dtype))

    def call_of(matrix: Any) -> Callable[..., Any | None]:
        if matrix.device != "cpu" or quantized_form(matrix) != planned:
            return _nothing
        return (bind(matrix, x) if left else bind(x, matrix)) or _nothing

    def first(way: Way) -> Way:
        def shortly(a: Any, b: Any, out: Any) -> Any | None:
            matrix = a if left else b
            if type(matrix) is codes:
                call = matrix.kept(call_of)
                result = call(a, b) if out is None else call(a, b, out)
                if result is not None:
                    return result
            return way(a, b, out)

        return shortly

    return tuple(first(way) for way in ways)


def _nothing(a: Any, b: Any, out: Any = None) -> None:
    return None


Reader = Callable[[Any], Any]


def _reader(form: Form, rung: str | None) -> Reader | None:
    """Return what takes of a prepared operand what a product reads; None: it is not prepared."""
    if form.ready is None:
        return None
    return operator.attrgetter("array") if rung is None else operator.methodcaller("packed", rung)


def _unwrapping(product: Way, first: Reader | None, second: Reader | None) -> Way:
    """Return a product of operands of which some are prepared, for one of what these hold."""
    if first is not None and second is not None:
        return lambda a, b, out: product(first(a), second(b), out)
    if first is not None:
        return lambda a, b, out: product(first(a), b, out)
    return product if second is None else lambda a, b, out: product(a, second(b), out)


def _exchanged(product: Way) -> Way:
    return lambda a, b, out: product(b, a, out)


def _trusted(product: Way, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Way:
    def trusted(a: Any, b: Any, out: Any) -> Any | None:
        if out is None:
            out = np.empty(shape, dtype)
        elif (
            type(out) is not np.ndarray
            or out.dtype != dtype
            or out.shape != shape
            # C-contiguous, aligned, writable; native as the dtypes are equal
            or not out.flags.carray
            or _may_overlap(out, a)
            or _may_overlap(out, b)
        ):
            return None
        product(a, b, out)
        return out

    return trusted


def _checked(trusted: Way, planned_a: Signature, planned_b: Signature) -> Way:
    def checked(a: Any, b: Any, out: Any) -> Any | None:
        # The planned dtypes are native, so a foreign byte order compares unequal.
        seen_a, seen_b = seen(a), seen(b)
        # The form of a matrix of codes is kept with it: the planned one is often the same object.
        if (seen_a is not planned_a and seen_a != planned_a) or (
            seen_b is not planned_b and seen_b != planned_b
        ):
            return None
        return trusted(a, b, out)

    return checked


def _checked_codes(trusted: Way, planned_a: Signature, planned_b: Signature) -> Way:
    """Return `_checked` of a matrix of codes and an array, all in one function."""
    first, codes, array = isinstance(planned_a, Form), QuantizedMatrix, np.ndarray
    form, (dtype, shape, strides) = (planned_a, planned_b) if first else (planned_b, planned_a)

    def checked(a: Any, b: Any, out: Any) -> Any | None:
        matrix, x = (a, b) if first else (b, a)
        if (
            type(x) is not array
            or type(matrix) is not codes
            or x.shape != shape
            or x.strides != strides
            or x.dtype != dtype
            or not x.flags.aligned
            or matrix.device != "cpu"
        ):
            return None
        seen = matrix.kept(quantized_form)
        if seen is not form and seen != form:
            return None
        return trusted(a, b, out)

    return checked


def _checked_arrays(
    product: Way,
    fresh: Callable[[Any, Any], Any] | None,
    of_out: tuple[tuple[int, ...], np.dtype[Any]],
    of_a: Signature,
    of_b: Signature,
) -> Way:
    """Return `_checked` of two arrays, all in one function: each further one costs 0.1 us."""
    array, empty, (shape, dtype) = np.ndarray, np.empty, of_out
    (a_dtype, a_shape, a_strides), (b_dtype, b_shape, b_strides) = of_a, of_b
    may_share = np.may_share_memory

    def checked(a: Any, b: Any, out: Any) -> Any | None:
        if (
            type(a) is not array
            or type(b) is not array
            or a.shape != a_shape
            or b.shape != b_shape
            or a.strides != a_strides
            or b.strides != b_strides
            or a.dtype != a_dtype
            or b.dtype != b_dtype
        ):
            return None
        a_flags, b_flags = a.flags, b.flags
        if not (a_flags.aligned and b_flags.aligned):
            return None
        if out is None:
            if fresh is not None:
                return fresh(a, b)
            out = empty(shape, dtype)
        elif type(out) is not array or out.dtype != dtype or out.shape != shape:
            return None
        else:
            flags = out.flags
            if not flags.carray:
                return None
            # Two arrays that own their memory share none; that is twice as quick to ask.
            if flags.owndata and a_flags.owndata and b_flags.owndata:
                if out is a or out is b:
                    return None
            elif may_share(out, a) or may_share(out, b):
                return None
        product(a, b, out)
        return out

    return checked


def seen(operand: Any) -> Signature | None:
    """Return what tells an operand apart, or None: it is for the general way."""
    if type(operand) is np.ndarray:
        return (operand.dtype, operand.shape, operand.strides) if operand.flags.aligned else None
    if type(operand) is QuantizedMatrix and operand.device == "cpu":
        return operand.kept(quantized_form)
    if type(operand) is PreparedMatrix and not operand.is_cuda:
        return operand.form
    return None


def form(signature: Signature) -> Form | None:
    """Return the form that a signature stands for, or None: it is for the general way."""
    if isinstance(signature, Form):
        return signature
    dtype, shape, strides = signature
    size = dtype.itemsize
    if not dtype.isnative or dtype.name not in DTYPES or any(step % size for step in strides):
        return None
    return Form(shape, tuple([step // size for step in strides]), dtype.name, min(size, 16))


def _signature(form: Form) -> Signature:
    if form.quant is not None or form.ready is not None:
        return form
    strides = tuple(step * ITEMSIZE[form.dtype] for step in form.strides)
    return numpy_dtype(form.dtype), form.shape, strides


def _may_overlap(out: Any, operand: Any) -> bool:
    """Whether they may share memory; what a matrix of this package's own holds is read-only."""
    if type(operand) is not np.ndarray:
        return False
    if operand.flags.owndata and out.flags.owndata:  # twice as quick to ask
        return operand is out
    return np.may_share_memory(out, operand)
