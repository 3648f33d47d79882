"""Operand sets of a product: side by side on either device, made from random numbers on the host.

What a call reads has to come from memory, so every call in turn gets operands at other addresses.
How many sets that takes follows from their bytes; how many there are is bounded by the memory too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

import gemmule as gm
from gemmule.core.problem import numpy_dtype
from gemmule_lab.harness.products import FORMATS, Product

POOL = 1 << 22
Operands: TypeAlias = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class OperandSet:
    """A product's matrix, the vector or matrix it is multiplied with, and where the result goes."""

    a: Any
    b: Any
    out: Any

    def operands(self, op: str) -> Operands:
        """Return the operands in the public function's order."""
        return (self.b, self.a) if op == "vecmat" else (self.a, self.b)

    def canonical(self, op: str) -> Operands:
        """Return A and x or B as peers take them: ``x A`` is ``A^T x``."""
        return (self.a.T if op == "vecmat" else self.a), self.b


@dataclass(frozen=True, slots=True)
class Sets:
    """The operand sets of one product through which its calls rotate.

    cold: whether so many bytes pass between two uses of a set that every read comes from memory.
    options: of the public function. truths: what the oracle found of the first set, for the next
    rung that it judges there.
    """

    op: str
    items: Sequence[OperandSet]
    cold: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    truths: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def temperature(self) -> str:
        """``cold`` or ``warm``, as rows say it."""
        return "cold" if self.cold else "warm"

    def plan(self, rung: str | None = None, params: Mapping[str, Any] | None = None) -> gm.Plan:
        """Return the plan of the first set, by the automatic choice or a named rung."""
        operands = self.items[0].operands(self.op)
        made: gm.Plan = gm.plan(self.op, *operands, rung=rung, params=params, **self.options)
        return made


def drawn(
    shape: tuple[int, ...], rng: np.random.Generator, integers: bool = False, uniform: bool = False
) -> Any:
    """Return random normal (or uniform) float32 numbers, or integers of 8 bits in int64.

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
        pool = (rng.random if uniform else rng.standard_normal)(count, np.float32)
    if fresh:
        return pool.reshape(shape)
    matrix = np.empty(shape, pool.dtype)
    for row, start in zip(matrix, rng.integers(0, POOL, shape[0]), strict=True):
        row[:] = pool[start : start + width]
    return matrix


def in_format(values: Any, name: str, order: Literal["C", "F"] = "C") -> Any:
    """Return a matrix of numbers in a format, quantised where that is one of codes."""
    form = FORMATS[name]
    if form.bits is None:
        return values.astype(numpy_dtype(form.dtype), order=order, copy=False)
    return gm.quantize(values, form.bits, form.group_size, symmetric=form.group_size == -1)


def codes(rng: np.random.Generator, shape: tuple[int, int], bits: int) -> gm.QuantizedMatrix:
    """Return random codes with one scale and one zero point for the whole matrix."""
    rows, columns = shape
    packed = rng.integers(0, 256, (rows, -(-columns * bits // 8)), np.uint8)
    if bits == 4 and columns % 2:
        packed[:, -1] &= 0x0F
    scale, zero = np.full((1, 1), 2.0**-8, np.float32), np.full((1, 1), 2.0 ** (bits - 1), "f4")
    return gm.QuantizedMatrix.from_parts(
        packed, scale, zero, shape=shape, bits=bits, group_size=None
    )


def host_sets(
    product: Product, matrices: Sequence[Any], others: Sequence[Any], *, cold: bool
) -> Sets:
    """Return a set for each matrix as it is stored; the others take turns, each copied anew.

    Others come in any dtype and are given the format's own.
    """
    form = product.form
    dtype, out = numpy_dtype(form.dtype), numpy_dtype(form.out)
    order: Literal["C", "F"] = "F" if product.by_tokens else "C"
    items = [
        OperandSet(
            matrix.T if product.transposed else matrix,
            others[index % len(others)].astype(dtype, order),
            np.empty(product.out_shape, out, order),
        )
        for index, matrix in enumerate(matrices)
    ]
    return Sets(product.op, items, cold, form.options)
