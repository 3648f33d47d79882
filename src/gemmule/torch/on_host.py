"""A matrix's products with tensors on the host, bound to addresses after the first of a kind.

What a product of a layer costs beside its kernel is Python: operands unwrapped, views, copies to
another dtype. Here a repetition is compared with what was met, its memory allocated by PyTorch, and
the kernel called: 8 us in place of 66 (one thread of a Xeon, November 2026). What it does not know
is left to the general path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gemmule.arrays.interop import quantized_form
from gemmule.backends.cpu.calls.builtin import Job
from gemmule.backends.cpu.openmp import lent
from gemmule.backends.cpu.pool import team
from gemmule.backends.cpu.steps import by_address
from gemmule.backends.cpu.threads import LENT
from gemmule.core.caches import table
from gemmule.core.canonical import DEFAULT
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import ITEMSIZE, numpy_dtype
from gemmule.core.rung import CpuRung
from gemmule.dispatch.torch_repeats import guards
from gemmule.dispatch.tracked import recorded
from gemmule.general import compiled, leaves_host
from gemmule.plan import resolve
from gemmule.quant.matrix import QuantizedMatrix

_MOST, _MOST_GUARDS = 64, 4
_dual = torch.autograd.forward_ad
_LATEST = table()  # holds an object for as long as what was measured stays the same


def _latest() -> object:
    return _LATEST.setdefault("", object())


class HostCalls:
    """The bound products of one matrix; `QuantizedMatrix.kept` keeps them with it."""

    def __init__(self, matrix: QuantizedMatrix) -> None:
        self._calls: dict[Any, _Bound] = {}  # by the operation, x's shape and dtype

    def guarded(self, matrix: QuantizedMatrix, x: Any, bias: Any) -> torch.Tensor | None:
        """Return ``x W^T + bias`` where a guard knows x: PyTorch need not know of it. Else None."""
        bound = self._calls.get(("matvec", x.shape, x.dtype))
        if bound is None or _dual._current_level >= 0 or recorded():  # which no guard sees
            return None
        for same in bound.guards:
            if same(x):
                y = bound(matrix, x)
                return y if y is None or bias is None else y.add_(bias)
        return None

    def again(self, op: str, matrix: QuantizedMatrix, x: torch.Tensor) -> torch.Tensor | None:
        """Return the product of tensors whose product PyTorch need not know of, or None."""
        bound = self._calls.get((op, x.shape, x.dtype))
        if bound is None or x.stride() != bound.strides or x.is_neg() or not x.is_cpu:
            return None
        return bound(matrix, x)

    def keep(self, op: str, matrix: QuantizedMatrix, x: torch.Tensor, *, asks: bool) -> None:
        """Bind the product of operands like these, where that is known how.

        asks: PyTorch was asked, and need not know of it: a guard may answer for it from now on.
        """
        key = op, x.shape, x.dtype
        bound = self._calls.get(key)
        if bound is None or not bound.is_latest():
            bound = _bound(op, matrix, x)
            if bound is None:
                return
            if len(self._calls) >= _MOST:
                self._calls.clear()
            self._calls[key] = bound
        # One made under no_grad for x with a gradient would let that be lost later.
        if asks and not x.requires_grad and len(bound.guards) < _MOST_GUARDS:
            bound.guards.append(guards(x))


Made = Callable[[QuantizedMatrix], "Job | None"]


class _Bound:
    """A product of x of one form, by the threads of now."""

    __slots__ = ("_calls", "_dtype", "_job", "_latest", "_out", "_working", "guards", "strides")

    def __init__(self, job: Made, x: torch.Tensor, outer: int, working: torch.dtype) -> None:
        self._job = job
        self._calls: dict[Any, Callable[[int, int], bool]] = {}  # by the team
        self._out, self._dtype, self._working = (*x.shape[:-1], outer), x.dtype, working
        self._latest, self.strides = _latest(), x.stride()
        self.guards: list[Callable[..., bool]] = []

    def is_latest(self) -> bool:
        """Whether nothing was measured since that may choose another kernel."""
        return _LATEST.get("") is self._latest

    def __call__(self, matrix: QuantizedMatrix, x: torch.Tensor) -> torch.Tensor | None:
        """Return the product, or None: nothing was done."""
        if leaves_host() or not self.is_latest():
            return None
        before = LENT.count
        LENT.count = lent(torch) or before
        try:
            now = team()
            call = self._calls.get(now)
            if call is None:
                call = self._calls[now] = self._made(matrix)
        finally:
            LENT.count = before
        working = self._working
        given = x if x.dtype == working else x.to(working)
        y = torch.empty(self._out, dtype=working)
        if not call(given.data_ptr(), y.data_ptr()):
            return None
        return y if self._dtype == working else y.to(self._dtype)

    def _made(self, matrix: QuantizedMatrix) -> Callable[[int, int], bool]:
        job = self._job(matrix)
        return _never if job is None else by_address(job)


def _never(x: int, y: int) -> bool:
    return False


def _bound(op: str, matrix: QuantizedMatrix, x: torch.Tensor) -> _Bound | None:
    """Return the product of operands like these, None where their rung has no job for it."""
    if leaves_host() or compiled() or not x.is_contiguous() or x.numel() == 0:
        return None
    inner, count = x.shape[-1], x.numel() // x.shape[-1]
    name = str(x.dtype).removeprefix("torch.")
    shape = (inner,) if count == 1 else (count, inner)
    seen = Form(shape, c_strides(shape), name, ITEMSIZE[name])
    own = matrix.kept(quantized_form)
    forms = (seen, own) if op == "vecmat" else (own, seen)
    choice = resolve(op, *forms, None, "cpu", DEFAULT).choice
    rung, problem, call = choice.rung, choice.problem, choice.call
    if not isinstance(rung, CpuRung) or rung.job is None or problem != call.problem or call.outer:
        return None
    job_of, params, turned = rung.job, choice.params, call.transposed_quant
    if problem.op == "matvec":  # in float32, as such rungs read and write it
        problem, name = replace(problem, b="float32", out="float32"), "float32"
    like = np.empty(shape, numpy_dtype(name)).T

    def job(matrix: QuantizedMatrix) -> Job | None:
        return job_of(problem, params, matrix.T if turned else matrix, like)

    return _Bound(job, x, problem.m, getattr(torch, name))
