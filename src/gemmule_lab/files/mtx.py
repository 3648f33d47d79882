"""Matrix Market files (``.mtx``), read without SciPy.

Every line is checked against the one form that the header allows before a number of it is parsed,
so damage is an error with its line number, never a guess. Blocks of lines are checked by one
regular expression and parsed by NumPy; memory beyond the matrix is a few blocks.
Format: R. Boisvert, R. Pozo, K. Remington, The Matrix Market Exchange Formats, NISTIR 5935, 1996.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gemmule_lab.files.sources import Source, check_shape, check_size

Matrix = NDArray[Any]

BLOCK_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 16
_BANNER = re.compile(rb"%{1,2}MatrixMarket((?:[ \t]+[A-Za-z-]+)*)[ \t\r\n]*")
_SIZES = re.compile(rb"[ \t]*(\d{1,20}(?:[ \t]+\d{1,20})+)[ \t\r\n]*")
_FORMATS = ("coordinate", "array")
_FIELDS = {
    "real": np.float64,
    "double": np.float64,
    "complex": np.complex128,
    "integer": np.int64,
    "unsigned-integer": np.uint64,
    "pattern": np.float64,  # 1 for each entry
}
_SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")
# Possessive (`++`), so that a long file is matched in one pass, whatever it holds.
_REAL = (
    rb"[+-]?+(?:(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?+[0-9]++)?+"
    rb"|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?+|[nN][aA][nN])"
)
_NUMBERS = {
    "real": (_REAL,),
    "double": (_REAL,),
    "complex": (_REAL, _REAL),
    "integer": (rb"[+-]?+[0-9]++",),
    "unsigned-integer": (rb"\+?+[0-9]++",),
    "pattern": (),
}
_LONG_INTEGER = re.compile(rb"[0-9]{19}")  # may be beyond 64 bits, where strtol does not say so


@dataclass(frozen=True, slots=True)
class _Header:
    """What the first lines say."""

    form: str
    field: str
    symmetry: str
    rows: int
    cols: int
    entries: int
    lines: int

    @property
    def sparse(self) -> bool:
        return self.form == "coordinate"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(_FIELDS[self.field])

    @property
    def width(self) -> int:
        """Numbers on a line."""
        return len(_NUMBERS[self.field]) + (2 if self.sparse else 0)

    @property
    def parsed(self) -> np.dtype[Any]:
        """What the numbers of a line are parsed as; indices below 2^46 are exact in any of them."""
        kinds = {"integer": np.int64, "unsigned-integer": np.uint64, "pattern": np.int64}
        return np.dtype(kinds.get(self.field, np.float64))


def read_mtx(source: Source, limit: int) -> Matrix:
    """Return a Matrix Market file as a full column-major matrix, as the format orders it.

    Entries that stand twice in a coordinate file are summed, as SciPy does.
    """
    with source.path.open("rb") as file:
        header = _read_header(file, source)
        nbytes = header.rows * header.cols * header.dtype.itemsize
        triangle = not header.sparse and header.symmetry != "general"
        check_size(source, nbytes + nbytes // 2 * triangle, limit)
        if header.sparse:
            return _read_sparse(file, source, header)
        return _read_dense(file, source, header)


def _read_header(file: IO[bytes], source: Source) -> _Header:
    first = file.readline(MAX_LINE_BYTES)
    banner = _BANNER.fullmatch(first)
    words = banner[1].decode("ascii").lower().split() if banner else []
    if len(words) != 4 or words[0] != "matrix":
        raise ValueError(
            f"{source} is not a Matrix Market file: its first line must be "
            f"'%%MatrixMarket matrix FORMAT FIELD SYMMETRY', not {_shown(first)}."
        )
    form, field, symmetry = words[1:]
    for what, word, known in (
        ("format", form, _FORMATS),
        ("field", field, _FIELDS),
        ("symmetry", symmetry, _SYMMETRIES),
    ):
        if word not in known:
            raise ValueError(f"{source} has {what} {word!r}; it must be one of {', '.join(known)}.")
    if field == "pattern" and (form == "array" or symmetry not in ("general", "symmetric")):
        raise ValueError(f"{source} is {form} pattern {symmetry}, which the format does not have.")
    if symmetry == "hermitian" and field != "complex":
        raise ValueError(f"{source} is {field} hermitian; only complex matrices are hermitian.")
    return _read_sizes(file, source, form, field, symmetry)


def _read_sizes(file: IO[bytes], source: Source, form: str, field: str, symmetry: str) -> _Header:
    lines = 2
    text = file.readline(MAX_LINE_BYTES)
    while text.startswith(b"%") or text.strip() == b"":
        if not text.endswith(b"\n"):
            raise ValueError(f"{source} ends before the line of its sizes.")
        text, lines = file.readline(MAX_LINE_BYTES), lines + 1
    match = _SIZES.fullmatch(text)
    sizes = [int(word) for word in match[1].split()] if match else []
    wanted = 3 if form == "coordinate" else 2
    if len(sizes) != wanted:
        raise ValueError(
            f"{source}, line {lines}: {wanted} sizes must stand there, not {_shown(text)}."
        )
    check_shape(source, sizes[:2])
    rows, cols = sizes[:2]
    if symmetry != "general" and rows != cols:
        raise ValueError(
            f"{source} is {symmetry} and {rows} x {cols}; a {symmetry} matrix is square."
        )
    if form == "coordinate":
        entries = sizes[2]
    elif symmetry == "general":
        entries = rows * cols
    else:  # the lower triangle, which has no diagonal where that is zero anyway
        entries = rows * (rows + (-1 if symmetry == "skew-symmetric" else 1)) // 2
    return _Header(form, field, symmetry, rows, cols, entries, lines)


def _shown(text: bytes) -> str:
    text = text.rstrip(b"\r\n")
    return repr(text[:60].decode("latin-1")) + (" ..." if len(text) > 60 else "")


# --- the numbers --------------------------------------------------------------------------------


def _blocks(file: IO[bytes], source: Source) -> Iterator[bytes]:
    """Yield the rest of the file in pieces of whole lines."""
    rest = b""
    while piece := file.read(BLOCK_BYTES):
        text = rest + piece
        cut = text.rfind(b"\n") + 1
        rest = text[cut:]
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"{source} has a line of more than {MAX_LINE_BYTES:,} bytes.")
        if cut:
            yield text[:cut]
    if rest:
        yield rest + b"\n"


def _numbers(file: IO[bytes], source: Source, header: _Header) -> Iterator[NDArray[Any]]:
    """Yield the checked numbers, ``header.width`` columns a line; all lines that there must be."""
    index = (rb"[0-9]{1,15}+",) * (2 if header.sparse else 0)
    line = rb"[ \t]++".join((*index, *_NUMBERS[header.field]))
    pattern = re.compile(rb"(?:[ \t]*+" + line + rb"[ \t\r]*+\n|[ \t\r]*+\n|%[^\n]*+\n)*+")
    seen, at = 0, header.lines
    for block in _blocks(file, source):
        match = pattern.match(block)
        end = match.end() if match else 0
        if end != len(block):
            number = at + block.count(b"\n", 0, end) + 1
            fault = block[end : block.index(b"\n", end)]
            raise ValueError(
                f"{source}, line {number}: {_shown(fault)} is no line of a {header.form} "
                f"{header.field} matrix."
            )
        at += block.count(b"\n")
        values = _parsed(block, source, header).reshape(-1, header.width)
        seen += len(values)
        if seen > header.entries:
            raise ValueError(f"{source} holds more than the {header.entries:,} entries it claims.")
        yield values
    if seen != header.entries:
        raise ValueError(f"{source} is cut short: {seen:,} of {header.entries:,} entries.")


def _parsed(block: bytes, source: Source, header: _Header) -> NDArray[Any]:
    if b"%" in block:
        block = b"\n".join(t for t in block.split(b"\n") if not t.startswith(b"%"))
    if header.parsed.kind in "iu" and _LONG_INTEGER.search(block):
        return np.array([_integer(w, source, header) for w in block.split()], header.parsed)
    if not block.strip():
        return np.empty(0, header.parsed)
    # The lines were checked: what stands in them are numbers, and NumPy reads all of them.
    return np.fromstring(block, header.parsed, sep=" ")


def _integer(word: bytes, source: Source, header: _Header) -> int:
    limits = np.iinfo(header.parsed)
    digits = word.lstrip(b"+-0")  # Python refuses to parse thousands of digits, also of zeros
    value = int(digits[:20] or b"0") * (-1 if word.startswith(b"-") else 1)
    if len(digits) > 20 or not limits.min <= value <= limits.max:
        raise ValueError(f"{source} holds {_shown(word)}, which no {header.parsed.name} is.")
    return value


def _values(numbers: NDArray[Any], header: _Header) -> NDArray[Any]:
    """Return the values of lines, without their indices."""
    if header.field == "pattern":
        return np.ones(len(numbers), np.float64)
    own = numbers[:, 2:] if header.sparse else numbers
    if header.field == "complex":
        return np.ascontiguousarray(own).view(np.complex128).reshape(-1)
    return own.reshape(-1)


def _mirrored(values: NDArray[Any], header: _Header) -> NDArray[Any]:
    """Return what stands across the diagonal from `values`."""
    if header.symmetry == "hermitian":
        return values.conj()
    return -values if header.symmetry == "skew-symmetric" else values


def _read_dense(file: IO[bytes], source: Source, header: _Header) -> Matrix:
    flat = np.zeros(header.entries, header.dtype)
    at = 0
    for numbers in _numbers(file, source, header):
        values = _values(numbers, header)
        flat[at : at + len(values)] = values
        at += len(values)
    shape = (header.rows, header.cols)
    if header.symmetry == "general":
        return flat.reshape(shape, order="F")
    matrix = np.zeros(shape, header.dtype, order="F")
    skip, at = int(header.symmetry == "skew-symmetric"), 0
    for column in range(header.cols):
        first = column + skip
        part = flat[at : at + max(header.rows - first, 0)]
        matrix[first:, column] = part
        matrix[column, first + 1 - skip :] = _mirrored(part[1 - skip :], header)
        at += len(part)
    return matrix


def _read_sparse(file: IO[bytes], source: Source, header: _Header) -> Matrix:
    matrix = np.zeros((header.rows, header.cols), header.dtype, order="F")
    for numbers in _numbers(file, source, header):
        places = numbers[:, :2].astype(np.int64) - 1
        _check_places(places, source, header)
        row, col = places.T
        values = _values(numbers, header)
        np.add.at(matrix, (row, col), values)
        if header.symmetry != "general":
            off = row != col
            np.add.at(matrix, (col[off], row[off]), _mirrored(values, header)[off])
    return matrix


def _check_places(places: NDArray[np.int64], source: Source, header: _Header) -> None:
    wrong = (places < 0) | (places >= (header.rows, header.cols))
    if wrong.any():
        row, col = places[wrong.any(axis=1)][0] + 1
        raise ValueError(
            f"{source} has an entry at ({row}, {col}), outside of {header.rows} x {header.cols}."
        )
    above = places[:, 0] < places[:, 1]
    if header.symmetry == "skew-symmetric":
        above |= places[:, 0] == places[:, 1]
    if header.symmetry != "general" and above.any():
        row, col = places[above][0] + 1
        raise ValueError(
            f"{source} is {header.symmetry} and has an entry at ({row}, {col}); only those below "
            "the diagonal are stored."
        )
