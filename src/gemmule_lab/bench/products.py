"""One product of a suite made ready to be measured: its operands, and copies of them that rotate.

What a call reads has to come from memory, so every call in turn gets operands at other addresses.
How many sets that takes follows from their bytes; how many there are is bounded by the memory too.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

import gemmule as gm
from gemmule.core.memory import available_bytes
from gemmule.core.problem import numpy_dtype
from gemmule.core.registry import ladder
from gemmule_lab.bench.host import Bench, Beside, sets_needed
from gemmule_lab.bench.lanes import Operands, Sets
from gemmule_lab.bench.suites import BITS, PLAIN_INTEGERS, Product

GROUP_SIZE = 128
ONE_COLUMN = "gemmule on one column"
OPERANDS_SHARE = 1 / 4
"""Of the memory available: most that a product's operand sets take; peers take as much again."""
POOL = 1 << 22


@dataclass(slots=True)
class Maker:
    """Makes products one after another; matrices that the next one has too are made once.

    every_rung: time all rungs that take a product. cold_bytes: how many bytes have to pass between
    two uses of a set, as measured; None takes it from the cache that the system reports. Let go of
    a product before asking for the next, or both lie in memory at once.
    """

    every_rung: bool = False
    seed: int = 0
    cold_bytes: int | None = None
    _key: tuple[Any, ...] = ()
    _matrices: list[Any] = field(default_factory=list)
    _base_key: tuple[Any, ...] = ()
    _base: Any = None
    _plain_key: tuple[Any, ...] = ()
    _plain: list[Any] = field(default_factory=list)

    def bench(self, product: Product) -> Bench:
        """Return the product with its operand sets."""
        name, op = product.format, product.op
        wide = None  # what a user without the format would multiply
        if name in BITS:
            wide = "float32"
        elif name in ("plain int8", "plain int32"):
            wide = "int64"
        self._forget(product, wide)
        rng = np.random.default_rng(self.seed + 1)
        other = drawn(product.other_shape, rng, product.format in PLAIN_INTEGERS)
        room = int(available_bytes() * OPERANDS_SHARE)
        dtype = None if name in BITS else numpy_dtype(PLAIN_INTEGERS.get(name, name))
        matrices, cold = self._copies(self._matrices, lambda: self._matrix(product), room)
        sets = [in_order(op, matrix, _as(other, dtype)) for matrix in matrices]
        plain: Sets = ()
        if wide is not None:
            room = max(0, room - sum(int(matrix.nbytes) for matrix in matrices))
            floats, _ = self._copies(self._plain, lambda: self._wide(product, wide), room)
            plain = [in_order(op, matrix, _as(other, numpy_dtype(wide))) for matrix in floats]
        options = {"activations": "int8"} if name in BITS and name.endswith("x int8") else {}
        beside: tuple[Beside, ...] = ()
        if name in BITS and op == "matmul":
            column = [(a, b[:, 0].copy()) for a, b in sets]
            beside = (Beside(ONE_COLUMN, "matvec", column, options),)
        rungs: tuple[str | None, ...] = _rungs(op, sets[0]) if self.every_rung else (None,)
        return Bench(
            product.title,
            op,
            sets,
            "cold" if cold else "warm",
            plain,
            rungs,
            options=options,
            beside=beside,
            plain_peers=("numpy",),
        )

    def _forget(self, product: Product, wide: str | None) -> None:
        """Let go of what this product has no use for, before anything is made for it."""
        kind = BITS.get(product.format, product.format)
        key = (product.shape, kind, product.column_major)
        if key != self._key:
            self._key, self._matrices = key, []
        if (product.shape, wide) != self._plain_key:
            self._plain_key, self._plain = (product.shape, wide), []
        base_key = (product.shape, product.format in PLAIN_INTEGERS)
        if base_key != self._base_key:
            self._base_key, self._base = base_key, None

    def _values(self, product: Product) -> Any:
        """Return the matrix as drawn: normal float32, or small integers."""
        if self._base is None:
            integers = product.format in PLAIN_INTEGERS
            self._base = drawn(product.shape, np.random.default_rng(self.seed), integers)
        return self._base

    def _matrix(self, product: Product) -> Any:
        values = self._values(product)
        return in_format(values, product.format, "F" if product.column_major else "C")

    def _wide(self, product: Product, wide: str) -> Any:
        return self._values(product).astype(numpy_dtype(wide), copy=False)

    def _copies(self, kept: list[Any], make: Any, room: int) -> tuple[list[Any], bool]:
        """Return copies of a matrix, as many as it takes to read them cold, and whether it does."""
        if not kept:
            kept.append(make())
        turn = sets_needed(int(kept[0].nbytes), self.cold_bytes, room)
        del kept[turn.sets :]
        kept += [deepcopy(kept[0]) for _ in range(turn.sets - len(kept))]
        return list(kept), turn.cold


def drawn(shape: tuple[int, ...], rng: np.random.Generator, integers: bool = False) -> Any:
    """Return random normal float32 numbers, or integers of 8 bits in int64.

    The rows of a large matrix are stretches of one pool of numbers, each from a place of its own:
    drawing every number anew would take longer than measuring.
    """
    size = int(np.prod(shape))
    width = shape[-1]
    fresh = size <= 2 * POOL or width > POOL // 2
    count = size if fresh else POOL + width
    pool: Any
    if integers:
        pool = rng.integers(-128, 128, count, np.int64)
    else:
        pool = rng.standard_normal(count, np.float32)
    if fresh:
        return pool.reshape(shape)
    matrix = np.empty(shape, pool.dtype)
    for row, start in zip(matrix, rng.integers(0, POOL, shape[0]), strict=True):
        row[:] = pool[start : start + width]
    return matrix


def _as(other: Any, dtype: Any) -> Any:
    """Return a copy of its own, in the format's dtype; quantised matrices meet float32."""
    return other.copy() if dtype is None else other.astype(dtype)


def in_format(values: Any, name: str, order: Literal["C", "F"] = "C") -> Any:
    """Return a matrix in a format of the suites; quantised ones in groups of 128 columns."""
    if name in BITS:
        return gm.quantize(values, bits=BITS[name], group_size=GROUP_SIZE)
    return values.astype(numpy_dtype(PLAIN_INTEGERS.get(name, name)), order=order, copy=False)


def in_order(op: str, matrix: Any, other: Any) -> Operands:
    """Return the operands in the public function's order."""
    return (other, matrix) if op == "vecmat" else (matrix, other)


def _rungs(op: str, operands: Operands) -> tuple[str | None, ...]:
    """Return the rungs of the CPU ladder that take these operands as they are."""
    problem = gm.plan(op, *operands).problem
    folder = "quantized" if problem.quant is not None else op
    takers = [rung.name for rung in ladder(folder, "cpu") if rung.refusal(problem) is None]
    return tuple(dict.fromkeys(takers))
