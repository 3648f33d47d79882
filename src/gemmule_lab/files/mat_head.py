"""The head of a MATLAB file (level 5) that holds one full matrix, for results.

Format: MATLAB MAT-File Format, The MathWorks.
"""

from __future__ import annotations

import math

import numpy as np

# dtype name -> (number of MATLAB's class, number of the type that stores it)
_NUMBERS = {
    "float64": (6, 9), "float32": (7, 7), "int8": (8, 1), "uint8": (9, 2), "int16": (10, 3),
    "uint16": (11, 4), "int32": (12, 5), "uint32": (13, 6), "int64": (14, 12), "uint64": (15, 13),
}  # fmt: skip
_INT8, _INT32, _UINT32, _MATRIX = 1, 5, 6, 14


def header(name: str, shape: tuple[int, ...], dtype: str) -> bytes:
    """Return what stands before the elements, by columns, of a file of one full matrix.

    The elements are followed by zeros up to a multiple of 8 bytes. TypeError for a dtype that the
    format has not, ValueError for 2^31 bytes or more, which its lengths do not reach.
    """
    if dtype not in _NUMBERS:
        raise TypeError(f"the .mat format has no {dtype}; ask for another --out-dtype.")
    code, stored = _NUMBERS[dtype]
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes >= 1 << 31:
        raise ValueError(
            f"{nbytes:,} bytes do not fit into a .mat file of level 5, which ends below 2^31. "
            "Write .npy or .safetensors."
        )
    sizes = (*shape, *(1,) * (2 - len(shape)))
    parts = [
        _element(_UINT32, np.array([code, 0], "<u4").tobytes()),
        _element(_INT32, np.array(sizes, "<i4").tobytes()),
        _element(_INT8, name.encode("ascii")),
        np.array([stored, nbytes], "<u4").tobytes(),
    ]
    inside = b"".join(parts)
    whole = len(inside) + nbytes + -nbytes % 8
    text = b"MATLAB 5.0 MAT-file, written by gemmule".ljust(116) + bytes(8)
    version = np.array([0x0100, 0x4D49], "<u2").tobytes()
    return text + version + np.array([_MATRIX, whole], "<u4").tobytes() + inside


def _element(kind: int, data: bytes) -> bytes:
    tag = np.array([kind, len(data)], "<u4").tobytes()
    return tag + data + bytes(-len(data) % 8)
