"""The short way of a product of CUDA tensors of PyTorch.

A `TorchCall` compares what a call brings with what was planned, attribute by attribute, and goes
straight to the launch; `eager` finds one for an unplanned call by the operands' shapes, strides
and dtypes alone. What they do not know (another library or device, other strides, less alignment,
a questionable `out`) is left to the general way, which accepts or refuses it with an explanation.

The functions are closures and the launch goes through ctypes: on an H200's host (November 2026) a
planned call takes 5.7 us with methods and cuda.bindings, of which the driver itself needs 2.9.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemmule.arrays import Form
from gemmule.backends import driver
from gemmule.canonical import Call, Options, c_strides
from gemmule.problem import ITEMSIZE
from gemmule.rung import Step

if TYPE_CHECKING:
    from gemmule.backends.cuda import Launcher

Product = Callable[[Any, Any, Any], Any]

# CUlaunchConfig without attributes, directly followed by the kernel's struct: one packing writes
# the stream, no attributes, and the addresses of A, of x or B, and of the result.
CONFIG = struct.Struct("<7I4xQQI4x")
MOVING = struct.Struct("<Q16xQQQ")
MOVING_AT = 32


class TorchCall:
    """One product of tensors of exactly the planned dtypes, shapes and strides, on one device.

    ``checked(a, b, out)`` and ``trusted(a, b, out)`` return the product or None, when nothing was
    done; the latter relies on the caller for types, forms and device. `out_form`: what out must be.
    """

    __slots__ = ("checked", "out_form", "trusted")

    def __init__(self, launcher: Launcher, call: Call, a: Form, b: Form, ordinal: int) -> None:
        torch = sys.modules["torch"]
        self.out_form = (
            torch.Size(call.out_shape),
            c_strides(call.out_shape),
            getattr(torch, call.problem.out),
        )
        self.trusted = _trusted(launcher, call, a, b, ordinal)
        self.checked = _checked(self.trusted, self.out_form, a, b, ordinal)


def _checked(
    trusted: Product, out_form: tuple[Any, ...], a: Form, b: Form, ordinal: int
) -> Product:
    torch = sys.modules["torch"]
    tensor = torch.Tensor
    a_shape, a_strides, a_dtype = torch.Size(a.shape), a.strides, getattr(torch, a.dtype)
    b_shape, b_strides, b_dtype = torch.Size(b.shape), b.strides, getattr(torch, b.dtype)
    out_shape, out_strides, out_dtype = out_form
    known: Callable[[Any, Any, Any], bool] | None = None

    def checked(a: Any, b: Any, out: Any) -> Any:
        nonlocal known
        if known is not None and out is not None and known(a, b, out):
            return trusted(a, b, out)
        if (
            type(a) is tensor
            and type(b) is tensor
            and a.shape == a_shape
            and b.shape == b_shape
            and a.stride() == a_strides
            and b.stride() == b_strides
            and a.dtype is a_dtype
            and b.dtype is b_dtype
            and a.get_device() == ordinal
            and b.get_device() == ordinal
            and not (a.is_neg() or b.is_neg())
            and (
                out is None
                or (
                    type(out) is tensor
                    and out.shape == out_shape
                    and out.stride() == out_strides
                    and out.dtype is out_dtype
                    and out.get_device() == ordinal
                    and not out.is_neg()
                )
            )
        ):
            if out is not None and known is None:
                known = _guards(a, b, out)
            return trusted(a, b, out)
        return None

    return checked


def _guards(*tensors: Any) -> Callable[..., bool]:
    """Return PyTorch's own test for "like these": types, dtypes, devices, shapes, strides, flags.

    It compares three tensors in 0.3 us where Python's attributes take 0.9. It is no public
    interface, so a PyTorch without it goes the long way; it keeps no reference to the tensors.
    """
    with contextlib.suppress(Exception):  # whatever another version's private interface raises
        guards = sys.modules["torch"]._C._dynamo.guards.TensorGuards
        same: Callable[..., bool] = guards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        if same(*tensors) is True:
            return same
    return lambda *others: False


def _trusted(launcher: Launcher, call: Call, a: Form, b: Form, ordinal: int) -> Product:
    torch = sys.modules["torch"]
    empty, native = torch.empty, torch._C
    device_of, stream_of = native._cuda_getDevice, native._cuda_getCurrentRawStream
    shape, dtype = call.out_shape, getattr(torch, call.problem.out)
    device = torch.device("cuda", ordinal)
    a_bytes, b_bytes = _extent(a), _extent(b)
    out_bytes = torch.Size(shape).numel() * ITEMSIZE[call.problem.out]
    mask, swapped = call.problem.alignment - 1, call.swapped
    launch, local, pack_into = _launch(), threading.local(), MOVING.pack_into
    template, step, function = launcher.template, launcher.steps[0], _kernel(launcher, ordinal)

    def trusted(a: Any, b: Any, out: Any) -> Any:
        if out is None:
            out = empty(shape, dtype=dtype, device=device)
        left, right, result = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if (left | right | result) & mask or device_of() != ordinal or not (left and right):
            return None
        end = result + out_bytes
        if (result < left + a_bytes and left < end) or (result < right + b_bytes and right < end):
            return None  # out may overlap an input
        if swapped:
            left, right = right, left
        try:
            buffer, address, params = local.slot
        except AttributeError:
            buffer, address, params = local.slot = _slot(template, step)
        pack_into(buffer, MOVING_AT, stream_of(ordinal), left, right, result)
        code = launch(address, function, params, None)
        if code:
            raise _failed(code, step)
        return out

    return trusted


def _slot(template: bytes, step: Step) -> tuple[Any, int, int]:
    """Return one thread's memory: config and struct, its address, and that of the pointer array."""
    config = CONFIG.pack(*step.grid, *step.block, step.smem, 0, 0, 0)
    buffer = ctypes.create_string_buffer(config + template, len(config) + len(template))
    address = ctypes.addressof(buffer)
    params = (ctypes.c_void_p * 1)(address + len(config))
    buffer.params = params  # type: ignore[attr-defined]  # lives as long as the buffer
    return buffer, address, ctypes.addressof(params)


def _kernel(launcher: Launcher, ordinal: int) -> int:
    """Return the handle of the only step's kernel, loaded."""
    launcher.load(ordinal)
    module, step = launcher.module, launcher.steps[0]
    return int(driver.load(module.cubin, module.symbols[step.kernel], ordinal, step.smem))


def _launch() -> Callable[..., int]:
    """Return the driver's launch: (config address, kernel, params address, None) -> code."""
    call = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx  # a launch is too short to drop the GIL
    call.argtypes, call.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
    return call


def _failed(code: int, step: Step) -> Exception:
    return driver.error_of(driver.bindings().CUresult(code), f"launching {step.kernel}")


def _extent(form: Form) -> int:
    """Return the bytes from the first element to behind the last; strides are not negative."""
    reach = sum((s - 1) * t for s, t in zip(form.shape, form.strides, strict=True) if s > 0)
    return (reach + 1) * ITEMSIZE[form.dtype]


def bind(launcher: Launcher, call: Call, a: Form, b: Form, ordinal: int) -> TorchCall | None:
    """Return the short way of a prepared launcher, or None where there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch._C, "_cuda_getDevice"):
        return None  # a PyTorch built without CUDA has no CUDA tensors
    if call.outer or launcher.workspace or launcher.quantized:
        return None
    if len(launcher.steps) != 1 or launcher.steps[0].pdl or launcher.steps[0].cluster != (1, 1, 1):
        return None
    if any(step < 0 for step in (*a.strides, *b.strides)) or 0 in (*a.shape, *b.shape):
        return None
    return TorchCall(launcher, call, a, b, ordinal) if driver.is_current(ordinal) else None


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
    """Return an unplanned product of CUDA tensors, or None: nothing was done, go the other way.

    resolve: `gemmule.plan.resolve`, handed in because this module lies below it.
    """
    torch = sys.modules.get("torch")
    if torch is None or type(a) is not torch.Tensor or type(b) is not torch.Tensor:
        return None
    ordinal = a.get_device()
    if ordinal < 0 or b.get_device() != ordinal or a.is_neg() or b.is_neg():
        return None  # a lazily negated view holds other values than its memory
    form = None
    if out is not None:
        if type(out) is not torch.Tensor or out.get_device() != ordinal or out.is_neg():
            return None
        form = (out.shape, out.stride(), out.dtype)
    product = _bound(
        resolve,
        op,
        a.shape,
        a.stride(),
        a.dtype,
        b.shape,
        b.stride(),
        b.dtype,
        form,
        ordinal,
        options,
        rung,
        params,
    )
    return None if product is None else product(a, b, out)


@functools.lru_cache(maxsize=4096)
def _bound(
    resolve: Callable[..., Any],
    op: str,
    a_shape: Any,
    a_strides: Any,
    a_dtype: Any,
    b_shape: Any,
    b_strides: Any,
    b_dtype: Any,
    out: Any,
    ordinal: int,
    options: Options,
    rung: str | None,
    params: Any,
) -> Product | None:
    """Return the trusted product of 16-byte aligned tensors of these forms, or None."""
    from gemmule.backends import cuda_arrays

    names = [str(dtype).removeprefix("torch.") for dtype in (a_dtype, b_dtype)]
    left = cuda_arrays.form_of(0, tuple(a_shape), a_strides, names[0])
    right = cuda_arrays.form_of(0, tuple(b_shape), b_strides, names[1])
    short = resolve(op, left, right, None, f"cuda:{ordinal}", options, rung, params).short_way
    if not isinstance(short, TorchCall) or out not in (None, short.out_form):
        return None
    return short.trusted


def forget() -> None:
    """Drop what `eager` has found, so that the next call sees new plans."""
    _bound.cache_clear()
