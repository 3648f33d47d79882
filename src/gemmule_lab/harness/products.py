"""What is measured, as data: an operation, a number format, a shape and an order in memory."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gemmule.core.problem import COMPLEX, INTEGERS, ITEMSIZE, result_dtype
from gemmule.core.words import Bits, ScaleDtype

OPS = ("matvec", "vecmat", "matmul")
FLOATS = ("float64", "float32", "float16", "bfloat16")
BLOCK_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Format:
    """A number format. dtype: of a plain matrix, and of what either kind is multiplied with.

    bits: of a quantised matrix's codes. group_size: columns of a group; -1 for a whole row; None
    for random codes with one scale and zero point. Groups have zero points, rows have none.
    activations: ``int8`` permits rounding the other operand to 8 bits. scales: their dtype.
    """

    dtype: str
    bits: Bits | None = None
    group_size: int | None = 128
    activations: str = ""
    scales: ScaleDtype = "float32"

    @property
    def integer(self) -> bool:
        """Whether the numbers are plain integers."""
        return self.bits is None and self.dtype in INTEGERS

    @property
    def wide(self) -> str | None:
        """The dtype in which a user without the format would multiply; None for what needs none."""
        if self.bits is not None:
            return "float32"
        return "int64" if self.dtype in ("int8", "int32") else None

    @property
    def out(self) -> str:
        """The dtype of the result."""
        return self.dtype if self.bits is not None else result_dtype(self.dtype, self.dtype)

    @property
    def options(self) -> Mapping[str, Any]:
        """The public function's options."""
        return {"activations": self.activations} if self.activations else {}

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix, its scales left aside."""
        return rows * columns * (self.bits or 8 * ITEMSIZE[self.dtype]) // 8


_CODES: Mapping[str, Bits] = {"int8": 8, "int4": 4}
FORMATS: Mapping[str, Format] = {
    **{name: Format(name) for name in FLOATS},
    **{name: Format("float32", bits) for name, bits in _CODES.items()},
    **{f"{name} x int8": Format("float32", b, activations="int8") for name, b in _CODES.items()},
    **{f"plain {name}": Format(name) for name in ("int8", "uint8", "int32", "int64")},
    "float8": Format("float8_e4m3fn"),
    **{name: Format(name) for name in COMPLEX},
    **{
        f"{name} {'rows' if group == -1 else f'g{group}'} x {dtype}": Format(dtype, bits, group)
        for (name, bits), group, dtype in itertools.product(
            _CODES.items(), (32, 64, 128, 256, -1), ("bfloat16", "float16", "float32")
        )
    },
    **{
        f"{name} g{group} x bfloat16, scales float16": Format(
            "bfloat16", bits, group, scales="float16"
        )
        for (name, bits), group in itertools.product(_CODES.items(), (32, 64, 128))
    },
    **{f"{name} codes": Format("float16", bits, None) for name, bits in _CODES.items()},
}
"""Every number format by the name that suites, tables and options have for it."""


@dataclass(frozen=True, slots=True)
class Product:
    """A case: one product to measure. shape: rows and columns of the matrix as it is stored.

    columns: of a matmul's right operand; None makes it square. column_major: the matrix lies by
    columns; of codes, on the host, the right operand and the result of a matmul do. transposed: it
    multiplies the transpose of what is stored. uniform, in studies alone: numbers in [0, 1) where
    others are normal.
    """

    op: str
    format: str
    shape: tuple[int, int]
    columns: int | None = BLOCK_COLUMNS
    column_major: bool = False
    transposed: bool = False
    uniform: bool = False

    @property
    def form(self) -> Format:
        """The number format."""
        return FORMATS[self.format]

    @property
    def title(self) -> str:
        """The product in words: shape, operation, format."""
        words = self.op
        if self.op == "matmul" and self.columns != BLOCK_COLUMNS:
            words += " square" if self.columns is None else f" {self.columns} columns"
        if self.transposed:
            words += " transposed"
        if self.column_major:
            words += " by columns"
        return f"{self.shape[0]} x {self.shape[1]}, {words}, {self.format}"

    @property
    def width(self) -> int:
        """The columns of the right operand, 1 for a vector."""
        if self.op != "matmul":
            return 1
        return self.shape[1] if self.columns is None else self.columns

    @property
    def order(self) -> Literal["C", "F"]:
        """How the matrix lies, in NumPy's words; of codes, how the floats beside them do."""
        return "F" if self.column_major and self.form.bits is None else "C"

    @property
    def by_tokens(self) -> bool:
        """Whether codes are multiplied by rows of activations, as layers have them."""
        return self.column_major and self.form.bits is not None and self.op == "matmul"

    @property
    def other_shape(self) -> tuple[int, ...]:
        """The shape of the vector or of the right-hand matrix."""
        return self._sides[0]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self._sides[1]

    @property
    def _sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows, columns = self.shape[::-1] if self.transposed else self.shape
        return {
            "matvec": ((columns,), (rows,)),
            "vecmat": ((rows,), (columns,)),
            "matmul": ((columns, self.width), (rows, self.width)),
        }[self.op]


_TITLE = re.compile(
    r"(?P<rows>\d+) x (?P<columns>\d+), (?P<op>matvec|vecmat|matmul)"
    r"(?P<width> square| \d+ columns)?(?P<turned> transposed)?(?P<by> by columns)?, (?P<format>.+)"
)


def titled(title: str) -> Product:
    """Return the product of a title; ValueError for words that are none."""
    found = _TITLE.fullmatch(title.strip())
    if found is None or found["format"] not in FORMATS:
        raise ValueError(
            f"{title!r} names no product; needed is rows, columns, operation and format as tables "
            "show them, such as '4096 x 4096, matvec, float16'."
        )
    width: int | None = BLOCK_COLUMNS
    if found["width"] is not None:
        width = None if found["width"] == " square" else int(found["width"].split()[0])
    shape = int(found["rows"]), int(found["columns"])
    turned, by_columns = (found[name] is not None for name in ("turned", "by"))
    return Product(found["op"], found["format"], shape, width, by_columns, turned)
