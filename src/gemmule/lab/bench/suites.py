"""Named sets of products to measure: operation, shape, format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemmule.lab.bench.host import Bench
from gemmule.lab.bench.products import (
    BITS,
    FLOATS,
    FORMATS,
    ONE_COLUMN,
    PLAIN_INTEGERS,
    Maker,
    Product,
)
from gemmule.lab.report.targets import CPU_BARS, Bar

__all__ = ["FORMATS", "ONE_COLUMN", "SUITES", "Product", "Suite", "benches", "narrowed"]

OPS = ("matvec", "vecmat", "matmul")


@dataclass(frozen=True, slots=True)
class Suite:
    """What a suite measures, and the bars that its rows are held against.

    every_rung: all rungs of the ladder that take the problem, not the automatic choice alone.
    """

    title: str
    products: tuple[Product, ...]
    every_rung: bool = False
    bars: tuple[Bar, ...] = ()


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


def benches(suite: Suite, seed: int = 0, cold_bytes: int | None = None) -> Iterator[Bench]:
    """Yield the products of a suite, operands made when each is asked for.

    Memory is bounded only if the caller lets go of a product before asking for the next.
    """
    maker = Maker(suite.every_rung, seed, cold_bytes)
    for product in suite.products:
        yield maker.bench(product)
