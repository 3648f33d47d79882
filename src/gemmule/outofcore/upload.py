"""Host arrays brought to a GPU to stay there, at the link's rate."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmule.arrays import transfer
from gemmule.arrays.interop import unwrap
from gemmule.backends.cuda import driver
from gemmule.backends.cuda.arrays import ordinal_named
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.outofcore.feeder import Feeder
from gemmule.outofcore.pieces import Transfer
from gemmule.outofcore.staging import pinned
from gemmule.outofcore.tiling import PANEL_BYTES
from gemmule.quant.matrix import QuantizedMatrix

Array = np.ndarray[Any, Any]


def upload(obj: Any, device: str) -> Any:
    """Return a host array, or a quantised matrix with all its parts, on a device.

    Large arrays go through page-locked memory that several threads fill; otherwise as
    `gemmule.arrays.transfer.to_device` does, whose errors are raised.
    """
    if isinstance(obj, QuantizedMatrix):
        return transfer.to_device(obj, device)
    operand = unwrap(obj, "a")
    large = operand.device == "cpu" and operand.array.nbytes >= PANEL_BYTES
    lines = _lines(operand.array) if large else None
    if lines is None:
        return transfer.to_device(obj, device)
    ordinal, shape = ordinal_named(device), operand.form.shape
    turned = _is_turned(operand.array)
    result = DeviceArray.empty(shape[::-1] if turned else shape, operand.form.dtype, ordinal)
    with driver.on_device(ordinal):
        whole = Transfer(lines, result.pointer, pinned(lines, ordinal))
        feeder = Feeder(iter([[whole]]), ordinal)
        try:
            feeder.open()
            feeder.sent()
        finally:
            feeder.close()
    return result.T if turned else result


def _is_turned(array: Array) -> bool:
    return array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous


def _lines(array: Array) -> Array | None:
    """Return an array as lines in the order that it keeps on the device, None where it has none."""
    if _is_turned(array):
        return array.T
    if array.ndim == 1:
        return array[None, :]
    if array.ndim == 2:
        return array
    whole = array.ndim > 2 and array.flags.c_contiguous
    return array.reshape(-1, array.shape[-1]) if whole else None
