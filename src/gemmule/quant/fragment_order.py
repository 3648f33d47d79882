"""Codes are put into the order that CUDA kernels read on the device itself, in one pass."""

from __future__ import annotations

import struct
from pathlib import Path

from gemmule.backends.cuda import driver, single
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
    packed = _ARGS.pack(rows.pointer, codes.pointer, m, n, -(-n * bits // 8))
    single.run(_SOURCE, step, packed, codes.ordinal, 0)
    driver.synchronize(codes.ordinal)
    return codes
