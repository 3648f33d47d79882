"""Named sets of products to measure: operation, shape, format; operands are made lazily."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.lab.bars import CPU_BARS, Bar
from gemmule.lab.bench import Bench, Beside, Operands, Sets, sets_needed
from gemmule.problem import numpy_dtype
from gemmule.rung import ladder

OPS = ("matvec", "vecmat", "matmul")
FLOATS = ("float64", "float32", "float16", "bfloat16")
BITS = {"int8": 8, "int4": 4, "int8 x int8": 8, "int4 x int8": 4}
"""Quantised formats, in groups of `GROUP_SIZE`; ``x int8`` permits activations of 8 bits."""
PLAIN_INTEGERS = {"plain int8": "int8", "plain int32": "int32", "plain int64": "int64"}
FORMATS = (*FLOATS, *BITS, *PLAIN_INTEGERS)
GROUP_SIZE = 128
BLOCK_COLUMNS = 64
ONE_COLUMN = "gemmule on one column"


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
            ("matvec", "matmul"), ("float32", "float16", "bfloat16", "int8", "int4"),
            ((4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096)),
        ),
    ),
    "ladder": Suite("every rung", _LADDER, every_rung=True),
}  # fmt: skip


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


def benches(suite: Suite, seed: int = 0) -> Iterator[Bench]:
    """Yield the products of a suite, operands made when each is asked for."""
    for product in suite.products:
        yield _bench(product, suite.every_rung, seed)


def _bench(product: Product, every_rung: bool, seed: int) -> Bench:
    rng = np.random.default_rng(seed)
    name, op = product.format, product.op
    values = _values(product, rng)
    sets, temperature = _sets(op, _operands(product, *values))
    options = {"activations": "int8"} if name in BITS and name.endswith("x int8") else {}
    plain: Sets = ()
    beside: tuple[Beside, ...] = ()
    if name in BITS:
        plain, _ = _sets(op, _in_order(op, *values))
    elif name in ("plain int8", "plain int32"):
        plain, _ = _sets(op, _in_order(op, *(v.astype(np.int64) for v in values)))
    if name in BITS and op == "matmul":
        beside = (Beside(ONE_COLUMN, "matvec", [(a, b[:, 0].copy()) for a, b in sets], options),)
    rungs: tuple[str | None, ...] = _rungs(op, sets[0]) if every_rung else (None,)
    return Bench(
        product.title, op, sets, temperature, plain, rungs, options=options, beside=beside,
        plain_peers=("numpy",),
    )  # fmt: skip


def _values(product: Product, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return matrix and other operand in float32; as integers for the integer formats."""
    rows, columns = product.shape
    width = columns if product.columns is None else product.columns
    size = {"matvec": (columns,), "vecmat": (rows,), "matmul": (columns, width)}[product.op]
    if product.format in PLAIN_INTEGERS:
        return tuple(rng.integers(-128, 128, s, np.int64) for s in (product.shape, size))  # type: ignore[return-value]
    return tuple(rng.standard_normal(s, np.float32) for s in (product.shape, size))  # type: ignore[return-value]


def _operands(product: Product, matrix: Any, other: Any) -> Operands:
    """Return the operands in the format, in the public function's order."""
    name = product.format
    if name in BITS:
        return _in_order(
            product.op, gm.quantize(matrix, bits=BITS[name], group_size=GROUP_SIZE), other
        )
    dtype = numpy_dtype(PLAIN_INTEGERS.get(name, name))
    order: Any = "F" if product.column_major else "C"
    return _in_order(product.op, matrix.astype(dtype, order=order), other.astype(dtype))


def _in_order(op: str, matrix: Any, other: Any) -> Operands:
    return (other, matrix) if op == "vecmat" else (matrix, other)


def _sets(op: str, first: Operands) -> tuple[Sets, str]:
    """Return as many copies of the operands as it takes to read them cold, and ``cold``/``warm``.

    What matters to the memory is that every set has addresses of its own.
    """
    turn = sets_needed(sum(int(operand.nbytes) for operand in first))
    sets = [first, *(_copy(*first) for _ in range(turn.sets - 1))]
    return sets, "cold" if turn.cold else "warm"


def _copy(left: Any, right: Any) -> Operands:
    return _copy_of(left), _copy_of(right)


def _copy_of(operand: Any) -> Any:
    if not isinstance(operand, gm.QuantizedMatrix):
        return operand.copy(order="K")
    zeros = None if operand.zeros is None else operand.zeros.copy()
    return gm.QuantizedMatrix.from_parts(
        operand.codes.copy(), operand.scales.copy(), zeros, shape=operand.shape, bits=operand.bits,
        group_size=operand.group_size,
    )  # fmt: skip


def _rungs(op: str, operands: Operands) -> tuple[str | None, ...]:
    """Return the rungs of the CPU ladder that take these operands as they are."""
    problem = gm.plan(op, *operands).problem
    folder = "quantized" if problem.quant is not None else op
    takers = [rung.name for rung in ladder(folder, "cpu") if rung.refusal(problem) is None]
    return tuple(dict.fromkeys(takers))
