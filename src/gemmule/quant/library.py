"""One spelling of NumPy, PyTorch and CuPy, for arithmetic that is written once.

`opened` takes the caller's matrix as one of the three; `closed` turns the parts of the result into
what a `QuantizedMatrix` holds: NumPy arrays on the host, `DeviceArray` views of the same memory on
a GPU. Only libraries that the caller has imported are touched.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmule.backends.cuda.arrays import ordinal_named
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.memory import check_map, whole_lines
from gemmule.core.operand import c_strides
from gemmule.quant.files import NOT_NUMPYS, named_dtype

Array = Any
log = logging.getLogger("gemmule")


class Library:
    """One array library. `xp` is its module; `device` where its arrays lie, None on the host."""

    def __init__(self, xp: Any, device: Any = None) -> None:
        self.xp, self.device = xp, device
        self.is_torch = xp.__name__ == "torch"

    def dtype(self, name: str) -> Any:
        """Return the library's dtype object called `name`."""
        return getattr(self.xp, name) if self.is_torch else named_dtype(name)

    def cast(self, array: Array, name: str) -> Array:
        """Return the array in another dtype; itself where it has it already."""
        dtype = self.dtype(name)
        return array.to(dtype) if self.is_torch else array.astype(dtype, copy=False)

    def dense(self, array: Array, name: str) -> Array:
        """Return the array in a dtype and row-major."""
        cast = self.cast(array, name)
        return cast.contiguous() if self.is_torch else self.xp.ascontiguousarray(cast)

    def empty(self, shape: tuple[int, ...], name: str) -> Array:
        """Return an uninitialised array on the device; on the host it begins with a cache line."""
        dtype = self.dtype(name)
        if self.xp is np:
            memory = whole_lines(math.prod(shape) * np.dtype(dtype).itemsize)
            return memory.view(dtype).reshape(shape)
        where = {"device": self.device} if self.is_torch else {}
        return self.xp.empty(shape, dtype=dtype, **where)

    def asarray(self, host: np.ndarray[Any, Any]) -> Array:
        """Return a host array on the device."""
        if self.xp is np:
            return host
        return self.xp.asarray(host.copy(), **({"device": self.device} if self.is_torch else {}))


HOST = Library(np)


def library_of(array: Array) -> Library:
    """Return the library of an array that `opened` gave."""
    if isinstance(array, np.ndarray):
        return HOST
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return Library(torch, array.device)
    return Library(sys.modules["cupy"])


def place_of(array: Array) -> str | None:
    """Return the device of an array that `opened` gave, such as ``"cuda:0"``; None on the host."""
    if isinstance(array, np.ndarray):
        return None
    if library_of(array).is_torch:
        return f"cuda:{array.get_device()}" if array.is_cuda else None
    return f"cuda:{array.device.id}"


def is_masked(array: object) -> bool:
    """Whether an array of NumPy is masked; none is where nobody imported what makes such."""
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(array, masked.MaskedArray)


def is_known(array: Array) -> bool:
    """Whether one of the three libraries computes on an array as it is."""
    of = {"torch": "Tensor", "cupy": "ndarray"}
    loaded = [getattr(sys.modules[name], kind) for name, kind in of.items() if name in sys.modules]
    return isinstance(array, (np.ndarray, *loaded))


def opened(W: Array) -> tuple[Array, str | None]:
    """Return a matrix as an array of NumPy, PyTorch or CuPy, and the device its codes belong on.

    The memory is shared, and the device None, wherever one of the three can compute on it: what
    lies on a GPU and belongs to another library (JAX, this package's DeviceArray, any DLPack
    exporter) is seen through PyTorch or CuPy, where the caller has imported one. Where not, it is
    copied to the host, and the device says where the result has to go back. What is no array is
    returned as it is, for the checks to refuse.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(W, torch.Tensor):
        refuse_without_data(torch, W, "W")
        return W.detach().resolve_neg(), None
    if isinstance(W, np.ndarray) and not is_masked(W):
        check_map(W)
        return np.ndarray.view(W, np.ndarray), None  # a subclass may multiply in its own way
    if is_known(W) or not hasattr(W, "__dlpack_device__"):
        return W, None
    kind, ordinal = (int(number) for number in W.__dlpack_device__())
    if kind == 1:
        return (np.asarray(W) if hasattr(W, "__array__") else np.from_dlpack(W)), None
    for module in (torch, cupy):
        if module is not None:
            return module.from_dlpack(W), None
    log.warning("W is copied to the host to be quantised: import torch or cupy to do it there")
    return (W.to_host() if hasattr(W, "to_host") else np.asarray(W)), f"cuda:{ordinal}"


def closed(array: Array) -> Array:
    """Return a computed part as a QuantizedMatrix holds it: an ndarray, or a view on the device."""
    if isinstance(array, np.ndarray):
        return array
    if library_of(array).is_torch and not array.is_cuda:
        name = str(array.dtype).removeprefix("torch.")
        if name not in NOT_NUMPYS:
            return array.numpy()
        bits = getattr(sys.modules["torch"], f"uint{8 * array.itemsize}")
        return array.view(bits).numpy().view(named_dtype(name))
    dtype, strides = str(array.dtype).removeprefix("torch."), c_strides(tuple(array.shape))
    if library_of(array).is_torch:
        place, ordinal = array.data_ptr(), array.get_device()
        strides = strides if array.is_contiguous() else array.stride()
    else:
        place, ordinal = array.data.ptr, array.device.id
    return DeviceArray(place, tuple(array.shape), strides, dtype, ordinal, array)


def refuse_distributed(array: Array, argument: str) -> None:
    """Raise TypeError for a DTensor, whose parts lie on several processes."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(array, module.DTensor):
        raise TypeError(
            f"{argument} is a DTensor; needed here is a tensor that one process holds. Pass its "
            "local tensor, .to_local(), or the whole one, .full_tensor(); to share out a quantised "
            "matrix, quantise the whole one and call Q.shard(dim, mesh)."
        )


def refuse_sparse(tensor: Any, argument: str) -> None:
    """Raise TypeError for a tensor of PyTorch whose elements lie in no dense, strided memory."""
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_nested:
        strided = "nested" if tensor.is_nested else f"quantised {tensor.dtype}"
        kind = strided if str(tensor.layout) == "torch.strided" else tensor.layout
        raise TypeError(
            f"{argument} is a {kind} tensor on {tensor.device}; needed is a dense strided tensor "
            "with data. Call .to_dense() or .dequantize() first."
        )


def refuse_without_data(torch: Any, tensor: Any, argument: str) -> None:
    """Raise TypeError or ValueError for a tensor whose elements cannot be read from its memory."""
    refuse_distributed(tensor, argument)
    refuse_sparse(tensor, argument)
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise TypeError(
            f"{argument} is a tensor without data of its own, on {tensor.device}; needed is a "
            "dense strided tensor with data, outside torch.vmap and the rest of torch.func."
        )
    reach = tensor.numel()  # elements up to the last one, the offset apart
    if reach and not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * step for size, step in steps)
    there = tensor.untyped_storage().nbytes()
    if reach and there < (tensor.storage_offset() + reach) * tensor.element_size():
        raise ValueError(
            f"{argument} has shape {tuple(tensor.shape)}, but its storage was resized to {there:,} "
            "bytes and does not hold that any more."
        )


def mover(device: str) -> tuple[str, Callable[[Array], Array]]:
    """Return a device's full name, and what copies one part of a quantised matrix there."""
    if device == "cpu":
        return device, fetched
    ordinal = ordinal_named(device)
    return f"cuda:{ordinal}", lambda part: DeviceArray.from_host(fetched(part), ordinal)


def fetched(part: Array) -> np.ndarray[Any, Any]:
    """Return one part of a quantised matrix as a NumPy array on the host."""
    return part.to_host() if isinstance(part, DeviceArray) else np.asarray(part)
