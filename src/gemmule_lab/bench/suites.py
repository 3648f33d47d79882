"""Named sets of products to measure, on a CPU and on a GPU: operation, shape, format; as data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemmule_lab.harness.products import FLOATS, OPS, Product


@dataclass(frozen=True, slots=True)
class Suite:
    """What a suite measures.

    every_rung: all rungs of the ladder that take the problem, not the automatic choice alone;
    rungs: on a GPU those to time, by name, None being the automatic choice. peers: on a GPU those
    that run beside ours unless others are asked for; on a CPU all do. host_cost: time
    what one call costs the host, whatever the products. name: what it is asked for by. warm: on a
    GPU over one operand set, which stays in the L2 where it fits.
    """

    title: str
    products: tuple[Product, ...]
    every_rung: bool = False
    peers: tuple[str, ...] = ("torch",)
    rungs: tuple[str | None, ...] = (None,)
    host_cost: bool = False
    name: str = ""
    warm: bool = False


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


_CODES = ("int8", "int4", "int8 x int8", "int4 x int8")
_VECTORS = ("matvec", "vecmat")
_LARGE = _squares(4096, 8192, 16384)
_CPU = (
    *_grid(_VECTORS, FLOATS, _LARGE),
    *_grid(_VECTORS, ("float64", "float32"), _LARGE[:2], column_major=True),
    *_grid(_VECTORS, ("int8", "int4"), _LARGE),
    *_grid(("matvec",), ("int8 x int8", "int4 x int8"), _LARGE),
    *_grid(("matmul",), _CODES, _LARGE[:2], columns=16),
    *_grid(
        ("matmul",),
        ("float16", "plain int8", "plain int32", "plain int64"),
        _squares(384),
        columns=None,
    ),
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
    "cpu": Suite("what a CPU is judged by", _CPU),
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

_EIGHT_BITS = tuple(
    Product("matmul", name, (rows, columns), width)
    for rows, columns, width in (
        *((n, n, None) for n in (1024, 2048, 4096, 8192)),
        *((8192, 8192, width) for width in (16, 64, 128, 1024)),
        (4093, 4093, None),  # which TMA cannot read
    )
    for name in ("plain int8", "float8")
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


def _by_columns(
    name: str, shape: tuple[int, int], *widths: int, transposed: bool = False
) -> tuple[Product, ...]:
    """Return the products of codes and float16 scales by so many columns of bfloat16 each."""
    form = f"{name} x bfloat16, scales float16"
    return tuple(
        Product("matmul", form, shape, width, transposed=transposed)
        if width > 1
        else Product("matvec", form, shape)
        for width in widths
    )


_MANY = (32, 64, 128, 256, 512, 1024, 4096)
_WIDE, _TALL = (8192, 8192), (28672, 8192)  # a square, and a layer of a language model
_REPLACED = (
    *(p for shape in (_WIDE, _TALL) for p in _by_columns("int4 g128", shape, *_MANY)),
    *(p for shape in (_WIDE, _TALL) for p in _by_columns("int8 g128", shape, 64, 128, 256, 4096)),
    *_by_columns("int4 g32", _WIDE, 32, 64, 128, 512, 4096),
    *_by_columns("int4 g128", _WIDE, 32, 64, 128, 512, 4096, transposed=True),
    *(p for size in (4096, 8192, 16384) for p in _by_columns("int4 g128", (size, size), 1, 16)),
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
    "complex": Suite(
        "complex numbers",
        tuple(
            Product(op, name, (size, size), None)
            for name in ("complex64", "complex128")
            for op in OPS
            for size in (1024, 2048, 4096)
        ),
    ),
    "bytes": Suite(
        "matrices of int8 and of float8, beside PyTorch's products of them",
        _EIGHT_BITS,
        peers=("torch int_mm", "torch scaled_mm"),
    ),
    "doubles": Suite(
        "matrices of float64 by residues, beside PyTorch's",
        _grid(("matmul",), ("float64",), _POWERS[1:], columns=None),
        rungs=("residues",),
    ),
    "quantised": Suite(
        "int4 and int8 weights by 1 to 16 columns, beside PyTorch's packed products",
        _QUANTISED,
        peers=("torch int4pack", "torch int8pack"),
    ),
    "replaced": Suite(
        "int4 and int8 weights by up to 4096 columns, beside the floats that they replace",
        _REPLACED,
    ),
    "host": Suite(
        "what one call costs the host", (Product("matvec", "float32", (64, 64)),), host_cost=True
    ),
}


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
