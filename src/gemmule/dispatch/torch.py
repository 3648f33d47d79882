"""The fast path of a product of CUDA tensors of PyTorch, alone or beside a matrix of our own.

A `TensorCall` compares what a call brings with what was planned and goes straight to the launch.
What it does not know (another library or device, other strides, less alignment, a questionable
`out`) is left to the general path, which accepts or refuses it with an explanation.

The functions are closures and the launch goes through ctypes: on an H200's host (November 2026) a
planned call takes 5.7 us with methods and cuda.bindings, of which the driver itself needs 2.9.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from gemmule.backends.cuda import driver
from gemmule.backends.cuda.composed import Composed
from gemmule.backends.cuda.launch import Launcher
from gemmule.backends.cuda.library.run import LibraryRun
from gemmule.backends.cuda.packed.launch import PackedLauncher
from gemmule.backends.cuda.starter import Start
from gemmule.core.canonical import Call
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import ITEMSIZE
from gemmule.dispatch.host import FastPath
from gemmule.dispatch.torch_repeats import Known, Product, RepeatGuard, known
from gemmule.quant.cuda.by_library import ByLibrary

Run = Launcher | PackedLauncher | LibraryRun | ByLibrary | Composed
_NO_BIAS: tuple[Any, ...] = ()


class TensorCall(FastPath):
    """The product of tensors, or of one and a matrix of our own, of exactly the planned forms."""

    def __init__(self, run: Run, call: Call, forms: tuple[Form, Form], ordinal: int) -> None:
        self._given = run, call, forms, ordinal
        super().__init__(bound_call(*self._given))
        self._others: dict[tuple[bool, bool], Product] = {(True, False): self.call}

    def bound(self, *, asks: bool, adds: bool) -> Product:
        """Return the product for a caller of another kind.

        asks: whether PyTorch is asked if it has to know of it, as it is not within an operator of
        its own. adds: the third operand is a bias, which is added, by one launch where a proved
        kernel does it.
        """
        found = self._others.get((asks, adds))
        if found is None:
            run, call, forms, ordinal = self._given
            biased = run.with_bias() if adds and isinstance(run, Launcher) else None
            if adds and biased is None:
                found = _added(self.bound(asks=asks, adds=False))
            else:
                found = bound_call(biased or run, call, forms, ordinal, asks=asks)
            self._others[asks, adds] = found
        return found


def _added(product: Product) -> Product:
    """Return a product to which a bias is added by PyTorch."""

    def added(a: Any, b: Any, bias: Any) -> Any:
        found = product(a, b, None)
        return None if found is None else found.add_(bias.detach())

    return added


def bound_call(
    run: Run, call: Call, forms: tuple[Form, Form], ordinal: int, *, asks: bool = True
) -> Product:
    """Return ``(a, b, out)`` -> the product of operands of these forms, or None: nothing was done.

    Of a launcher that adds a bias, that is the third operand, and the result a new tensor. asks:
    whether PyTorch is asked first if it has to know of the product.
    """
    torch = sys.modules["torch"]
    native, dual = torch._C, torch.autograd.forward_ad
    device_of, stream_of = native._cuda_getDevice, native._cuda_getCurrentRawStream
    written = native._increment_version  # a gradient that needs what was there has to fail
    adds = isinstance(run, Launcher) and run.adds
    guard = RepeatGuard(call, forms, ordinal, asks=asks, adds=adds)
    kind, first = guard.kind, guard.first
    exchanged, rung = _exchanged(run, call, forms), getattr(run, "rung", None)
    fresh = maker(call.out_shape, getattr(torch, call.problem.out), ordinal)
    low_bytes, x_bytes = map(extent, forms if first else forms[::-1])
    out_bytes = torch.Size(call.out_shape).numel() * ITEMSIZE[call.problem.out]
    mask = call.problem.alignment - 1
    start, workspace = _starter(run, ordinal)

    def bound(a: Any, b: Any, out: Any) -> Any:
        same = guard.operands if out is None else guard.every
        if kind is None:
            alike = same(a, b) if out is None else same(a, b, out)
            if (not alike or dual._current_level >= 0) and not guard.admits((a, b), out):
                return None
            left = low = a.data_ptr()
            right = b.data_ptr()
        else:
            held, x = (a, b) if first else (b, a)
            if type(held) is not Known:
                held = known(held)
            if held.kind is not kind:
                return None
            alike = same(x) if out is None else same(x, out)
            if (not alike or dual._current_level >= 0) and not guard.admits((x,), out):
                return None
            left, low, right = held.places[rung], held.begin, x.data_ptr()
        if (low | right) & mask or not (low and right) or device_of() != ordinal:
            return None
        work, more = 0, _NO_BIAS
        if out is None:
            out = fresh()  # as aligned as any address has to be, and nobody else's memory
            result = out.data_ptr()
        elif adds:
            bias, out = out, fresh()  # two names: what is read has to live until the launch
            more, result = ((bias.data_ptr(),),), out.data_ptr()
        else:
            result = out.data_ptr()
            end = result + out_bytes
            if result & mask or not result or (result < low + low_bytes and low < end):
                return None
            if right < end and result < right + x_bytes:
                return None  # out may overlap an operand
            if kind is not None and any(at < end and result < to for at, to in held.parts):
                return None
            written([out])
        if exchanged:
            left, right = right, left
        if workspace is not None:
            owner = workspace()  # until the launches are given, after which its memory is reused
            work = owner.data_ptr()
        start(stream_of(ordinal), left, right, result, work, *more)
        return out

    return bound


def _exchanged(run: Run, call: Call, forms: tuple[Form, Form]) -> bool:
    """Whether the launch takes the tensor before the matrix, or the second tensor first."""
    a, b = forms
    if a.quant is not None or b.quant is not None:
        return False
    exchanged = call.swapped != (b.ready is not None)
    return exchanged != (isinstance(run, LibraryRun) and run.exchanged)


def _starter(run: Run, ordinal: int) -> tuple[Start, Callable[[], Any] | None]:
    """Return what starts a run, its kernels loaded, and what makes its workspace if it has one."""
    if isinstance(run, LibraryRun):
        prepared = run.prepared(ordinal)
        start, nbytes = prepared.starter(1.0, 0.0), prepared.workspace_bytes
    elif isinstance(run, ByLibrary | Composed):
        start, nbytes = run.starter(ordinal), run.workspace_bytes(ordinal)
    else:
        start, nbytes = run.starter(ordinal), run.workspace
    torch = sys.modules["torch"]
    return start, maker((nbytes,), torch.uint8, ordinal) if nbytes else None


def maker(shape: tuple[int, ...], dtype: Any, ordinal: int) -> Callable[[], Any]:
    """Return what makes an uninitialised C-ordered tensor while device `ordinal` is current.

    What compiled models allocate by takes a microsecond less than `torch.empty` (one H200's host,
    November 2026); it is no public interface either.
    """
    torch = sys.modules["torch"]
    # From PyTorch 2.13 on it takes no subclass of tuple, which torch.Size is.
    wanted = (tuple(shape), c_strides(shape), dtype, torch.device("cuda", ordinal))
    with contextlib.suppress(Exception):  # whatever another version's private interface raises
        quick = torch._C._dynamo.guards._empty_strided_cuda
        made = quick(*wanted[:3])
        if (made.shape, made.stride(), made.dtype, made.device) == wanted:
            return functools.partial(quick, *wanted[:3])
    return functools.partial(torch.empty, shape, dtype=dtype, device=wanted[3])


def extent(form: Form) -> int:
    """Return the bytes from the first element to behind the last, 0 of codes, which lie elsewhere.

    Strides are not negative.
    """
    if form.quant is not None:
        return 0
    reach = sum((s - 1) * t for s, t in zip(form.shape, form.strides, strict=True) if s > 0)
    return (reach + 1) * ITEMSIZE[form.dtype]


def bind(run: Any, call: Call, a: Form, b: Form, ordinal: int) -> TensorCall | None:
    """Return the fast path of a prepared launcher, or None where there is none."""
    torch = sys.modules["torch"]
    if not hasattr(torch._C, "_cuda_getDevice"):
        return None  # a PyTorch built without CUDA has no CUDA tensors
    if not isinstance(run, Run) or not (isinstance(run, PackedLauncher) or run.is_one_call):
        return None
    own = [form for form in (a, b) if form.quant is not None or form.ready is not None]
    if len(own) > 1:  # of two matrices of our own the result is no tensor
        return None
    if any(step < 0 for step in (*a.strides, *b.strides)) or 0 in (*a.shape, *b.shape):
        return None
    return TensorCall(run, call, (a, b), ordinal) if driver.is_current(ordinal) else None
