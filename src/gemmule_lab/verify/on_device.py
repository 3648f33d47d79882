"""Oracle's inputs on a GPU exactly as they lie on the host, as arrays of several libraries.

`gemmule.asarray` packs what it copies, so products of its results never meet a stride that a user's
tensor has. Here whole buffers move, poison included, to addresses that are equal modulo 256, and
operands are views of them; a result written into a given array comes back with all around it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.backends.cuda.arrays import ordinal_named
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.operand import Operand
from gemmule.oracle.inputs import Inputs
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.tuning.operands import DeviceMemory, of_inputs

Array: TypeAlias = NDArray[Any]

LIBRARIES = ("own", "torch", "cupy")


def present() -> tuple[str, ...]:
    """Return the libraries whose arrays can be made here; this package's own always can."""
    return tuple(
        name for name in LIBRARIES if name == "own" or importlib.util.find_spec(name) is not None
    )


@dataclass(frozen=True, slots=True)
class Placed:
    """Operands on a device in the public function's order, and the array for the result."""

    left: Any
    right: Any
    out: Any
    fetch: Callable[[], None]  # brings the result's whole buffer back to the host's


def placed(op: str, inputs: Inputs, device: str, library: str) -> Placed:
    """Return the inputs on a device, views of one library; vecmat sees its matrix turned."""
    place, host = DeviceMemory(ordinal_named(device)), of_inputs(inputs)
    matrix, other, out = (place.put(part, copy=True) for part in (host.a, host.b, host.out))
    if op == "vecmat":
        operands = (_known(other, library), _turned(matrix, library))
    else:
        operands = (_known(matrix, library), _known(other, library))
    return Placed(*operands, _known(out, library), lambda: place.fetch(out, host.out))


def _known(operand: Operand, library: str) -> Any:
    """Return an operand's array as one of a library that can view it in place, else our own."""
    array = operand.array
    if isinstance(array, QuantizedMatrix) or library == "own":
        return array
    if library == "torch" and any(step < 0 for step in array.strides):
        return array  # PyTorch has no negative strides
    module: Any = importlib.import_module(library)
    return module.from_dlpack(array)


def _turned(operand: Operand, library: str) -> Any:
    array = operand.array
    if isinstance(array, QuantizedMatrix):
        return array.T
    shape, strides = list(array.shape), list(array.strides)
    shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
    view = DeviceArray(
        array.pointer, tuple(shape), tuple(strides), array.dtype, array.ordinal, array
    )
    return _known(operand._replace(array=view), library)


def multiply(given: Placed, call: Callable[[Any, Any, Any], Any], into: Array | None) -> Array:
    """Return the product as a host array: `into`, where it was written into the given array.

    Whatever the device has to report of the launch is reported here.
    """
    import gemmule as gm

    if into is None:
        result: Array = np.asarray(gm.asarray(call(given.left, given.right, None), device="cpu"))
        return result
    if call(given.left, given.right, given.out) is not given.out:
        raise AssertionError("the result is not the out that was given")
    given.fetch()
    return into
