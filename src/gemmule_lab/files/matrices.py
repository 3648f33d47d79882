"""Matrices in: ``.npy``, ``.safetensors``, ``.npz``, ``.mat`` and ``.mtx`` files, all untrusted.

A *source* names a file, or one matrix of a file that holds several: ``weights.safetensors:fc.w``,
``run.npz:A``, ``data.mat:K``. ``.npy`` and ``.safetensors`` are memory-mapped, so they may be
larger than memory; the others are read whole after their sizes were checked against a limit.
Nothing is ever unpickled: object arrays are refused before a byte of them is read.
Column-major files stay column-major. `gemmule_lab.files.output` writes results.
"""

from __future__ import annotations

import errno
import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gemmule.core.memory import available_bytes
from gemmule.core.problem import DTYPES, numpy_dtype
from gemmule.quant.files import TAGS, stored_tensors
from gemmule_lab.files.mat import read_mat
from gemmule_lab.files.mtx import read_mtx
from gemmule_lab.files.sources import Source, check_shape, check_size, parse_source, pick

Matrix = NDArray[Any]

_PIECE_BYTES = 1 << 20  # read at a time from an archive, so that no second copy is made

SUFFIXES = (".npy", ".safetensors", ".npz", ".mat", ".mtx")
SAFETENSORS_DTYPES = {tag: name for tag, name in TAGS.items() if name in DTYPES}


def read_matrix(source: Source | str, *, limit_bytes: int | None = None) -> Matrix:
    """Return the array that `source` names; ``.npy`` and ``.safetensors`` as a read-only map.

    limit_bytes: the most that a format that is read whole (``.npz``, ``.mat``, ``.mtx``) may take
    in memory; default 80 % of the memory now available. The file must not change while a map of it
    lives. Raises ValueError for anything malformed, too large, ambiguous or of an unknown kind,
    TypeError for a dtype that gemmule does not multiply, OSError as `open` does.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/A.npy", np.eye(3))
    ...     read_matrix(f"{folder}/A.npy").shape
    (3, 3)
    """
    source = parse_source(source) if isinstance(source, str) else source
    reader = _READERS.get(source.path.suffix.lower())
    if reader is None:
        raise ValueError(
            f"{source.path} has suffix {source.path.suffix!r}; a matrix file must be one of "
            f"{', '.join(SUFFIXES)}. Save it with numpy.save, for example."
        )
    if not source.path.is_file():
        kind = "no regular file" if source.path.exists() else "missing"
        kind = "a folder" if source.path.is_dir() else kind
        raise FileNotFoundError(f"{source.path} is {kind}; give the path of a matrix file.")
    limit = int(available_bytes() * 0.8) if limit_bytes is None else limit_bytes
    matrix = reader(source, limit)
    _check_kind(source, matrix.dtype)
    return matrix


def list_matrices(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of a ``.safetensors`` file, without reading them."""
    return {name: one.shape for name, one in stored_tensors(path).items()}


def _check_kind(source: Source, dtype: np.dtype[Any]) -> None:
    if dtype.newbyteorder("=").name in DTYPES:
        return
    hint = "Save it with .astype('float32')"
    if dtype.kind == "V" and dtype.itemsize in (1, 2) and dtype.names is None:
        hint = "NumPy files cannot name bfloat16 or float8: store those as .safetensors"
    raise TypeError(f"{source} has dtype {dtype}; supported are {', '.join(DTYPES)}. {hint}.")


# --- .npy ---------------------------------------------------------------------------------------


_MAX_HEADER_BYTES = 1 << 16  # NumPy parses 10,000 at most, and reads as many as are claimed


@dataclass(frozen=True, slots=True)
class _NpyHeader:
    shape: tuple[int, ...]
    column_major: bool
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _npy_header(file: IO[bytes], source: Source) -> _NpyHeader:
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"format version {version}; versions 1.0 and 2.0 are read")
        old, lib = version == (1, 0), np.lib.format
        length = file.read(2 if old else 4)
        size = int.from_bytes(length, "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"its header claims {size:,} bytes")
        text = io.BytesIO(length + file.read(size))
        shape, order, dtype = (lib.read_array_header_1_0 if old else lib.read_array_header_2_0)(
            text
        )
    except OSError:
        raise
    except Exception as error:  # NumPy's header parser fails in many ways: TokenError, SyntaxError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{source} is not a readable .npy file: {reason}.") from None
    if dtype.hasobject:
        raise TypeError(
            f"{source} holds Python objects (dtype {dtype}), which are refused: reading them runs "
            "code from the file. Save a numeric array."
        )
    if dtype.subdtype is not None:
        raise TypeError(f"{source} holds elements of dtype {dtype}; each must be one number.")
    check_shape(source, shape)
    return _NpyHeader(tuple(shape), bool(order), dtype)


def _read_npy(source: Source, limit: int) -> Matrix:
    with source.path.open("rb") as file:
        header = _npy_header(file, source)
        start, size = file.tell(), file.seek(0, 2)
    if size - start < header.nbytes:
        raise ValueError(
            f"{source} is cut short: shape {header.shape} of {header.dtype} takes "
            f"{header.nbytes:,} bytes, but {size - start:,} follow its header."
        )
    return _map(source.path, header.dtype, header.shape, start, header.column_major)


def _map(
    path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, column_major: bool
) -> Matrix:
    """Return a read-only map of `shape` elements that begin at byte `start`."""
    order: Any = "F" if column_major else "C"
    if math.prod(shape) == 0 or dtype.itemsize == 0:  # an empty range cannot be mapped
        return np.empty(shape, dtype, order)
    mapped = np.memmap(path, dtype, "r", start, shape, order)
    return mapped.view(np.ndarray)


# --- .safetensors -------------------------------------------------------------------------------


def _read_safetensors(source: Source, limit: int) -> Matrix:
    entries = stored_tensors(source.path)
    entry = entries[pick(source, entries, "tensor")]
    if entry.tag not in SAFETENSORS_DTYPES:
        raise TypeError(
            f"{source} has dtype {entry.tag}; supported are {', '.join(SAFETENSORS_DTYPES)}."
        )
    dtype = numpy_dtype(SAFETENSORS_DTYPES[entry.tag])
    return _map(source.path, dtype, entry.shape, entry.start, column_major=False)


# --- .npz ---------------------------------------------------------------------------------------


def _read_npz(source: Source, limit: int) -> Matrix:
    try:
        with zipfile.ZipFile(source.path) as archive:
            infos = {info.filename: info for info in archive.infolist() if not info.is_dir()}
            arrays = [name.removesuffix(".npy") for name in infos if name.endswith(".npy")]
            info = infos[pick(source, arrays, "array") + ".npy"]
            # As numpy.savez writes them: a file of LZMA's says itself how much memory it takes.
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(
                    f"{source} is compressed by method {info.compress_type}; read are stored and "
                    "deflated arrays, as numpy.savez and numpy.savez_compressed write them."
                )
            check_size(source, info.file_size, limit)
            with archive.open(info) as member:
                return _read_member(member, info.file_size, source)
    except (ValueError, TypeError, MemoryError):
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the file's begin, from a damaged directory
            raise
        raise ValueError(f"{source} is not a readable .npz file: {error}.") from None
    except Exception as error:  # zipfile fed with damaged bytes fails in any way
        raise ValueError(f"{source} is not a readable .npz file: {error}.") from None


def _read_member(member: IO[bytes], file_size: int, source: Source) -> Matrix:
    import zlib

    try:
        header = _npy_header(member, source)
        # The header speaks for itself: believe it only as far as the archive's own size goes.
        if header.nbytes > file_size:
            raise ValueError(
                f"{source} claims {header.nbytes:,} bytes, but its archive entry has {file_size:,}."
            )
        data = np.empty(header.nbytes, np.uint8)
        at = 0
        while count := member.readinto(data[at : at + _PIECE_BYTES].data):  # type: ignore[attr-defined]
            at += count
    except zlib.error as error:
        raise ValueError(f"{source} is damaged: {error}.") from None
    if at != header.nbytes:
        raise ValueError(f"{source} is cut short: {at:,} of {header.nbytes:,} bytes.")
    order: Any = "F" if header.column_major else "C"
    return np.ndarray(header.shape, header.dtype, data.data, order=order)


_READERS: dict[str, Callable[[Source, int], Matrix]] = {
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
    ".npz": _read_npz,
    ".mat": read_mat,
    ".mtx": read_mtx,
}
