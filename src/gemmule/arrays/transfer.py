"""Between host and device: whole matrices, quantised ones part by part."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmule.arrays.interop import unwrap
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.arrays import ordinal_named, ordinal_of
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.operand import Operand
from gemmule.quant.matrix import QuantizedMatrix


def to_device(obj: Any, device: str, *, keep_layout: bool = False) -> Any:
    """Return a host array copied to a CUDA device, as a `DeviceArray`.

    A `QuantizedMatrix` moves with all its parts, also to ``"cpu"``, as `QuantizedMatrix.to` does;
    with `keep_layout` in the layout that it has. ValueError for an array that is on a device
    already.
    """
    if isinstance(obj, QuantizedMatrix):
        return obj.to(device, obj.layout if keep_layout else None)
    operand = unwrap(obj, "a")
    if operand.device != "cpu":
        raise ValueError(
            f"a already lies on {operand.device}; it can be used as it is, with no copy."
        )
    return DeviceArray.from_host(operand.array, ordinal_named(device))


def to_host(operand: Operand) -> np.ndarray[Any, Any]:
    """Return a device operand's values as a new NumPy array."""
    if isinstance(operand.array, DeviceArray):
        return operand.array.to_host()
    if operand.library == "torch":
        return unwrap(operand.array.cpu(), "a").array  # type: ignore[no-any-return]
    ordinal, form = ordinal_of(operand), operand.form
    view = DeviceArray(
        operand.pointer, form.shape, form.strides, form.dtype, ordinal, operand.array
    )
    driver.synchronize(ordinal)
    return view.to_host()
