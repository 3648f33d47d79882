"""DLPack export of a DeviceArray: the capsule of the C ABI, built with ctypes.

The structures are those of the DLPack header, version 0.8 (``DLManagedTensor``), which every
consumer still accepts under the capsule name ``dltensor``.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from gemmule.core.problem import ITEMSIZE

KDL_CUDA = 2
CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5}
FLOAT8_CODES = {"float8_e4m3fn": 10, "float8_e5m2": 12}


class Exported(Protocol):
    """What a capsule tells of an array; strides count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    ordinal: int

    @property
    def pointer(self) -> int:
        """Device address of element [0, ..., 0]."""
        ...


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = (
    ("dl_tensor", _Tensor),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", _Deleter),
)
_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = (
    ctypes.py_object,
    (
        ctypes.c_void_p,
        ctypes.c_char_p,
        _CapsuleDestructor,
    ),
)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)

# Exports that some consumer still holds, by the address of their DLManagedTensor. The C side keeps
# the address only, so Python has to keep the objects.
_alive: dict[int, tuple[object, ...]] = {}


@_Deleter  # type: ignore[untyped-decorator]
def _delete(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


@_CapsuleDestructor  # type: ignore[untyped-decorator]
def _destroy(capsule: int) -> None:
    # A consumer that took the tensor renamed the capsule and calls the deleter itself.
    if _is_valid(capsule, b"dltensor"):
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
        _alive.pop(pointer(capsule, b"dltensor"), None)


def export_capsule(array: Exported) -> object:
    """Return a capsule named ``dltensor`` over the array's memory."""
    ndim = len(array.shape)
    shape = (ctypes.c_int64 * max(ndim, 1))(*array.shape)
    strides = (ctypes.c_int64 * max(ndim, 1))(*array.strides)
    managed = _ManagedTensor()
    tensor = managed.dl_tensor
    tensor.data = array.pointer
    tensor.device = _Device(KDL_CUDA, array.ordinal)
    tensor.ndim = ndim
    tensor.dtype = _DataType(_code(array.dtype), 8 * ITEMSIZE[array.dtype], 1)
    tensor.shape, tensor.strides, tensor.byte_offset = shape, strides, 0
    managed.deleter = _delete
    address = ctypes.addressof(managed)
    _alive[address] = (managed, shape, strides, array)
    capsule: object = _new(address, b"dltensor", _destroy)
    return capsule


def _code(dtype: str) -> int:
    return FLOAT8_CODES[dtype] if dtype in FLOAT8_CODES else CODES[dtype.rstrip("0123456789")]
