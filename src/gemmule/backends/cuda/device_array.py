"""`DeviceArray`: a matrix that stays on the GPU with no other library installed."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from gemmule.backends.cuda import driver
from gemmule.backends.cuda.dlpack import export_capsule
from gemmule.core.operand import Ints, c_strides
from gemmule.core.problem import ITEMSIZE, numpy_dtype

# Dtypes that __cuda_array_interface__ can spell; bfloat16 and float8 travel by DLPack only.
TYPESTR = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int8": "|i1", "uint8": "|u1",
    "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4", "int64": "<i8",
    "uint64": "<u8", "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip

PIECE_BYTES = 64 * 2**20  # of a view that has to be gathered on the host first


class DeviceArray:
    """A dense array in the memory of one CUDA device.

    shape counts elements, strides too (not bytes), dtype is a dtype name. The memory is freed when
    the last view of it goes. It goes wherever an array may stand in this package, and to other
    libraries through DLPack and ``__cuda_array_interface__``, both without a copy. Work on it runs
    on the device's legacy default stream, or the current one of the library whose memory it is.
    Not offered: arithmetic, item access, reshaping.
    """

    __slots__ = ("__weakref__", "_owner", "_pointer", "dtype", "ordinal", "shape", "strides")

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        ordinal: int,
        owner: Any,
    ) -> None:
        self._pointer, self._owner = pointer, owner
        self.shape, self.strides, self.dtype, self.ordinal = shape, strides, dtype, ordinal

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: str, ordinal: int = 0) -> DeviceArray:
        """Return an uninitialised C-ordered array; DeviceError when it does not fit."""
        block = _Block(math.prod(shape) * ITEMSIZE[dtype], ordinal)
        return cls(block.pointer, tuple(shape), c_strides(shape), dtype, ordinal, block)

    @classmethod
    def from_host(cls, array: np.ndarray[Any, Any], ordinal: int = 0) -> DeviceArray:
        """Return a copy of a host array; one contiguous in either order keeps its order.

        DeviceError when it does not fit, before anything is copied; of a stepped view the host
        holds one piece at a time.
        """
        flipped = array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous
        source = array.T if flipped else array
        result = cls.empty(source.shape, array.dtype.name, ordinal)
        start = result._pointer
        for piece in _pieces(source):
            driver.copy(start, piece.ctypes.data, piece.nbytes, ordinal, 0)
            start += piece.nbytes
        return result.T if flipped else result

    @property
    def device(self) -> str:
        """The device's name, such as ``cuda:0``."""
        return f"cuda:{self.ordinal}"

    @property
    def pointer(self) -> int:
        """Device address of element [0, ..., 0]."""
        return self._pointer

    @property
    def owner(self) -> Any:
        """What holds the memory: a tensor of PyTorch, an array of CuPy, or a block of our own."""
        return self._owner

    @property
    def library(self) -> str:
        """Whose memory it is: ``"torch"``, ``"cupy"``, or ``"gemmule"`` of our own."""
        for name, kind in (("torch", "Tensor"), ("cupy", "ndarray")):
            module = sys.modules.get(name)
            if module is not None and isinstance(self._owner, getattr(module, kind)):
                return name
        return "gemmule"

    @property
    def stream(self) -> int:
        """The handle of the stream that the memory's library works on now.

        Of our own memory that is 0, the legacy default stream.
        """
        if self.library == "torch":
            return int(sys.modules["torch"]._C._cuda_getCurrentRawStream(self.ordinal))
        if self.library == "cupy":
            with sys.modules["cupy"].cuda.Device(self.ordinal):
                return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        return 0

    def beside(self, shape: Ints, dtype: str) -> DeviceArray:
        """Return an uninitialised C-ordered array in memory of the same library and device."""
        nbytes, made = math.prod(shape) * ITEMSIZE[dtype], self._owner
        if self.library == "torch":
            made = made.new_empty(nbytes, dtype=sys.modules["torch"].uint8)
            pointer = made.data_ptr()
        elif self.library == "cupy":
            with sys.modules["cupy"].cuda.Device(self.ordinal):
                made = sys.modules["cupy"].empty(nbytes, np.uint8)
            pointer = made.data.ptr
        else:
            return DeviceArray.empty(shape, dtype, self.ordinal)
        return DeviceArray(pointer, shape, c_strides(shape), dtype, self.ordinal, made)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * ITEMSIZE[self.dtype]

    @property
    def T(self) -> DeviceArray:
        """The transpose, a view."""
        return self.view(self.shape[::-1], self.strides[::-1])

    @property
    def mT(self) -> DeviceArray:
        """The transpose of each matrix of a batch, a view."""
        last_two = (*range(len(self.shape) - 2), -1, -2)
        shape, strides = ([of[axis] for axis in last_two] for of in (self.shape, self.strides))
        return self.view(tuple(shape), tuple(strides))

    def view(
        self, shape: Ints, strides: Ints, offset: int = 0, dtype: str | None = None
    ) -> DeviceArray:
        """Return an array in the same memory, so many bytes behind the first element's."""
        start = self._pointer + offset
        return DeviceArray(start, shape, strides, dtype or self.dtype, self.ordinal, self._owner)

    def to_host(self) -> np.ndarray[Any, Any]:
        """Return a copy as a NumPy array; waits for pending work on `stream`."""
        host = np.empty(self.shape, dtype=numpy_dtype(self.dtype))
        if _is_c_order(self.shape, self.strides):
            driver.copy(host.ctypes.data, self._pointer, host.nbytes, self.ordinal, self.stream)
            return host
        if _is_c_order(self.shape[::-1], self.strides[::-1]):
            return self.T.to_host().T
        raise ValueError(
            f"a DeviceArray of shape {self.shape} and strides {self.strides} is not contiguous; "
            "only contiguous arrays and their transposes are copied to the host."
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA array interface, version 3; AttributeError for dtypes that it cannot spell."""
        if self.dtype not in TYPESTR:
            raise AttributeError(
                f"__cuda_array_interface__ has no name for {self.dtype}; use DLPack."
            )
        itemsize = ITEMSIZE[self.dtype]
        return {
            "shape": self.shape,
            "typestr": TYPESTR[self.dtype],
            "data": (self._pointer, False),
            "strides": tuple(step * itemsize for step in self.strides),
            "stream": self.stream or 1,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type (2, CUDA) and the ordinal."""
        return (2, self.ordinal)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule that shares the memory and keeps it alive."""
        if copy or dl_device not in (None, (2, self.ordinal)):
            raise BufferError("a DeviceArray is exported in place only; copy it afterwards.")
        return export_capsule(self)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"


def _pieces(source: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the array's elements in C order, in contiguous pieces, one if it is contiguous."""
    if source.flags.c_contiguous or source.nbytes <= PIECE_BYTES:
        yield np.ascontiguousarray(source)
        return
    if len(source) == 1:
        yield from _pieces(source[0])
        return
    entry = source.nbytes // len(source)
    step = max(1, PIECE_BYTES // entry)
    for first in range(0, len(source), step):
        yield from _pieces(source[first : first + step])


class _Block:
    """Owner of one allocation."""

    def __init__(self, nbytes: int, ordinal: int) -> None:
        self.pointer = driver.allocate(nbytes, ordinal)
        weakref.finalize(self, driver.free, self.pointer, ordinal)


def _is_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    if 0 in shape:
        return True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= max(size, 1)
    return True
