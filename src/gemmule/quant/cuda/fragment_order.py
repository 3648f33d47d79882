"""Reordering codes on a device into the layout that CUDA kernels read, and back.

What is made lies in memory of the library that holds what it is made of. Of our own memory these
run on the legacy default stream and wait for it, of a library's on its current stream, without
waiting. They raise DeviceError and CompileError as a launch does.
"""

from __future__ import annotations

import struct
from pathlib import Path

from gemmule.backends.cuda import driver, starter
from gemmule.backends.cuda.device_array import DeviceArray
from gemmule.core.problem import ITEMSIZE
from gemmule.core.rung import Step
from gemmule.quant.layouts import get_layout

LAYOUT = "mma16"
"""The layout that the fast CUDA rungs read, in either direction."""

_SOURCE = Path(__file__).with_suffix(".cu")
_ARGS = struct.Struct("<QQqqq")
_TURN = struct.Struct("<QQqq")
_THREADS = 256


def reordered(
    codes: DeviceArray, layout: str, shape: tuple[int, int], bits: int, *, floats: bool = False
) -> DeviceArray:
    """Return codes on a device, of layout ``mma16`` in layout ``row`` or the other way round.

    floats: 4-bit codes are floats, whose bits lie apart in mma16 (`gemmule.quant.layouts.woven`).
    """
    m, n = shape
    found = codes.beside(get_layout(layout).storage_shape(m, n, bits), "uint8")
    packs = layout == LAYOUT
    of = f"{bits}, true" if floats else str(bits)
    name, each = (f"pack_mma16<{of}>", 16) if packs else (f"unpack_mma16<{of}>", 1)
    packed = _ARGS.pack(codes.pointer, found.pointer, m, n, -(-n * bits // 8))
    _launch(name, found.nbytes // each, packed, found)
    return found


def turned(numbers: DeviceArray) -> DeviceArray:
    """Return a matrix of 1, 2 or 4-byte numbers, C-ordered, in Fortran's order, or the reverse."""
    rows, columns = numbers.shape
    backwards = numbers.strides[1] != 1 and columns > 1
    source = numbers.T if backwards else numbers
    rows, columns = source.shape
    found = numbers.beside((columns, rows), numbers.dtype)
    word = {1: "unsigned char", 2: "unsigned short", 4: "unsigned"}[ITEMSIZE[numbers.dtype]]
    packed = _TURN.pack(source.pointer, found.pointer, rows, columns)
    _launch(f"turn<{word}>", rows * columns, packed, found)
    return found if backwards else found.T


def _launch(name: str, threads: int, packed: bytes, found: DeviceArray) -> None:
    if threads:
        step = Step(name, (-(-threads // _THREADS), 1, 1), (_THREADS, 1, 1))
        starter.run(_SOURCE, step, packed, found.ordinal, found.stream)
    if found.library == "gemmule":
        driver.synchronize(found.ordinal)
