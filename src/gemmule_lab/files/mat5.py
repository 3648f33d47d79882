"""Level 5 of MATLAB's format (versions 5 to 7): tagged elements, compressed or not.

Only what a full numeric matrix needs is read. A compressed variable is inflated only as far as its
own head says, so a small file cannot fill memory; its checksum is verified.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gemmule_lab.files.mat_variable import MAX_NAME_BYTES, Variable
from gemmule_lab.files.sources import Source, check_shape

HEADER_BYTES = 128
MAX_DIMENSIONS = 32
_PIECE = 1 << 16
_CLASSES = {
    1: "cell", 2: "struct", 3: "object", 4: "char", 5: "sparse matrix", 6: "double", 7: "single",
    8: "int8", 9: "uint8", 10: "int16", 11: "uint16", 12: "int32", 13: "uint32", 14: "int64",
    15: "uint64", 16: "function", 17: "object",
}  # fmt: skip
_OPAQUE = 17
_STORED = {
    1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8",
}  # fmt: skip
_INT8, _UINT8, _INT32, _UINT32, _MATRIX, _COMPRESSED, _UTF8 = 1, 2, 5, 6, 14, 15, 16
_COMPLEX, _LOGICAL = 0x0800, 0x0200


class _Stream(Protocol):
    """The bytes of one top-level element, in order."""

    def read(self, count: int) -> bytes | bytearray:
        """Return exactly so many bytes; ValueError where there are not."""
        ...

    def close(self) -> None:
        """Check that nothing is left but padding."""
        ...


class _Plain:
    """Bytes as they lie in the file."""

    def __init__(self, file: IO[bytes], start: int, count: int) -> None:
        self._file, self._at, self._end = file, start, start + count

    def read(self, count: int) -> bytes:
        """Return exactly so many bytes; ValueError where there are not."""
        self._file.seek(self._at)
        data = self._file.read(count) if count <= self._end - self._at else b""
        if len(data) != count:
            raise ValueError("it is cut short")
        self._at += count
        return data

    def close(self) -> None:
        """Check that nothing is left but padding."""
        if self._end - self._at >= 8:
            raise ValueError("bytes follow its last part")


class _Inflated:
    """Bytes of a compressed element, inflated no further than asked for."""

    def __init__(self, file: IO[bytes], start: int, count: int) -> None:
        self._file, self._at, self._end = file, start, start + count
        self._inflate = zlib.decompressobj()
        self._waiting = b""

    def _up_to(self, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count and not self._inflate.eof:
            if not self._waiting:
                self._file.seek(self._at)
                self._waiting = self._file.read(min(_PIECE, self._end - self._at))
                self._at += len(self._waiting)
                if not self._waiting:
                    break
            data += self._inflate.decompress(self._waiting, count - len(data))
            self._waiting = self._inflate.unconsumed_tail
        return data

    def read(self, count: int) -> bytearray:
        """Return exactly so many bytes; ValueError where there are not."""
        data = self._up_to(count)
        if len(data) != count:
            raise ValueError("it is cut short")
        return data

    def close(self) -> None:
        """Check that nothing is left but padding, and let zlib compare its checksum."""
        if len(self._up_to(8)) >= 8:
            raise ValueError("bytes follow its last part")
        if not self._inflate.eof:
            raise ValueError("its compressed data do not end")


@dataclass(slots=True)
class _Elements:
    """The parts of one matrix, each a tag and padded data."""

    stream: _Stream
    order: str
    left: int
    padding: int = 0

    def tag(self) -> tuple[int, int, bytes | None]:
        """Return type, size and, where they stand in the tag itself, the data of the next part."""
        self._take(min(self.padding, self.left))
        self.padding = 0
        head = bytes(self._take(8))
        word = int(np.frombuffer(head, f"{self.order}u4", 1)[0])
        if word >> 16:
            if word >> 16 > 4:
                raise ValueError(f"a small part of {word >> 16} bytes cannot be")
            return word & 0xFFFF, word >> 16, head[4 : 4 + (word >> 16)]
        size = int(np.frombuffer(head, f"{self.order}u4", 1, 4)[0])
        return word, size, None

    def part(self, kinds: Any, limit: int, what: str) -> tuple[int, bytes | bytearray]:
        """Return type and data of the next part; ValueError for other types or sizes."""
        kind, size, small = self.tag()
        if kind not in kinds or size > limit:
            raise ValueError(f"its {what} have type {kind} and {size:,} bytes")
        if small is not None:
            return kind, small
        self.padding = -size % 8
        return kind, self._take(size)

    def _take(self, count: int) -> bytes | bytearray:
        if count > self.left:
            raise ValueError("its parts are larger than itself")
        self.left -= count
        return self.stream.read(count)


def level_5(file: IO[bytes], size: int, source: Source, head: bytes) -> Iterator[Variable]:
    """Yield the variables of a file, reading no more of each than its name and shape."""
    order = "<" if head[126:128] == b"IM" else ">"
    at = HEADER_BYTES
    while at < size:
        try:
            kind, count, start = _top(file, order, at, size)
            variable = _variable(file, order, kind, start, count)
        except (ValueError, zlib.error) as error:
            raise ValueError(
                f"{source} is not readable: of the variable at byte {at:,}, {error}."
            ) from None
        if variable.name:  # without one it is MATLAB's own, the workspace of functions
            check_shape(source, variable.shape)
            yield variable
        at = start + count


def _top(file: IO[bytes], order: str, at: int, size: int) -> tuple[int, int, int]:
    """Return type, size and start of the data of the element at `at`."""
    file.seek(at)
    tag = file.read(8)
    if len(tag) < 8:
        raise ValueError("the tag is cut short")
    kind, count = (int(word) for word in np.frombuffer(tag, f"{order}u4"))
    if kind not in (_MATRIX, _COMPRESSED):
        raise ValueError(f"the type is {kind}, no matrix")
    if count > size - at - 8:
        raise ValueError(f"{count:,} bytes are claimed and {size - at - 8:,} are there")
    return kind, count, at + 8


def _open(
    file: IO[bytes], order: str, kind: int, start: int, count: int
) -> tuple[_Elements, _Stream]:
    if kind == _MATRIX:
        plain = _Plain(file, start, count)
        return _Elements(plain, order, count), plain
    stream = _Inflated(file, start, count)
    inner, inner_count = (int(word) for word in np.frombuffer(stream.read(8), f"{order}u4"))
    if inner != _MATRIX:
        raise ValueError(f"the compressed type is {inner}, no matrix")
    return _Elements(stream, order, inner_count), stream


def _variable(file: IO[bytes], order: str, kind: int, start: int, count: int) -> Variable:
    elements, _ = _open(file, order, kind, start, count)
    label, complex_, shape, name = _head(elements)
    real = math.prod(shape)

    def parts() -> list[NDArray[Any]]:
        elements, stream = _open(file, order, kind, start, count)
        _head(elements)
        try:
            found = [_numbers(elements, real) for _ in range(2 if complex_ else 1)]
            if elements.left >= 8:
                raise ValueError("bytes follow its last part")
            stream.close()
        except zlib.error as error:
            raise ValueError(f"{name!r} is damaged: {error}") from None
        return found

    # Stored numbers have eight bytes at most; the head does not say how many.
    most = real * 8 * (2 if complex_ else 1)
    stored = min(most, elements.left)
    return Variable(name, label, shape, complex_, stored, parts)


def _head(elements: _Elements) -> tuple[str, bool, tuple[int, ...], str]:
    """Return class, whether complex, shape and name."""
    _, flags = elements.part((_UINT32,), 8, "flags")
    if len(flags) != 8:
        raise ValueError(f"its flags have {len(flags)} bytes")
    word = int(np.frombuffer(flags, f"{elements.order}u4", 1)[0])
    number = word & 0xFF
    if number not in _CLASSES:
        raise ValueError(f"its class is {number}, which is none")
    shape: tuple[int, ...] = ()
    if number != _OPAQUE:
        _, sizes = elements.part((_INT32, _UINT32), 4 * MAX_DIMENSIONS, "sizes")
        if len(sizes) < 8 or len(sizes) % 4:
            raise ValueError(f"its sizes have {len(sizes)} bytes")
        shape = tuple(int(size) for size in np.frombuffer(sizes, f"{elements.order}i4"))
        if min(shape) < 0:
            raise ValueError(f"its shape is {shape}")
    _, name = elements.part((_INT8, _UINT8, _UTF8), MAX_NAME_BYTES, "name's letters")
    label = "logical" if word & _LOGICAL else _CLASSES[number]
    return label, bool(word & _COMPLEX), shape, bytes(name).decode("latin-1")


def _numbers(elements: _Elements, count: int) -> NDArray[Any]:
    kind, data = elements.part(_STORED, 8 * count, "numbers")
    stored = np.dtype(elements.order + _STORED[kind])
    if len(data) != count * stored.itemsize:
        raise ValueError(f"{count:,} numbers of {stored} do not take {len(data):,} bytes")
    return np.frombuffer(data, stored)


def header(name: str, shape: tuple[int, ...], dtype: str) -> bytes:
    """Return what stands before the elements, by columns, of a file of one full matrix.

    The elements are followed by zeros up to a multiple of 8 bytes. TypeError for a dtype that the
    format has not, ValueError for 2^31 bytes or more, which its lengths do not reach.
    """
    kind = {"float64": "double", "float32": "single"}.get(dtype, dtype)
    code = next((number for number, known in _CLASSES.items() if known == kind), None)
    if code is None:
        raise TypeError(f"the .mat format has no {dtype}; ask for another --out-dtype.")
    item = np.dtype(dtype)
    stored = next(number for number, known in _STORED.items() if known == item.str[1:])
    nbytes = math.prod(shape) * item.itemsize
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
