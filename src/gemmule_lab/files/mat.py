"""MATLAB files (``.mat``) of versions 4 to 7, read without SciPy: full numeric matrices only.

Whatever a file claims (types, sizes, shapes, names) is checked against the bytes that it has before
memory is taken. Matrices stay column-major, as they lie in the file. Version 7.3 and the formats of
Octave's own are named and refused with the way out.
Format: MATLAB MAT-File Format, The MathWorks (level 4 here, level 5 in `mat5`).
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gemmule_lab.files.mat5 import HEADER_BYTES, level_5
from gemmule_lab.files.mat_variable import DTYPES, MAX_NAME_BYTES, Variable, matrix
from gemmule_lab.files.sources import Source, check_shape, check_size, pick

Matrix = NDArray[Any]

_LEVEL_4 = {0: "double", 1: "single", 2: "int32", 3: "int16", 4: "uint16", 5: "uint8"}
_FOREIGN = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"Octave-1-", "a binary file of Octave"),
    (b"# Created by Octave", "a text file of Octave"),
    (b"# name:", "a text file of Octave"),
    (b"\x1f\x8b", "a file compressed as a whole"),
)


def read_mat(source: Source, limit: int) -> Matrix:
    """Return one variable of a MATLAB file (up to version 7), column-major as it lies there."""
    with source.path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEADER_BYTES)
        level = _level(source, head)
        listed = _level_4(file, size, source) if level == 4 else level_5(file, size, source, head)
        known: dict[str, Variable] = {}
        for variable in listed:
            if variable.name in known:
                raise ValueError(f"{source.path} holds {variable.name!r} twice.")
            known[variable.name] = variable
        chosen = known[pick(source, known, "variable")]
        if chosen.kind not in DTYPES:
            raise TypeError(f"{source} is a MATLAB {chosen.kind}; a full numeric matrix is needed.")
        check_shape(source, chosen.shape)
        nbytes = math.prod(chosen.shape) * chosen.dtype.itemsize * (2 if chosen.complex_ else 1)
        # What is stored and what is made of it are alive together, where they differ.
        check_size(source, nbytes + chosen.stored_bytes, limit)
        return matrix(source, chosen)


def _level(source: Source, head: bytes) -> int:
    """Return 4 or 5; ValueError for other files, with what to do where their kind is known."""
    for start, what in _FOREIGN:
        if head.startswith(start):
            raise ValueError(
                f"{source.path} is {what}, which is not read. Save it as version 7 (in Octave "
                "'save -v7 FILE A', in MATLAB save('FILE', 'A', '-v7')), or the matrix as .npy."
            )
    if len(head) >= 20 and 0 in head[:4]:
        return 4
    if len(head) == HEADER_BYTES and head[126:128] in (b"IM", b"MI"):
        major = head[125] if head[126:128] == b"IM" else head[124]
        if major == 1:
            return 5
        if major == 2:
            raise ValueError(
                f"{source.path} is a MATLAB 7.3 (HDF5) file, which is not read. Save it in MATLAB "
                "with save(..., '-v7'), or the matrix as .npy."
            )
    raise ValueError(f"{source.path} is not a readable .mat file: it begins with no known head.")


# --- level 4 ------------------------------------------------------------------------------------


def _level_4(file: IO[bytes], size: int, source: Source) -> Iterator[Variable]:
    """Yield the variables of a file that is nothing but one after the other."""
    at = 0
    while at < size:
        file.seek(at)
        head = file.read(20)
        if len(head) < 20:
            raise ValueError(f"{source.path} is cut short at byte {at:,}.")
        order = "<" if struct.unpack("<i", head[:4])[0] in range(5000) else ">"
        kind, rows, cols, imaginary, length = struct.unpack(f"{order}5i", head)
        machine, zero, number, form = kind // 1000, kind // 100 % 10, kind // 10 % 10, kind % 10
        if machine != (order == ">") or zero or number not in _LEVEL_4 or form not in range(3):
            raise ValueError(f"{source.path} has no variable at byte {at:,}: type {kind}.")
        if imaginary not in (0, 1) or not 1 <= length <= MAX_NAME_BYTES:
            raise ValueError(f"{source.path} has a damaged variable at byte {at:,}.")
        check_shape(source, (rows, cols))
        name = file.read(length).rstrip(b"\0").decode("latin-1")
        stored = np.dtype(order + DTYPES[_LEVEL_4[number]])
        start, count = at + 20 + length, rows * cols * (1 + imaginary)
        nbytes = count * stored.itemsize
        at = start + nbytes
        if at > size:
            raise ValueError(f"{source.path} is cut short: {name!r} ends at byte {at:,}.")
        parts = functools.partial(_read_parts, file, start, stored, rows * cols, count)
        label = (_LEVEL_4[number], "char", "sparse matrix")[form]
        yield Variable(name, label, (rows, cols), bool(imaginary), nbytes, parts)


def _read_parts(
    file: IO[bytes], start: int, stored: np.dtype[Any], each: int, count: int
) -> list[NDArray[Any]]:
    file.seek(start)
    whole = np.fromfile(file, stored, count)
    if whole.size != count:
        raise ValueError("the file became shorter while it was read")
    return [whole[:each], whole[each:]]
