"""What type checkers know of the public functions: array types, and their options together.

A product of NumPy arrays is a NumPy array, of PyTorch tensors a tensor, of arrays kept on a device
one of those; any other array comes in by DLPack or the CUDA array interface and is `Any` to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.words import Accumulate, Activations, Precision
from gemmule.quant.matrix import QuantizedMatrix

if TYPE_CHECKING:
    import torch

Scalar: TypeAlias = complex | np.number[Any]  # complex admits int and float

Host: TypeAlias = NDArray[Any]
HostMatrix: TypeAlias = Host | QuantizedMatrix
OwnMatrix: TypeAlias = DeviceArray | QuantizedMatrix
Tensor: TypeAlias = "torch.Tensor"
TensorMatrix: TypeAlias = "torch.Tensor | DeviceArray | QuantizedMatrix"


class SupportsDLPack(Protocol):
    """An array that exports itself by DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsCudaArray(Protocol):
    """An array that describes itself by the CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


Foreign: TypeAlias = SupportsDLPack | SupportsCudaArray | DeviceArray | QuantizedMatrix


class Choices(TypedDict, total=False):
    """The options that decide how a product is computed; `gemmule.matvec` says what they mean."""

    out_dtype: Any
    precision: Precision
    accumulate: Accumulate | None
    batch_invariant: bool
    activations: Activations
    rung: str | None
    params: Mapping[str, Any] | None


class Keywords(Choices, total=False):
    """The options of a product: what decides it, where, and into what."""

    out: Any
    device: str | None
