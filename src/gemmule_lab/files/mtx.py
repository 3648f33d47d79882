"""Matrix Market files (``.mtx``), their numbers parsed by NumPy line by line.

SciPy's reader is not used: it takes 1.5.5 as 1.5 and 0x10 as 0, passes over what follows a number
on its line, and of some damage the process dies (1.17). Here damage is an error with its line.
Format: R. Boisvert, R. Pozo, K. Remington, The Matrix Market Exchange Formats, NISTIR 5935, 1996.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gemmule_lab.files.sources import Source, check_shape, check_size

Matrix = NDArray[Any]

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
_LETTERS = b"0123456789+-.eEinfatyINFATY \t\r\n"  # of numbers, infinity, nan, and what parts them


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
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(_FIELDS[self.field])

    @property
    def line(self) -> np.dtype[Any]:
        """What a line holds, number by number."""
        places = [("row", "i8"), ("col", "i8")] if self.form == "coordinate" else []
        numbers = [("real", "f8"), ("imag", "f8")] if self.field == "complex" else []
        if self.field not in ("complex", "pattern"):
            numbers = [("value", self.dtype.str)]
        return np.dtype(places + numbers)


def read_mtx(source: Source, limit: int) -> Matrix:
    """Return a Matrix Market file as a full column-major matrix, as the format orders it.

    Entries that stand twice in a coordinate file are summed.
    """
    with source.path.open("rb") as file:
        header = _read_header(file, source)
        nbytes = header.rows * header.cols * header.dtype.itemsize
        triangle = header.form == "array" and header.symmetry != "general"
        check_size(source, nbytes + nbytes // 2 * triangle, limit)
        lines = _read_lines(file, source, header)
    return (_sparse if header.form == "coordinate" else _dense)(lines, source, header)


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


def _read_lines(file: IO[bytes], source: Source, header: _Header) -> Matrix:
    """Return the numbers of all lines that there must be, a record of `header.line` each."""
    at, text = header.lines, b""

    def lines() -> Iterator[str]:
        nonlocal at, text
        while text := file.readline(MAX_LINE_BYTES):
            at += 1
            if len(text) == MAX_LINE_BYTES:
                raise ValueError(f"{source} has a line of more than {MAX_LINE_BYTES:,} bytes.")
            if text.startswith(b"%"):
                continue
            if text.translate(None, _LETTERS):
                raise ValueError(fault())
            yield text.decode("ascii")

    def fault() -> str:
        what = f"no line of a matrix in {header.form} form of {header.field} {header.dtype} numbers"
        return f"{source}, line {at}: {_shown(text)} is {what}."

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no data")
        warnings.simplefilter("error", DeprecationWarning)  # a float where an integer has to stand
        try:
            found = np.loadtxt(lines(), header.line, comments=None, ndmin=1)
        except (ValueError, DeprecationWarning) as error:
            raise ValueError(str(error) if str(source) in str(error) else fault()) from None
    if len(found) > header.entries:
        raise ValueError(f"{source} holds more than the {header.entries:,} entries it claims.")
    if len(found) < header.entries:
        raise ValueError(f"{source} is cut short: {len(found):,} of {header.entries:,} entries.")
    return found


def _values(lines: Matrix, header: _Header) -> Matrix:
    """Return the values of lines, without their indices."""
    if header.field == "pattern":
        return np.ones(len(lines))
    if header.field != "complex":
        return lines["value"]
    values = np.empty(len(lines), np.complex128)
    values.real, values.imag = lines["real"], lines["imag"]
    return values


def _mirrored(values: Matrix, header: _Header) -> Matrix:
    """Return what stands across the diagonal from `values`."""
    if header.symmetry == "hermitian":
        return values.conj()
    return -values if header.symmetry == "skew-symmetric" else values


def _dense(lines: Matrix, source: Source, header: _Header) -> Matrix:
    flat, shape = _values(lines, header), (header.rows, header.cols)
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


def _sparse(lines: Matrix, source: Source, header: _Header) -> Matrix:
    row, col = lines["row"] - 1, lines["col"] - 1
    _check_places(row, col, source, header)
    matrix = np.zeros((header.rows, header.cols), header.dtype, order="F")
    values = _values(lines, header)
    np.add.at(matrix, (row, col), values)
    if header.symmetry != "general":
        off = row != col
        np.add.at(matrix, (col[off], row[off]), _mirrored(values, header)[off])
    return matrix


def _check_places(row: Matrix, col: Matrix, source: Source, header: _Header) -> None:
    outside = (row < 0) | (row >= header.rows) | (col < 0) | (col >= header.cols)
    if outside.any():
        where = f"({row[outside][0] + 1}, {col[outside][0] + 1})"
        raise ValueError(
            f"{source} has an entry at {where}, outside of {header.rows} x {header.cols}."
        )
    above = row <= col if header.symmetry == "skew-symmetric" else row < col
    if header.symmetry != "general" and above.any():
        where = f"({row[above][0] + 1}, {col[above][0] + 1})"
        raise ValueError(
            f"{source} is {header.symmetry} and has an entry at {where}; only those below "
            "the diagonal are stored."
        )
