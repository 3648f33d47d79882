"""The short way of a planned product on plain NumPy arrays.

A `HostCall` compares what a call brings with what was planned, attribute by attribute, and goes
straight to the kernel: 2 us instead of 15 for the general way through `gemmule.arrays`. Whatever
it does not know (another library, other strides, a questionable `out`) it leaves to that way,
which accepts or refuses it with an explanation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gemmule.arrays import Form
from gemmule.backends import HostRun
from gemmule.canonical import Call, Options
from gemmule.problem import DTYPES, ITEMSIZE, numpy_dtype


class ShortWay(Protocol):
    """A quick way of a planned product; the attribute may be a method or a closure."""

    @property
    def checked(self) -> Callable[[Any, Any, Any], Any | None]:
        """(a, b, out) -> the product, or None when nothing was done: go the general way."""
        ...


class HostCall:
    """One product of ndarrays of exactly the planned dtypes, shapes and strides."""

    __slots__ = ("_a", "_b", "_dtype", "_run", "_shape", "_swapped")

    def __init__(self, run: HostRun, call: Call, a: Form, b: Form) -> None:
        self._a, self._b = _signature(a), _signature(b)
        self._shape, self._dtype = call.out_shape, numpy_dtype(call.problem.out)
        self._run, self._swapped = run.on_arrays, call.swapped

    def checked(self, a: Any, b: Any, out: Any) -> Any | None:
        """Return the product, in `out` where given, or None: nothing was done, go the other way."""
        if type(a) is not np.ndarray or type(b) is not np.ndarray:
            return None
        # The planned dtypes are native, so a foreign byte order compares unequal.
        if (a.dtype, a.shape, a.strides) != self._a or not a.flags.aligned:
            return None
        if (b.dtype, b.shape, b.strides) != self._b or not b.flags.aligned:
            return None
        return self.trusted(a, b, out)

    def trusted(self, a: Any, b: Any, out: Any) -> Any | None:
        """Like `checked`, for aligned ndarrays of exactly the planned forms."""
        if out is None:
            out = np.empty(self._shape, self._dtype)
        elif not self._takes_out(out) or np.may_share_memory(out, a) or np.may_share_memory(out, b):
            return None
        if self._swapped:
            a, b = b, a
        self._run(a, b, out, 1.0, 0.0)
        return out

    def _takes_out(self, out: Any) -> bool:
        if type(out) is not np.ndarray or out.shape != self._shape or out.dtype != self._dtype:
            return False
        return out.flags.carray  # C-contiguous, aligned, writable; native as the dtypes are equal


def eager(
    resolve: Callable[..., Any], op: str, a: Any, b: Any, out: Any, options: Options,
    rung: str | None, params: Any,
) -> Any | None:  # fmt: skip
    """Return an unplanned product of ndarrays, or None: nothing was done, go the other way.

    The plan is found by dtypes, shapes and strides alone: 4 us instead of 12 through Operands.
    resolve: `gemmule.plan.resolve`, handed in because this module lies below it.
    """
    if type(a) is not np.ndarray or type(b) is not np.ndarray:
        return None
    if not (a.flags.aligned and b.flags.aligned):
        return None
    short = _bound(
        resolve, op, a.dtype, a.shape, a.strides, b.dtype, b.shape, b.strides, options, rung, params
    )
    return None if short is None else short.trusted(a, b, out)


@functools.lru_cache(maxsize=4096)
def _bound(
    resolve: Callable[..., Any], op: str, a_dtype: Any, a_shape: Any, a_strides: Any, b_dtype: Any,
    b_shape: Any, b_strides: Any, options: Options, rung: str | None, params: Any,
) -> HostCall | None:  # fmt: skip
    forms = []
    for dtype, shape, strides in ((a_dtype, a_shape, a_strides), (b_dtype, b_shape, b_strides)):
        size = dtype.itemsize
        if not dtype.isnative or dtype.name not in DTYPES or any(step % size for step in strides):
            return None
        forms.append(
            Form(shape, tuple([step // size for step in strides]), dtype.name, min(size, 16))
        )
    short = resolve(op, *forms, None, "cpu", options, rung, params).short_way
    return short if isinstance(short, HostCall) else None


def forget() -> None:
    """Drop what `eager` has found, so that the next call sees new plans."""
    _bound.cache_clear()


def _signature(form: Form) -> tuple[np.dtype[Any], tuple[int, ...], tuple[int, ...]]:
    strides = tuple(step * ITEMSIZE[form.dtype] for step in form.strides)
    return numpy_dtype(form.dtype), form.shape, strides


def short_way(run: Any, call: Call, a: Form, b: Form, device: str) -> ShortWay | None:
    """Return the short way for a back end's launcher, or None where there is none."""
    if a.quant is not None or b.quant is not None:
        return None
    if isinstance(run, HostRun):
        return HostCall(run, call, a, b)
    own = getattr(run, "short_way", None)
    found: ShortWay | None = None if own is None else own(call, a, b, device)
    return found
