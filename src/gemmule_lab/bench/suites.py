"""Named sets of products to measure, on a CPU and on a GPU: operation, shape, format; as data."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemmule.core.words import Bits
from gemmule_lab.report.targets import CPU_BARS, Bar

OPS = ("matvec", "vecmat", "matmul")
FLOATS = ("float64", "float32", "float16", "bfloat16")
BITS: dict[str, Bits] = {"int8": 8, "int4": 4, "int8 x int8": 8, "int4 x int8": 4}
"""Quantised formats; ``x int8`` permits activations of 8 bits."""
PLAIN_INTEGERS = {"plain int8": "int8", "plain int32": "int32", "plain int64": "int64"}
BLOCK_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Coded:
    """A quantised format on a GPU: width of the codes, columns of a group, dtype of the vectors.

    group_size: -1 for a whole row. Weights in groups have zero points, those by rows have none.
    """

    bits: Bits
    group_size: int
    dtype: str


CODED: Mapping[str, Coded] = {
    f"{name} {'rows' if group == -1 else f'g{group}'} x {dtype}": Coded(BITS[name], group, dtype)
    for name, group, dtype in itertools.product(
        ("int4", "int8"), (32, 64, 128, 256, -1), ("bfloat16", "float16", "float32")
    )
}
"""Quantised formats of the GPU's suites."""


@dataclass(frozen=True, slots=True)
class Product:
    """One thing to measure. shape: rows and columns of the matrix.

    columns: of a matmul's right operand; None makes it square. column_major: the matrix lies by
    columns.
    """

    op: str
    format: str
    shape: tuple[int, int]
    columns: int | None = BLOCK_COLUMNS
    column_major: bool = False

    @property
    def title(self) -> str:
        """The product in words: shape, operation, format."""
        words = self.op
        if self.op == "matmul" and self.columns != BLOCK_COLUMNS:
            words += " square" if self.columns is None else f" {self.columns} columns"
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
    def other_shape(self) -> tuple[int, ...]:
        """The shape of the vector or of the right-hand matrix."""
        rows, columns = self.shape
        return {"matvec": (columns,), "vecmat": (rows,), "matmul": (columns, self.width)}[self.op]


@dataclass(frozen=True, slots=True)
class Suite:
    """What a suite measures, and the bars that its rows are held against.

    every_rung: all rungs of the ladder that take the problem, not the automatic choice alone;
    rungs: on a GPU those to time, by name, None being the automatic choice. peers: on a GPU those
    that run beside ours unless others are asked for; on a CPU all do. host_cost: time
    what one call costs the host, whatever the products. name: what it is asked for by.
    """

    title: str
    products: tuple[Product, ...]
    every_rung: bool = False
    bars: tuple[Bar, ...] = ()
    peers: tuple[str, ...] = ("torch",)
    rungs: tuple[str | None, ...] = (None,)
    host_cost: bool = False
    name: str = ""


def _squares(*sizes: int) -> tuple[tuple[int, int], ...]:
    return tuple((size, size) for size in sizes)


def _grid(
    ops: Sequence[str], formats: Sequence[str], shapes: Sequence[tuple[int, int]], **more: Any
) -> tuple[Product, ...]:
    """Return every combination, the shapes in the outer loop."""
    return tuple(
        Product(op, name, shape, **more)
        for shape, name, op in itertools.product(shapes, formats, ops)
    )


_VECTORS = ("matvec", "vecmat")
_LARGE = _squares(4096, 8192, 16384)
_CPU = (
    *_grid(_VECTORS, FLOATS, _LARGE),
    *_grid(_VECTORS, ("float64", "float32"), _LARGE[:2], column_major=True),
    *_grid(_VECTORS, ("int8", "int4"), _LARGE),
    *_grid(("matvec",), ("int8 x int8", "int4 x int8"), _LARGE),
    *_grid(("matmul",), tuple(BITS), _LARGE[:2], columns=16),
    *_grid(("matmul",), ("float16", *PLAIN_INTEGERS), _squares(384), columns=None),
)

_LADDER = (
    *_grid(_VECTORS, ("float32", "float16"), _squares(2048)),
    *_grid(("matmul",), ("float32", "float16", "plain int8"), _squares(512), columns=None),
    *_grid(_VECTORS, ("int8", "int4"), _squares(2048)),
    *_grid(("matmul",), ("int8", "int4"), _squares(2048), columns=16),
)

SUITES: Mapping[str, Suite] = {
    "quick": Suite(
        "a first look", _grid(OPS, ("float32", "float16", "int4"), _squares(1024, 4096))
    ),
    "cpu": Suite("every bar for a CPU", _CPU, bars=CPU_BARS),
    "sizes": Suite(
        "sizes and formats",
        _grid(OPS, (*FLOATS, "int8", "int4"), _squares(64, 256, 384, 512, 1024, 2048, 4096, 8192)),
    ),
    "model": Suite(
        "layers of a language model of 7 billion weights",
        _grid(
            ("matvec", "matmul"),
            ("float32", "float16", "bfloat16", "int8", "int4"),
            ((4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096)),
        ),
    ),
    "ladder": Suite("every rung", _LADDER, every_rung=True),
}

_HALVES_FIRST = ("float16", "bfloat16", "float32", "float64")
_POWERS = _squares(512, 1024, 2048, 4096, 8192, 16384)
_MATVEC_SHAPES = (
    *_POWERS,
    (65536, 1024),
    (262144, 128),  # tall
    (1024, 65536),
    (128, 262144),  # wide
    (4095, 4095),
    (8191, 1025),  # odd: no row but the first is aligned
    (4096, 14336),
    (2112, 7168),
    (152064, 3584),  # layers of language models
)
_MATMUL_SHAPES = (
    *((n, n, None) for n in (512, 1024, 2048, 4096, 8192)),
    (4096, 4096, 16),
    (8192, 8192, 128),  # few columns
    (1000, 3000, 2000),
    (1023, 1025, 1027),  # no multiple of a tile; odd
    (16384, 1024, 2048),
    (1024, 16384, 2048),
)
_MATMUL = tuple(
    Product("matmul", dtype, (rows, columns), width)
    for rows, columns, width in _MATMUL_SHAPES
    for dtype in ("bfloat16", "float16", "float32", "float64")
)

_WIDTHS = {
    f"int4 g{group} x bfloat16": (1, 2, 4, 8, 16) if group == 128 else (1, 4, 16)
    for group in (32, 64, 128, 256)
}
_QUANTISED = (
    *(
        Product("matmul", name, shape, width) if width > 1 else Product("matvec", name, shape)
        for shape in _LARGE
        for name, widths in _WIDTHS.items()
        for width in widths
    ),
    *_grid(("matvec", "vecmat"), ("int4 g128 x float16", "int8 g128 x float16"), _LARGE),
    *_grid(("matvec",), ("int8 rows x bfloat16",), _LARGE),
    *_grid(("matmul",), ("int8 g128 x float16",), _LARGE, columns=16),
)

CUDA_SUITES: Mapping[str, Suite] = {
    "quick": Suite(
        "a first look", _grid(_VECTORS, ("float16", "float32"), _squares(1024, 4096, 8192))
    ),
    "matvec": Suite(
        "60 matrices, each by a vector from either side",
        _grid(_VECTORS, _HALVES_FIRST, _MATVEC_SHAPES),
    ),
    "chained": Suite(
        "each call begun before the one in front of it has ended, and the same in turn",
        _grid(("matvec",), _HALVES_FIRST, (*_POWERS, (2112, 7168), (4096, 14336))),
        rungs=("streamed_rows", "early_rows"),
    ),
    "matmul": Suite("matrices by matrices", _MATMUL),
    "quantised": Suite(
        "int4 and int8 weights by 1 to 16 columns, beside PyTorch's packed products",
        _QUANTISED,
        peers=("torch int4pack", "torch int8pack"),
    ),
    "host": Suite(
        "what one call costs the host", (Product("matvec", "float32", (64, 64)),), host_cost=True
    ),
}


_TITLE = re.compile(
    r"(?P<rows>\d+) x (?P<columns>\d+), (?P<op>matvec|vecmat|matmul)"
    r"(?P<width> square| \d+ columns)?(?P<by> by columns)?, (?P<format>.+)"
)


def titled(title: str) -> Product:
    """Return the product of a title; ValueError for words that are none."""
    found = _TITLE.fullmatch(title.strip())
    if found is None or found["format"] not in (*FLOATS, *BITS, *PLAIN_INTEGERS, *CODED):
        raise ValueError(
            f"{title!r} names no product; needed is rows, columns, operation and format as tables "
            "show them, such as '4096 x 4096, matvec, float16'."
        )
    width: int | None = BLOCK_COLUMNS
    if found["width"] is not None:
        width = None if found["width"] == " square" else int(found["width"].split()[0])
    shape = int(found["rows"]), int(found["columns"])
    return Product(found["op"], found["format"], shape, width, found["by"] is not None)


def narrowed(
    suite: Suite, ops: Sequence[str], formats: Sequence[str], sizes: Sequence[int]
) -> Suite:
    """Return the suite's products of the given operations and formats.

    `sizes`, where given, replace the shapes of the suite by squares; the other products of a shape
    stay as they are. ValueError when nothing is left.
    """
    kept = [
        product
        for product in suite.products
        if (not ops or product.op in ops) and (not formats or product.format in formats)
    ]
    if sizes:
        kept = [replace(p, shape=shape) for shape in _squares(*sizes) for p in kept]
    if not kept:
        raise ValueError("the suite has no product of these operations and formats.")
    return replace(suite, products=tuple(dict.fromkeys(kept)))
