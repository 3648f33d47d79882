"""Device arrays of any library: unwrap, allocate beside them, their current stream, copies.

PyTorch and CuPy are read through their own attributes, which costs a microsecond less a tensor than
a protocol does; other libraries come in by ``__cuda_array_interface__`` or DLPack.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.operand import Form, Operand, alignment_of, c_strides
from gemmule.core.problem import DTYPES, check_dtype, numpy_dtype

LEGACY_STREAM = 0

_chosen_stream: ContextVar[int | None] = ContextVar("gemmule_stream", default=None)


@contextmanager
def using_stream(handle: int) -> Iterator[None]:
    """Run work on arrays of libraries without streams of their own on this stream, in the block."""
    token = _chosen_stream.set(handle)
    try:
        yield
    finally:
        _chosen_stream.reset(token)


_shared: ContextVar[dict[tuple[int, int], tuple[int, object]] | None] = ContextVar(
    "gemmule_shared_workspaces", default=None
)


@contextmanager
def sharing_workspaces() -> Iterator[dict[tuple[int, int], tuple[int, object]]]:
    """Give every launch in the block the same workspace of a size, and keep it in the result.

    For launches that run one after the other and whose addresses outlive the block: a captured
    graph replays on the memory that it was captured with.
    """
    kept: dict[tuple[int, int], tuple[int, object]] = {}
    token = _shared.set(kept)
    try:
        yield kept
    finally:
        _shared.reset(token)


def form_of(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Form:
    """Return the form of device memory at an address; strides count elements."""
    return Form(shape, strides, dtype, alignment_of(pointer))


def is_lazy(tensor: Any) -> bool:
    """Tell whether a tensor is a lazily negated or conjugated view."""
    return bool(tensor.is_neg() or tensor.is_conj())


def from_torch(tensor: Any, dtype: str) -> Operand:
    """Return a CUDA tensor as an operand; of a lazily negated or conjugated view, whose memory
    holds other values than it does, a copy."""
    plain = tensor.resolve_conj().resolve_neg() if is_lazy(tensor) else tensor
    pointer = plain.data_ptr()
    form = form_of(pointer, plain.shape, plain.stride(), dtype)
    return Operand(plain, pointer, form, f"cuda:{tensor.get_device()}", "torch", tensor)


def from_own(array: DeviceArray) -> Operand:
    """Return an array of this package's own as an operand, whatever its dtype."""
    form = form_of(array.pointer, array.shape, array.strides, array.dtype)
    return Operand(array, array.pointer, form, array.device, "gemmule", array)


def from_interface(obj: Any, argument: str) -> Operand:
    """Return an array with ``__cuda_array_interface__`` (CuPy, Numba) as an operand."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(obj, cupy.ndarray):
        name = obj.dtype.name
        check_dtype(name, argument)
        pointer, itemsize = obj.data.ptr, obj.dtype.itemsize
        strides = tuple(step // itemsize for step in obj.strides)
        form = form_of(pointer, obj.shape, strides, name)
        return Operand(obj, pointer, form, f"cuda:{obj.device.id}", "cupy", obj)
    face = obj.__cuda_array_interface__
    try:
        dtype, masked = np.dtype(face["typestr"]), face.get("mask") is not None
        shape, pointer = tuple(map(operator.index, face["shape"])), int(face["data"][0])
        steps = face.get("strides")
        steps = None if steps is None else tuple(map(operator.index, steps))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise refused(obj, argument, "__cuda_array_interface__", error) from error
    if not dtype.isnative or dtype.name not in DTYPES or masked:
        check_dtype(f"{dtype.str} with mask" if masked else dtype.str, argument)
    if min(shape, default=0) < 0 or (steps is not None and len(steps) != len(shape)):
        raise ValueError(
            f"{argument} has a __cuda_array_interface__ of shape {shape} and strides {steps}; "
            "sizes are 0 or more, and there is one stride for each."
        )
    if pointer == 0 and 0 not in shape:
        raise ValueError(f"{argument} has shape {shape} and lies at address 0: it holds no data.")
    strides = _element_strides(shape, steps, dtype.itemsize, argument)
    ordinal = ordinal_at(pointer)
    form = form_of(pointer, shape, strides, dtype.name)
    return Operand(obj, pointer, form, f"cuda:{ordinal}", "interface", obj)


def refused(obj: Any, argument: str, protocol: str, error: Exception) -> TypeError:
    """Return the error for an object whose way to hand out its memory failed."""
    return TypeError(
        f"{argument} is a {type(obj).__module__}.{type(obj).__qualname__} whose {protocol} gives "
        f"no array ({type(error).__name__}: {error}). Pass an array of NumPy, PyTorch, CuPy or JAX."
    )


def _element_strides(
    shape: tuple[int, ...], strides: Any, itemsize: int, argument: str
) -> tuple[int, ...]:
    if strides is None:
        return c_strides(shape)
    if any(step % itemsize for step, size in zip(strides, shape, strict=True) if size > 1):
        raise ValueError(
            f"{argument} has byte strides {tuple(strides)}, which are no multiples of its "
            f"{itemsize}-byte elements. Copy it first."
        )
    return tuple(step // itemsize for step in strides)


def ordinal_at(pointer: int) -> int:
    """Return the number of the device that owns an address."""
    if pointer == 0:
        return 0
    api = driver.bindings()
    attribute = api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    value = driver.check(api.cuPointerGetAttribute(attribute, pointer), "locating an array")
    return int(value)


def from_dlpack(obj: Any, library: str, argument: str) -> Operand:
    """Return a CUDA array that speaks DLPack as an operand, ready on the legacy default stream."""
    from cuda.core.utils import StridedMemoryView

    try:
        view = StridedMemoryView.from_dlpack(obj, stream_ptr=1)
        name = np.dtype(view.dtype).name
    except (AssertionError, BufferError, TypeError, ValueError) as error:
        raise refused(obj, argument, "DLPack", error) from error
    check_dtype(name, argument)
    shape = tuple(view.shape)
    strides = tuple(view.strides) if view.strides is not None else None
    if strides is None:
        strides = _element_strides(shape, None, 1, argument)
    form = form_of(view.ptr, shape, strides, name)
    return Operand((obj, view), view.ptr, form, f"cuda:{view.device_id}", library, obj)


def empty(shape: tuple[int, ...], dtype: str, like: Operand) -> Operand:
    """Return an uninitialised array of the library and device of `like`, from its allocator."""
    if like.library == "torch":
        torch = sys.modules["torch"]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=like.array.device)
        return from_torch(tensor, dtype)
    ordinal = ordinal_of(like)
    if like.library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(ordinal):
            return from_interface(cupy.empty(shape, dtype=numpy_dtype(dtype)), "out")
    fresh = DeviceArray.empty(shape, dtype, ordinal)
    if like.library == "jax":
        converted = sys.modules["jax"].dlpack.from_dlpack(fresh)
        return from_own(fresh)._replace(original=converted)
    return from_own(fresh)


def workspace(like: Operand, nbytes: int) -> tuple[int, object]:
    """Return the address of temporary memory from the operand's own allocator, and its owner."""
    kept = _shared.get()
    if nbytes == 0:
        return 0, None
    if kept is None:
        return _fresh_workspace(like, nbytes)
    key = (ordinal_of(like), nbytes)
    if key not in kept:
        kept[key] = _fresh_workspace(like, nbytes)
    return kept[key]


def _fresh_workspace(like: Operand, nbytes: int) -> tuple[int, object]:
    if like.library == "torch":
        torch = sys.modules["torch"]
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=like.array.device)
        return tensor.data_ptr(), tensor
    if like.library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(ordinal_of(like)):
            memory = cupy.cuda.alloc(nbytes)
        return memory.ptr, memory
    array = DeviceArray.empty((nbytes,), "uint8", ordinal_of(like))
    return array.pointer, array


def ordinal_of(operand: Operand) -> int:
    """Return the device number of an operand on ``cuda:N``."""
    return int(operand.device[5:])


def current_stream(operand: Operand, ordinal: int) -> int:
    """Return the handle of the caller's current stream on the operand's device."""
    if operand.library == "torch":
        stream: int = sys.modules["torch"]._C._cuda_getCurrentRawStream(ordinal)
        return stream
    if operand.library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(ordinal):
            pointer: int = cupy.cuda.get_current_stream().ptr
        return pointer
    chosen = _chosen_stream.get()
    if chosen is not None:
        return chosen
    if isinstance(operand.array, DeviceArray):
        return operand.array.stream
    given = getattr(operand.array, "__cuda_stream__", None)
    if given is not None:
        return int(given()[1])
    if operand.library == "interface":
        declared = operand.array.__cuda_array_interface__.get("stream")
        return LEGACY_STREAM if declared in (None, 1) else int(declared)
    return LEGACY_STREAM


def chosen_stream() -> int:
    """Return the stream that the caller chose for what has none of its own."""
    chosen = _chosen_stream.get()
    return LEGACY_STREAM if chosen is None else chosen


def ordinal_named(device: str) -> int:
    """Return the number in ``cuda`` or ``cuda:N``; ValueError or TypeError for what names none."""
    if not isinstance(device, str):
        raise TypeError(
            f"device is {device!r}; it must be a string: 'cpu', 'cuda' or 'cuda:<number>'."
        )
    head, _, number = device.partition(":")
    if head != "cuda" or (number and not number.isdigit()) or (not number and ":" in device):
        raise ValueError(f"device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:<number>'.")
    return int(number or 0)
