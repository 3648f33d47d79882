"""The short way of a planned product on plain NumPy arrays and quantised matrices on the host.

A `HostCall` compares what a call brings with what was planned, attribute by attribute, and goes
straight to the kernel: 2 us instead of 15 for the general way through `gemmule.arrays`, 4 instead
of 28 beside a quantised matrix. Whatever it does not know (another library, other strides, a
questionable `out`) it leaves to that way, which accepts or refuses it with an explanation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gemmule.arrays import Form, quantized_form
from gemmule.backends import HostRun
from gemmule.canonical import Call, Options
from gemmule.problem import DTYPES, ITEMSIZE, numpy_dtype
from gemmule.quant import QuantizedMatrix

# What tells operands apart: dtype, shape and strides of an array, the form of a matrix of codes.
Signature = tuple[Any, ...]


class ShortWay(Protocol):
    """A quick way of a planned product; the attribute may be a method or a closure."""

    @property
    def checked(self) -> Callable[[Any, Any, Any], Any | None]:
        """(a, b, out) -> the product, or None when nothing was done: go the general way."""
        ...


class HostCall:
    """One product of operands of exactly the planned dtypes, shapes and strides."""

    __slots__ = ("_a", "_b", "_dtype", "_run", "_shape", "_swapped")

    def __init__(self, run: HostRun, call: Call, a: Form, b: Form) -> None:
        self._a, self._b = _signature(a), _signature(b)
        self._shape, self._dtype = call.out_shape, numpy_dtype(call.problem.out)
        self._run, self._swapped = run.on_arrays, call.swapped

    def checked(self, a: Any, b: Any, out: Any) -> Any | None:
        """Return the product, in `out` where given, or None: nothing was done, go the other way."""
        # The planned dtypes are native, so a foreign byte order compares unequal.
        if _seen(a) != self._a or _seen(b) != self._b:
            return None
        return self.trusted(a, b, out)

    def trusted(self, a: Any, b: Any, out: Any) -> Any | None:
        """Like `checked`, for operands of exactly the planned forms."""
        if out is None:
            out = np.empty(self._shape, self._dtype)
        elif (
            type(out) is not np.ndarray
            or out.dtype != self._dtype
            or out.shape != self._shape
            # C-contiguous, aligned, writable; native as the dtypes are equal
            or not out.flags.carray
            or _may_overlap(out, a)
            or _may_overlap(out, b)
        ):
            return None
        if self._swapped:
            a, b = b, a
        self._run(a, b, out, 1.0, 0.0)
        return out


def eager(
    resolve: Callable[..., Any],
    op: str,
    a: Any,
    b: Any,
    out: Any,
    options: Options,
    rung: str | None,
    params: Any,
) -> Any | None:
    """Return an unplanned product, or None: nothing was done, go the other way.

    The plan is found by dtypes, shapes and strides alone: 4 us instead of 12 through Operands.
    resolve: `gemmule.plan.resolve`, handed in because this module lies below it.
    """
    seen_a, seen_b = _seen(a), _seen(b)
    if seen_a is None or seen_b is None:
        return None
    short = _bound(resolve, op, seen_a, seen_b, options, rung, params)
    return None if short is None else short.trusted(a, b, out)


def _seen(operand: Any) -> Signature | None:
    """Return what tells an operand apart, or None: it is for the general way."""
    if type(operand) is np.ndarray:
        return (operand.dtype, operand.shape, operand.strides) if operand.flags.aligned else None
    if type(operand) is QuantizedMatrix and operand.device == "cpu":
        return operand.kept(quantized_form)
    return None


def _may_overlap(out: Any, operand: Any) -> bool:
    """Whether they may share memory; the parts of a matrix of codes are read-only."""
    return type(operand) is np.ndarray and np.may_share_memory(out, operand)


@functools.lru_cache(maxsize=4096)
def _bound(
    resolve: Callable[..., Any],
    op: str,
    seen_a: Signature,
    seen_b: Signature,
    options: Options,
    rung: str | None,
    params: Any,
) -> HostCall | None:
    a, b = _form(seen_a), _form(seen_b)
    if a is None or b is None:
        return None
    short = resolve(op, a, b, None, "cpu", options, rung, params).short_way
    return short if isinstance(short, HostCall) else None


def _form(seen: Signature) -> Form | None:
    """Return the form that a signature stands for, or None: it is for the general way."""
    if isinstance(seen, Form):
        return seen
    dtype, shape, strides = seen
    size = dtype.itemsize
    if not dtype.isnative or dtype.name not in DTYPES or any(step % size for step in strides):
        return None
    return Form(shape, tuple([step // size for step in strides]), dtype.name, min(size, 16))


def forget() -> None:
    """Drop what `eager` has found, so that the next call sees new plans."""
    _bound.cache_clear()


def _signature(form: Form) -> Signature:
    if form.quant is not None:
        return form
    strides = tuple(step * ITEMSIZE[form.dtype] for step in form.strides)
    return numpy_dtype(form.dtype), form.shape, strides


def short_way(run: Any, call: Call, a: Form, b: Form, device: str) -> ShortWay | None:
    """Return the short way for a back end's launcher, or None where there is none."""
    if isinstance(run, HostRun):
        return HostCall(run, call, a, b)
    if a.quant is not None or b.quant is not None:
        return None
    own = getattr(run, "short_way", None)
    found: ShortWay | None = None if own is None else own(call, a, b, device)
    return found
