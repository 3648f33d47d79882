"""What type checkers know of the public functions: array types, and their options together.

A product of NumPy arrays is a NumPy array, of floats one of their dtype; of PyTorch tensors it is a
tensor, of JAX arrays one of those, and so of arrays kept on a device. Any other array comes in by
DLPack or the CUDA array interface, and the result is `Any` to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from gemmule.arrays.prepared import PreparedMatrix
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.epilogue import Epilogue
from gemmule.core.words import Accumulate, Activations, Precision
from gemmule.quant.matrix import QuantizedMatrix

if TYPE_CHECKING:
    import jax
    import torch

Scalar: TypeAlias = complex | np.number[Any]  # complex admits int and float

Inexact = TypeVar("Inexact", bound=np.inexact[Any])
"""The dtype of NumPy floats or complex numbers, which their products have, too."""

Own: TypeAlias = QuantizedMatrix | PreparedMatrix
Floats: TypeAlias = NDArray[Inexact]
FloatMatrix: TypeAlias = NDArray[Inexact] | QuantizedMatrix | PreparedMatrix
Host: TypeAlias = NDArray[Any]
HostMatrix: TypeAlias = Host | Own
OwnMatrix: TypeAlias = DeviceArray | Own
Tensor = TypeVar("Tensor", "torch.Tensor", "jax.Array")
TensorMatrix: TypeAlias = Tensor | DeviceArray | QuantizedMatrix | PreparedMatrix


class SupportsDLPack(Protocol):
    """An array that exports itself by DLPack."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsCudaArray(Protocol):
    """An array that describes itself by the CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


Foreign: TypeAlias = SupportsDLPack | SupportsCudaArray | DeviceArray | Own


class Ways(TypedDict, total=False):
    """The options that leave a result's dtype as it is; `gemmule.matvec` says what they mean."""

    precision: Precision
    accumulate: Accumulate | None
    batch_invariant: bool
    activations: Activations
    rung: str | None
    params: Mapping[str, Any] | None


class Choices(Ways, total=False):
    """The options that decide how a product is computed."""

    out_dtype: Any


class Planned(Choices, total=False):
    """The options of a plan: those of a product, and scales of matrices of 8 bits."""

    scale_a: Any
    scale_b: Any


class Same(Ways, total=False):
    """The options of a product whose result has its operands' dtype."""

    out: Any
    device: str | None


class Grouped(TypedDict, total=False):
    """The options of a grouped product."""

    indices: Any
    weights: Any
    epilogue: str | None
    out: Any
    out_dtype: Any
    rung: str | None
    params: Mapping[str, Any] | None


class Keywords(Choices, total=False):
    """The options of a product: what decides it, where, and into what."""

    out: Any
    device: str | None


class Scaled(Keywords, total=False):
    """The options of a product of matrices: those of others, scales of 8 bits, an epilogue."""

    scale_a: Any
    scale_b: Any
    epilogue: Epilogue | None


class Scales(TypedDict, total=False):
    """The keywords of `gemmule.gemv` and `gemmule.gemm`."""

    alpha: Scalar
    beta: Scalar
    device: str | None
