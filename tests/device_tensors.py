"""Arrays of the emulated device as the CUDA tensors that fast paths take them for."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from emulated_driver import stream_on
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import numpy_dtype


class Tensor:
    """What the fast path asks of a CUDA tensor, over an array of the emulated device."""

    is_cuda = True

    def __init__(self, array: Any) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape
        self.negated = self.requires_grad = False
        self.written = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        item = numpy_dtype(self.dtype).itemsize
        steps = tuple(step * item for step in self.array.strides)
        return {
            "typestr": numpy_dtype(self.dtype).str,
            "shape": self.shape,
            "strides": steps,
            "data": (self.array.pointer, False),
            "version": 3,
        }

    def stride(self) -> tuple[int, ...]:
        strides: tuple[int, ...] = self.array.strides
        return strides

    def get_device(self) -> int:
        ordinal: int = self.array.ordinal
        return ordinal

    def data_ptr(self) -> int:
        pointer: int = self.array.pointer
        return pointer

    def is_neg(self) -> bool:
        return self.negated

    def is_conj(self) -> bool:
        return False

    def numel(self) -> int:
        size = 1
        for one in self.shape:
            size *= one
        return size


def library(current: Sequence[int] = (0,), **dtypes: str) -> SimpleNamespace:
    """Return what stands for PyTorch: its types, its current device and stream, its dtypes."""

    def written(tensors: Sequence[Tensor]) -> None:
        for one in tensors:
            one.written += 1

    native = SimpleNamespace(
        _cuda_getDevice=lambda: current[0],
        _cuda_getCurrentRawStream=stream_on,
        _increment_version=written,
    )
    module = SimpleNamespace(Parameter=Tensor)
    return SimpleNamespace(Tensor=Tensor, _C=native, nn=module, **dtypes)


def maker(shape: tuple[int, ...], dtype: str, ordinal: int) -> Any:
    """Return what makes an uninitialised tensor."""
    return lambda: Tensor(DeviceArray.empty(shape, dtype, ordinal))
