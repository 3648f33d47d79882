"""Codes are put into the order that CUDA kernels read on the device itself, in one pass."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

from gemmule.backends.cuda import driver, launch, nvrtc
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.rung import Step
from gemmule.quant.layouts import get_layout

LAYOUT = "mma16"
"""The layout that the fast CUDA rungs read, in either direction."""

_SOURCE = Path(__file__).with_suffix(".cu")
_ARGS = struct.Struct("<QQqqq")


def in_fragments(rows: DeviceArray, m: int, n: int, bits: int) -> DeviceArray:
    """Return codes of layout ``row`` that lie on a device in layout ``mma16``, there too.

    Runs on the legacy default stream and waits for it. Raises DeviceError and CompileError as a
    launch does.
    """
    codes = DeviceArray.empty(get_layout(LAYOUT).storage_shape(m, n, bits), "uint8", rows.ordinal)
    if codes.nbytes == 0:
        return codes
    name = f"pack_mma16<{bits}>"
    step = Step(name, (-(-codes.nbytes // (16 * 256)), 1, 1), (256, 1, 1))
    module = nvrtc.compile_file(_SOURCE, (name,), driver.device_info(codes.ordinal).arch)
    handle = driver.load(module.cubin, module.symbols[name], codes.ordinal, 0)
    packed = _ARGS.pack(rows.pointer, codes.pointer, m, n, -(-n * bits // 8))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    params = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    with driver.on_device(codes.ordinal):
        launch.starter(handle, step)(ctypes.addressof(params), 0)
    driver.synchronize(codes.ordinal)
    return codes
