"""The short way of a product of CUDA tensors of PyTorch.

A `TorchCall` compares what a call brings with what was planned, attribute by attribute, and goes
straight to the launch; `seen` is what tells the tensors of an unplanned call apart: shapes, strides
and dtypes alone. What they do not know (another library or device, other strides, less alignment,
a questionable `out`) is left to the general way, which accepts or refuses it with an explanation.

The functions are closures and the launch goes through ctypes: on an H200's host (November 2026) a
planned call takes 5.7 us with methods and cuda.bindings, of which the driver itself needs 2.9.
"""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from gemmule.backends.cuda import driver
from gemmule.backends.cuda.launch import Launcher
from gemmule.backends.cuda.library.run import LibraryRun
from gemmule.backends.cuda.packed.launch import PackedLauncher
from gemmule.backends.cuda.tensor_maps import MAP_BYTES, MOST_KEPT, Maps
from gemmule.core.canonical import Call
from gemmule.core.operand import Form, c_strides
from gemmule.core.problem import ITEMSIZE
from gemmule.dispatch.prepared.torch import as_array, packed, prepared_call
from gemmule.dispatch.torch_codes import Kind, MatrixCall, codes_call, own_signature
from gemmule.dispatch.torch_launch import (
    MOVING_AT,
    MappedSlot,
    Product,
    Signature,
    extent,
    failed,
    guards,
    kernel_of,
    launch_function,
    maker,
    slot,
    steps_starter,
)
from gemmule.dispatch.tracked import wanted as wanted
from gemmule.quant.cuda.by_library import ByLibrary

Start = Callable[[int, int, int, int], None]  # stream, addresses of A, of x or B, of the result
# One packing writes the stream, no attributes, and the addresses of A, of x or B, of the result.
MOVING = struct.Struct("<Q16xQQQ")
MAPPED = struct.Struct("<QQI4xQQQ")  # the same, with where attributes lie and how many


class TorchCall:
    """One product of tensors of exactly the planned dtypes, shapes and strides, on one device.

    ``checked(a, b, out)`` and ``trusted(a, b, out)`` return the product or None, when nothing was
    done; the latter relies on the caller for types, forms and device. `out_seen`: the signature of
    a right `out`.
    """

    __slots__ = ("checked", "out_seen", "trusted")

    def __init__(
        self, run: Launcher | LibraryRun, call: Call, a: Form, b: Form, ordinal: int
    ) -> None:
        torch = sys.modules["torch"]
        dtype, shape = getattr(torch, call.problem.out), torch.Size(call.out_shape)
        self.out_seen = (dtype, shape, c_strides(call.out_shape), ordinal)
        self.trusted = _trusted(run, call, a, b, ordinal)
        self.checked = _checked(self.trusted, self.out_seen, a, b)


def _checked(trusted: Product, out_seen: Signature, a: Form, b: Form) -> Product:
    torch = sys.modules["torch"]
    tensor, dual = torch.Tensor, torch.autograd.forward_ad
    a_shape, a_strides, a_dtype = torch.Size(a.shape), a.strides, getattr(torch, a.dtype)
    b_shape, b_strides, b_dtype = torch.Size(b.shape), b.strides, getattr(torch, b.dtype)
    out_dtype, out_shape, out_strides, ordinal = out_seen
    known: Callable[..., bool] | None = None  # the test for operands and out
    known_pair: Callable[..., bool] | None = None  # that without an out

    def checked(a: Any, b: Any, out: Any) -> Any:
        nonlocal known, known_pair
        if dual._current_level >= 0:
            pass  # a guard does not see what forward differentiation knows
        elif out is None:
            if known_pair is not None and known_pair(a, b):
                return trusted(a, b, out)
        elif known is not None and known(a, b, out):
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
                    and not (out.is_neg() or out.requires_grad)
                )
            )
        ):
            if wanted(a, b):
                return None  # PyTorch has to know of this product
            if a.requires_grad or b.requires_grad:
                pass  # a guard that was made under no_grad would let a gradient be lost later
            elif out is None and known_pair is None:
                known_pair = guards(a, b)
            elif out is not None and known is None:
                known = guards(a, b, out)
            return trusted(a, b, out)
        return None

    return checked


def _trusted(run: Launcher | LibraryRun, call: Call, a: Form, b: Form, ordinal: int) -> Product:
    torch = sys.modules["torch"]
    native = torch._C
    device_of, stream_of = native._cuda_getDevice, native._cuda_getCurrentRawStream
    written = native._increment_version  # a gradient that needs what was there has to fail
    shape, dtype = call.out_shape, getattr(torch, call.problem.out)
    fresh = maker(shape, dtype, ordinal)
    a_bytes, b_bytes = extent(a), extent(b)
    out_bytes = torch.Size(shape).numel() * ITEMSIZE[call.problem.out]
    mask, swapped = call.problem.alignment - 1, call.swapped
    start = _starter(run, ordinal)

    def trusted(a: Any, b: Any, out: Any) -> Any:
        if device_of() != ordinal:
            return None
        left, right = a.data_ptr(), b.data_ptr()
        if (left | right) & mask or not (left and right):
            return None
        if out is None:
            out = fresh()  # as aligned as any address has to be, and nobody else's memory
            result = out.data_ptr()
        else:
            result = out.data_ptr()
            end = result + out_bytes
            if result & mask or not result or (result < left + a_bytes and left < end):
                return None
            if result < right + b_bytes and right < end:
                return None  # out may overlap an input
            written([out])
        if swapped:
            left, right = right, left
        start(stream_of(ordinal), left, right, result)
        return out

    return trusted


def _starter(run: Launcher | LibraryRun, ordinal: int) -> Start:
    return _library(run, ordinal) if isinstance(run, LibraryRun) else _start(run, ordinal)


def _start(launcher: Launcher, ordinal: int) -> Start:
    maps, step = launcher.maps, launcher.steps[0]
    if len(launcher.steps) > 1 or launcher.workspace or step.pdl:
        return _steps_start(launcher, ordinal)
    if maps is not None:
        return _mapped_start(launcher, maps, ordinal)
    if step.cluster != (1, 1, 1):
        return _steps_start(launcher, ordinal)
    return _kernel_start(launcher, ordinal)


def _steps_start(launcher: Launcher, ordinal: int) -> Start:
    """Return what starts all kernels of the launcher."""
    begin = steps_starter(launcher, ordinal, 3)

    def start(stream: int, left: int, right: int, result: int) -> None:
        begin(stream, (left, right, result))

    return start


def _kernel_start(launcher: Launcher, ordinal: int) -> Start:
    """Return what starts the launcher's only kernel."""
    launch, local, pack_into = launch_function(), threading.local(), MOVING.pack_into
    template, step, function = launcher.template, launcher.steps[0], kernel_of(launcher, ordinal)

    def start(stream: int, left: int, right: int, result: int) -> None:
        try:
            buffer, address, params, _ = local.slot
        except AttributeError:
            buffer, address, params, _ = local.slot = slot(template, step)
        pack_into(buffer, MOVING_AT, stream, left, right, result)
        code = launch(address, function, params, None)
        if code:
            raise failed(code, step)

    return start


def _mapped_start(launcher: Launcher, maps: Maps, ordinal: int) -> Start:
    """Return what starts the launcher's only kernel, which takes tensor maps, in a cluster or not.

    The maps of operands at the same addresses are encoded once, and copied when others were shown.
    """
    launch, local, pack_into = launch_function(), threading.local(), MAPPED.pack_into
    template, step, function = launcher.template, launcher.steps[0], kernel_of(launcher, ordinal)
    attributes = int(step.cluster != (1, 1, 1))
    show = struct.Struct(f"{len(maps.shapes) * MAP_BYTES}s").pack_into  # quicker than memmove
    kept: dict[tuple[int, int, int], bytes] = {}

    def start(stream: int, left: int, right: int, result: int) -> None:
        try:
            memory = local.memory
        except AttributeError:
            memory = local.memory = MappedSlot(template, step, len(maps.shapes))
        key = (left, right, result)
        encoded = kept.get(key)
        if encoded is None:
            if len(kept) >= MOST_KEPT:
                kept.clear()
            encoded = kept[key] = b"".join(maps.of((*key, 0)))
        if encoded is not memory.shown:
            show(memory.memory, memory.first, encoded)
            memory.shown = encoded
        pack_into(memory.buffer, MOVING_AT, stream, memory.attribute, attributes, *key)
        code = launch(memory.config, function, memory.params, None)
        if code:
            raise failed(code, step)

    return start


def _library(run: LibraryRun, ordinal: int) -> Start:
    """Return what starts a library's product, with memory of PyTorch's allocator to work in."""
    prepared = run.prepared(ordinal)
    begin, exchanged, nbytes = prepared.starter(1.0, 0.0), run.exchanged, prepared.workspace_bytes
    workspace = maker((nbytes,), sys.modules["torch"].uint8, ordinal) if nbytes else None

    def start(stream: int, left: int, right: int, result: int) -> None:
        memory = None if workspace is None else workspace()
        work = 0 if memory is None else memory.data_ptr()
        if exchanged:
            left, right = right, left
        begin(stream, left, right, result, work)

    return start


ShortCall = TorchCall | MatrixCall


def bind(run: Any, call: Call, a: Form, b: Form, ordinal: int) -> ShortCall | None:
    """Return the short way of a prepared launcher, or None where there is none."""
    torch = sys.modules["torch"]
    if not hasattr(torch._C, "_cuda_getDevice"):
        return None  # a PyTorch built without CUDA has no CUDA tensors
    is_packed = isinstance(run, PackedLauncher)
    if isinstance(run, ByLibrary):
        plain = run.is_plain
    else:
        plain = _is_plain(run) or is_packed or (isinstance(run, LibraryRun) and run.is_one_call)
    if not plain:
        return None
    if any(step < 0 for step in (*a.strides, *b.strides)) or 0 in (*a.shape, *b.shape):
        return None
    if not driver.is_current(ordinal):
        return None
    if isinstance(run, ByLibrary) or (isinstance(run, Launcher) and run.quantized):
        return codes_call(run, call, a, b, ordinal)
    if a.ready is not None and b.ready is not None:
        return None  # the result is no tensor
    if a.ready is not None or b.ready is not None:
        start = packed(run, ordinal) if is_packed else as_array(_starter(run, ordinal))
        return prepared_call(start, call, a, b, ordinal)
    return TorchCall(run, call, a, b, ordinal)


def _is_plain(run: Any) -> bool:
    """Whether one struct serves all of a launcher, whose kernels follow one another."""
    return isinstance(run, Launcher) and len(run.offsets) == 1


def seen(operand: Any) -> Signature | None:
    """Return what tells a CUDA tensor or a quantised matrix apart; None: for the general way."""
    if type(operand) is not sys.modules["torch"].Tensor:
        return own_signature(operand)
    ordinal = operand.get_device()
    if ordinal < 0 or operand.is_neg():
        return None  # a lazily negated view holds other values than its memory
    return operand.dtype, operand.shape, operand.stride(), ordinal


def form(signature: Signature) -> Form:
    """Return the form of a matrix, or of a 16-byte aligned tensor, with this signature."""
    dtype, shape, strides, _ = signature
    if isinstance(dtype, Kind):
        return dtype.form
    return Form(tuple(shape), strides, str(dtype).removeprefix("torch."), 16)
