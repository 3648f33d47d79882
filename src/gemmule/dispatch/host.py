"""The fast path of products of NumPy arrays, quantised and prepared matrices on the host.

A bound call compares what it is given with what was planned, attribute by attribute, and goes
straight to the kernel: 2 us instead of 15 for the general path through operands, 4 instead of 28
beside a quantised matrix. Vectors' products by our own kernels and BLAS's go from the second call
on by a builtin function that compares, allocates and launches in half a microsecond
(`backends.cpu.calls`). Whatever it does not know (another library, other strides, a questionable
`out`) it leaves to the general path, which accepts or refuses it with an explanation.
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


class FastPath:
    """The fast path of a planned product.

    ``call(a, b, out)`` returns the product of operands of exactly the planned dtypes, shapes and
    strides, in `out` where given, or None: nothing was done, take the general path. It compares the
    operands itself, so nobody has to before.
    """

    def __init__(self, call: FastCall) -> None:
        self.call = call


def bound_call(run: HostRun, call: Call, a: Form, b: Form) -> FastCall:
    """Return the product of arrays on the host as one function, `FastPath.call`."""
    planned = _Planned(a), _Planned(b)
    found, bind = _fast_call(run, call, *planned), run.bound
    plain = planned[0].is_plain or planned[1].is_plain
    if bind is not None and plain and (planned[0].is_coded or planned[1].is_coded):
        found = _first_builtin(bind, found, *planned)
    return found


class _Planned:
    """What is compared of an operand: a plain array's attributes, or what else tells it apart."""

    def __init__(self, form: Form) -> None:
        self.form, self.is_coded, self.is_ready = form, form.quant is not None, bool(form.ready)
        self.is_plain = not (self.is_coded or self.is_ready)
        steps = tuple(step * ITEMSIZE.get(form.dtype, 0) for step in form.strides)
        self.array: Any = (
            (numpy_dtype(form.dtype), form.shape, steps) if self.is_plain else (None,) * 3
        )
        self.other = number_of(form) if self.is_coded else form

    def reader(self, rung: str | None) -> Callable[[Any], Any] | None:
        """Return what takes of a prepared matrix what a product reads; None: it is read itself."""
        if not self.is_ready:
            return None
        return (
            operator.attrgetter("array") if rung is None else operator.methodcaller("packed", rung)
        )


def _fast_call(run: HostRun, call: Call, of_a: _Planned, of_b: _Planned) -> FastCall:
    """Return the product as one function: each further one that it called would cost 0.1 us."""
    array, empty, may_share = np.ndarray, np.empty, np.may_share_memory
    (a_dtype, a_shape, a_strides), (b_dtype, b_shape, b_strides) = of_a.array, of_b.array
    plain_a, other_a, plain_b, other_b = of_a.is_plain, of_a.other, of_b.is_plain, of_b.other
    coded_a, coded_b = of_a.is_coded, of_b.is_coded
    product, fresh = _as_given(run, call, of_a, of_b), run.fresh
    out_shape, out_dtype = call.out_shape, numpy_dtype(call.problem.out)
    bind: Any = run.bound
    wanted = plain_a and plain_b and bind is not None
    builtin: Callable[..., Any | None] | None = None

    def fast(a: Any, b: Any, out: Any) -> Any | None:
        nonlocal builtin, wanted
        if builtin is not None:
            result = builtin(a, b) if out is None else builtin(a, b, out)
            if result is not None:
                return result
        # The planned dtypes are native, so a foreign byte order compares unequal.
        if plain_a:
            if type(a) is not array or a.shape != a_shape or a.strides != a_strides:
                return None
            a_flags = a.flags
            if a.dtype != a_dtype or not a_flags.aligned:
                return None
        elif seen(a) != other_a:
            return None
        if plain_b:
            if type(b) is not array or b.shape != b_shape or b.strides != b_strides:
                return None
            b_flags = b.flags
            if b.dtype != b_dtype or not b_flags.aligned:
                return None
        elif seen(b) != other_b:
            return None
        if wanted:  # for the products after this one
            builtin, wanted = bind(a, b), False
        if out is None:
            if fresh is not None:
                return fresh(a, b)
            out = empty(out_shape, out_dtype)
        elif type(out) is not array or out.dtype != out_dtype or out.shape != out_shape:
            return None
        else:
            flags = out.flags
            # C-contiguous, aligned, writable; native as the dtypes are equal. Two arrays that own
            # their memory share none, twice as quick to ask.
            owns = flags.owndata
            if (
                not flags.carray
                or (plain_a and (a is out if owns and a_flags.owndata else may_share(out, a)))
                or (plain_b and (b is out if owns and b_flags.owndata else may_share(out, b)))
                or (coded_a and _holds(a, out, owns))
                or (coded_b and _holds(b, out, owns))
            ):
                return None
        product(a, b, out)
        return out

    return fast


def _owners(matrix: QuantizedMatrix) -> frozenset[int]:
    """Return the identities of the arrays that own the memory of a matrix's parts."""
    found = set()
    for part in matrix.parts:
        while isinstance(part.base, np.ndarray):
            part = part.base
        found.add(id(part))
    return frozenset(found)


def _holds(matrix: QuantizedMatrix, out: Any, owns: bool) -> bool:
    """Tell whether a result would lie in a matrix's parts; owns: it owns its memory."""
    if owns:
        return id(out) in matrix.kept(_owners)
    return any(np.may_share_memory(out, part) for part in matrix.parts)


def _as_given(
    run: HostRun, call: Call, of_a: _Planned, of_b: _Planned
) -> Callable[[Any, Any, Any], None]:
    """Return the run's product, of operands in the user's order, prepared ones among them."""
    own, see_a, see_b = run.product, of_a.reader(run.packed[0]), of_b.reader(run.packed[1])
    swapped = call.swapped

    def product(a: Any, b: Any, out: Any) -> None:
        a, b = a if see_a is None else see_a(a), b if see_b is None else see_b(b)
        if swapped:
            a, b = b, a
        own(a, b, out)

    return product if swapped or see_a is not None or see_b is not None else own


def _first_builtin(
    bind: Callable[[Any, Any], Callable[..., Any | None] | None],
    otherwise: FastCall,
    of_a: _Planned,
    of_b: _Planned,
) -> FastCall:
    """Return the product of a matrix of codes, which keeps a builtin function to be tried first."""
    first, codes = of_a.is_coded, QuantizedMatrix
    number, (dtype, shape, _) = (of_a if first else of_b).other, (of_b if first else of_a).array
    like = np.empty(shape, dtype)

    def builtin_of(matrix: Any) -> tuple[Callable[..., Any | None], frozenset[int]]:
        found = None
        if matrix.kept(known_number) == number:
            found = bind(matrix, like) if first else bind(like, matrix)
        return found or _nothing, matrix.kept(_owners)

    def fast(a: Any, b: Any, out: Any) -> Any | None:
        matrix = a if first else b
        if type(matrix) is codes:
            builtin, owners = matrix.kept(builtin_of)
            if out is None:
                result = builtin(a, b)
            else:  # which it takes where it owns its memory
                result = None if id(out) in owners else builtin(a, b, out)
            if result is not None:
                return result
        return otherwise(a, b, out)

    return fast


def _nothing(a: Any, b: Any, out: Any = None) -> None:
    return None


def general(a: Any, b: Any, out: Any) -> None:
    """Do nothing: the fast call of operands that have none."""


def key(op: str, a: Any, b: Any) -> Any | None:
    """Return what tells a product's operands apart, quick to hash; None: not all are on the host.

    Two plain arrays have one of their own, made where it is needed.
    """
    seen_a, seen_b = seen(a), seen(b)
    return None if seen_a is None or seen_b is None else (op, seen_a, seen_b)


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
