"""Results out: files that appear complete or not at all, and are never replaced by accident.

A file is written under a random name beside its target, flushed to disk, then given its name in
one step; what a killed writer left is removed by the next one of that name. `new_matrix` yields a
memory-mapped array, so a result may be larger than memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import numpy_dtype
from gemmule.storage.atomic import new_file
from gemmule_lab.files.matrices import SAFETENSORS_DTYPES

SUFFIXES = (".npy", ".safetensors", ".mat", ".csv")
RESULT_NAME = "result"
_TAGS = {name: tag for tag, name in SAFETENSORS_DTYPES.items()}
_DATA_ALIGNMENT = 64
_TAKEN = "pass --force to replace it"
# dtype name -> (number of MATLAB's class, number of the type that stores it)
_NUMBERS = {
    "float64": (6, 9), "float32": (7, 7), "int8": (8, 1), "uint8": (9, 2), "int16": (10, 3),
    "uint16": (11, 4), "int32": (12, 5), "uint32": (13, 6), "int64": (14, 12), "uint64": (15, 13),
}  # fmt: skip
_INT8, _INT32, _UINT32, _MATRIX = 1, 5, 6, 14


def check_target(
    path: Path, *, force: bool, suffixes: tuple[str, ...] = SUFFIXES, inputs: Iterable[Path] = ()
) -> None:
    """Raise before any work is done if `path` cannot become a result file.

    ValueError for another suffix and for one of the `inputs`, FileNotFoundError for a missing
    folder, FileExistsError for a file that exists unless `force`, IsADirectoryError for a folder.
    """
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{path} has suffix {path.suffix!r}; it must be {' or '.join(suffixes)}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} does not exist; create it first.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the path of a file in it.")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already; {_TAKEN}.")
    for given in inputs:
        if path.exists() and given.exists() and path.samefile(given):
            raise ValueError(f"{path} is read by this command; give the result another name.")


@contextmanager
def new_matrix(
    path: Path, shape: tuple[int, ...], dtype: str, *, force: bool = False
) -> Iterator[NDArray[Any]]:
    """Yield a zeroed, writable array of `shape` that becomes the file `path` when the block ends.

    dtype: a dtype name of `gemmule.core.problem`. ``.npy`` holds all but bfloat16 and float8, which
    the format cannot name (TypeError); ``.safetensors`` holds all but complex, ``.mat`` (level 5,
    below 2^31 bytes) float64, float32 and integers, both under the name ``result``; ``.csv`` holds
    vectors and matrices of real numbers, a line a row, each with as many digits as tell it apart.
    All but ``.csv`` are maps of the file. Errors as `check_target` and `new_file`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with new_matrix(Path(folder, "y.npy"), (3,), "float32") as y:
    ...         y[:] = 1
    ...     np.load(f"{folder}/y.npy").tolist()
    [1.0, 1.0, 1.0]
    """
    check_target(path, force=force)
    suffix = path.suffix.lower()
    if suffix == ".csv":
        with _new_text(path, shape, dtype, force=force) as numbers:
            yield numbers
        return
    header = _header(path, shape, dtype)
    real_dtype = numpy_dtype(dtype)
    nbytes = math.prod(shape) * real_dtype.itemsize
    with new_file(path, replace=force, taken=_TAKEN) as file:
        file.write(header)
        if nbytes == 0:
            yield np.empty(shape, real_dtype)
            return
        file.flush()
        _take(file, path, len(header) + nbytes + (-nbytes % 8 if suffix == ".mat" else 0))
        # By columns, as that format has it, or else by rows.
        flat = np.memmap(file, real_dtype, "r+", len(header), math.prod(shape))
        mapped = flat.reshape(shape, order="F" if suffix == ".mat" else "C")
        yield mapped.view(np.ndarray)
        flat.flush()


def _take(file: IO[bytes], path: Path, size: int) -> None:
    """Make a file so long, in blocks that it owns: writing to a map of others ends the process.

    OSError where the disk, or the user's share of it, has not so much left.
    """
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # it cannot
            reason = f"{error.strerror} for its {size:,} bytes"
            raise OSError(error.errno, reason, str(path)) from None
        file.truncate(size)


@contextmanager
def _new_text(
    path: Path, shape: tuple[int, ...], dtype: str, *, force: bool
) -> Iterator[NDArray[Any]]:
    """Yield an array in memory whose rows become lines of numbers between commas."""
    if len(shape) > 2 or dtype.startswith("complex"):
        raise TypeError(
            f"{path}: .csv holds vectors and matrices of real numbers, not {dtype} of "
            f"{len(shape)} dimensions. Write .npy."
        )
    numbers = np.zeros(shape, numpy_dtype(dtype))
    with new_file(path, replace=force, taken=_TAKEN) as file:
        yield numbers
        rows = numbers.reshape(len(numbers) if shape else 1, -1) if numbers.size else ()
        for row in rows:
            file.write(f"{','.join(map(str, row))}\n".encode())


def _header(path: Path, shape: tuple[int, ...], dtype: str) -> bytes:
    if path.suffix.lower() == ".safetensors":
        return _safetensors_header(path, shape, dtype)
    if path.suffix.lower() == ".mat":
        return _mat_header(RESULT_NAME, shape, dtype)
    real_dtype = numpy_dtype(dtype)
    if real_dtype.kind == "V" or np.dtype(real_dtype.str) != real_dtype:
        raise TypeError(
            f"{path}: the .npy format cannot name {dtype}. Write .safetensors, or ask for another "
            "--out-dtype."
        )
    import io

    buffer = io.BytesIO()
    description = {"descr": real_dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


def _safetensors_header(path: Path, shape: tuple[int, ...], dtype: str) -> bytes:
    if dtype not in _TAGS:
        raise TypeError(f"{path}: the .safetensors format has no {dtype}. Write .npy.")
    nbytes = math.prod(shape) * numpy_dtype(dtype).itemsize
    entry = {"dtype": _TAGS[dtype], "shape": list(shape), "data_offsets": [0, nbytes]}
    text = json.dumps({RESULT_NAME: entry}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _mat_header(name: str, shape: tuple[int, ...], dtype: str) -> bytes:
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
        _mat_element(_UINT32, np.array([code, 0], "<u4").tobytes()),
        _mat_element(_INT32, np.array(sizes, "<i4").tobytes()),
        _mat_element(_INT8, name.encode("ascii")),
        np.array([stored, nbytes], "<u4").tobytes(),
    ]
    inside = b"".join(parts)
    whole = len(inside) + nbytes + -nbytes % 8
    text = b"MATLAB 5.0 MAT-file, written by gemmule".ljust(116) + bytes(8)
    version = np.array([0x0100, 0x4D49], "<u2").tobytes()
    return text + version + np.array([_MATRIX, whole], "<u4").tobytes() + inside


def _mat_element(kind: int, data: bytes) -> bytes:
    tag = np.array([kind, len(data)], "<u4").tobytes()
    return tag + data + bytes(-len(data) % 8)
