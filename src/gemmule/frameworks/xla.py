"""The function that XLA calls for a product, by its C interface, read with ctypes.

XLA calls a handler on a thread of its own once for every product of a compiled program, with the
addresses of operands and result; on a GPU also with the stream to launch on, so nothing waits for
the host. Source: the structs of ``xla/ffi/api/c_api.h``, version 0.3 of that interface.
"""

from __future__ import annotations

import ctypes
import json
import math
from typing import Any

import numpy as np

from gemmule import general
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.canonical import Options
from gemmule.core.grouped import groups
from gemmule.core.operand import c_strides
from gemmule.core.problem import ITEMSIZE, numpy_dtype
from gemmule.routed import routed_product

# XLA_FFI_DataType -> dtype name.
DTYPES = {
    2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32",
    9: "uint64", 10: "float16", 11: "float32", 12: "float64", 15: "complex64", 16: "bfloat16",
    18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn",
}  # fmt: skip
# Grouped products, also by each matrix transposed, and the sums of outer products of groups.
GROUPED, TURNED, OUTER = "grouped", "grouped by transposed matrices", "grouped outer products"
METADATA, INTERNAL = 1, 13  # XLA_FFI_Extension_Metadata, XLA_FFI_Error_Code_INTERNAL

_Size, _Pointer, _Int = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int


def _struct(name: str, *fields: str | tuple[str, Any]) -> Any:
    """Return a struct of that interface: each begins with its size and a chain of extensions.

    fields: with their types; a name alone is that of a pointer.
    """
    typed = [(field, _Pointer) if isinstance(field, str) else field for field in fields]
    head = [("struct_size", _Size), ("extension", _Pointer)]
    return type(name, (ctypes.Structure,), {"_fields_": head + typed})


_Count, _Pointers = ctypes.c_int64, ctypes.POINTER(_Pointer)
Version = _struct("Version", ("major", _Int), ("minor", _Int))
_dims = ("dims", ctypes.POINTER(_Count))
Buffer = _struct("Buffer", ("dtype", _Int), "data", ("rank", _Count), _dims)
Values = _struct("Values", ("size", _Count), "types", ("values", _Pointers))
Attributes = _struct("Attributes", ("size", _Count), "types", "names", ("values", _Pointers))
_errors = ("error_create", "error_message", "error_destroy")
Api = _struct("Api", ("version", Version), "internal", *_errors, "handler_register", "stream_get")
_api, _of_call = ("api", ctypes.POINTER(Api)), (("arguments", Values), ("results", Values))
_how = (("attributes", Attributes), "future")
Frame = _struct("Frame", _api, "context", ("stage", _Int), *_of_call, *_how)
ErrorArguments = _struct("ErrorArguments", ("message", ctypes.c_char_p), ("code", _Int))
StreamArguments = _struct("StreamArguments", "context", "stream")


class Extension(ctypes.Structure):
    """The head of an extension of a frame; that of metadata goes on with an address."""

    _fields_ = (("struct_size", _Size), ("type", _Int), ("next", _Pointer), ("metadata", _Pointer))


class Span(ctypes.Structure):
    """Bytes at an address."""

    _fields_ = (("start", _Pointer), ("size", _Size))


class Metadata(ctypes.Structure):
    """What a handler says of itself when it is registered."""

    _fields_ = (("struct_size", _Size), ("version", Version), ("traits", ctypes.c_uint32))


def _handled(frame: Any, array: Any) -> int | None:
    if frame.extension:
        extension = Extension.from_address(frame.extension)
        if extension.type == METADATA:
            version = Metadata.from_address(extension.metadata).version
            version.major, version.minor = 0, frame.api.contents.version.minor
            return None
    try:
        _multiply(frame, array)
    except Exception as error:  # no exception passes through C: XLA raises it again
        return _error(frame, f"{type(error).__name__}: {error}")
    return None


def _multiply(frame: Any, array: Any) -> None:
    operands = [array(frame.arguments.values[i]) for i in range(frame.arguments.size)]
    out = array(frame.results.values[0])
    span = Span.from_address(frame.attributes.values[0])
    given = json.loads(ctypes.string_at(span.start, span.size))
    op, params = given.pop("op"), given.pop("params")
    frozen = None if params is None else tuple((name, value) for name, value in params)
    options = Options(**given, params=frozen)
    if array is _host_array:
        _run(op, operands, out, options)
        return
    with device_arrays.using_stream(_stream(frame)):
        _run(op, operands, out, options)


def _run(op: str, operands: list[Any], out: Any, options: Options) -> None:
    a, b = operands[:2]
    if op == OUTER:
        _outer(a, b, operands[2], out, options)
    elif op in (GROUPED, TURNED):
        routed_product(a, b.mT if op == TURNED else b, operands[2], out, options)
    else:
        general.product(op, a, b, out, options)


def _outer(a: Any, grad: Any, ends: Any, out: Any, options: Options) -> None:
    """Write ``a[rows of e].T @ grad[rows of e]`` for each expert e that has rows.

    The ends are read on the host, which waits for them.
    """
    host = isinstance(ends, np.ndarray)
    for expert, rows in groups((ends if host else _read(ends)).tolist()):
        count = rows.stop - rows.start
        left, right = (x[rows] if host else _view(x, rows.start, (count,)) for x in (a, grad))
        target = out[expert] if host else _view(out, expert, ())
        general.product("matmul", left.T, right, target, options)


def _read(array: DeviceArray) -> np.ndarray[Any, Any]:
    """Return a copy on the host of what the program's stream has written."""
    found = np.empty(array.shape, numpy_dtype(array.dtype))
    stream = device_arrays.current_stream(device_arrays.from_own(array), array.ordinal)
    driver.copy(found.ctypes.data, array.pointer, found.nbytes, array.ordinal, stream)
    return found


def _view(array: DeviceArray, first: int, lead: tuple[int, ...]) -> DeviceArray:
    """Return entries of an array's first axis, as many as `lead` has; one where it is empty."""
    steps = array.strides[1 - len(lead) :]
    begin = first * array.strides[0] * ITEMSIZE[array.dtype]
    return array.view((*lead, *array.shape[1:]), steps, begin)


def _host_array(address: int) -> np.ndarray[Any, Any]:
    buffer = Buffer.from_address(address)
    shape, dtype = _kind(buffer)
    nbytes = math.prod(shape) * numpy_dtype(dtype).itemsize
    if nbytes == 0:
        return np.empty(shape, numpy_dtype(dtype))
    memory: Any = (ctypes.c_char * nbytes).from_address(buffer.data)
    array: np.ndarray[Any, Any] = np.frombuffer(memory, numpy_dtype(dtype))
    return array.reshape(shape)


def _device_array(address: int) -> DeviceArray:
    buffer = Buffer.from_address(address)
    shape, dtype = _kind(buffer)
    ordinal = device_arrays.ordinal_at(buffer.data or 0)
    return DeviceArray(buffer.data or 0, shape, c_strides(shape), dtype, ordinal, None)


def _kind(buffer: Any) -> tuple[tuple[int, ...], str]:
    return tuple(buffer.dims[i] for i in range(buffer.rank)), DTYPES[buffer.dtype]


def _stream(frame: Any) -> int:
    given = StreamArguments(ctypes.sizeof(StreamArguments), None, frame.context, None)
    ask = ctypes.CFUNCTYPE(_Pointer, _Pointer)(frame.api.contents.stream_get)
    if ask(ctypes.addressof(given)):
        raise RuntimeError("XLA did not tell the stream to launch on.")
    return int(given.stream or 0)


def _error(frame: Any, message: str) -> int | None:
    given = ErrorArguments(ctypes.sizeof(ErrorArguments), None, message.encode(), INTERNAL)
    create = ctypes.CFUNCTYPE(_Pointer, _Pointer)(frame.api.contents.error_create)
    made: int | None = create(ctypes.addressof(given))
    return made


_HANDLER = ctypes.CFUNCTYPE(_Pointer, ctypes.POINTER(Frame))
on_host = _HANDLER(lambda frame: _handled(frame.contents, _host_array))
on_device = _HANDLER(lambda frame: _handled(frame.contents, _device_array))
