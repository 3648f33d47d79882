"""Compile ahead what default choices need: one product of each kind, and all that it compiles.

Kernels are compiled where they are first needed, and kept on disk (`gemmule.backends.cpu.jit_cache`
for the CPU, `gemmule.backends.cuda.nvrtc` for GPUs). An image of a container, or a server before it
takes requests, has that done by one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from gemmule import asarray, matmul, matvec, quantize, vecmat
from gemmule.core.problem import numpy_dtype
from gemmule.core.waiting import ahead

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8")
BITS: tuple[Literal[4, 8], ...] = (4, 8)
_HALVES_AND_FLOAT = ("float32", "float16", "bfloat16")
# At these sizes the choices of some machines change, and with them what is compiled.
_MATRICES = ((8, 8), (64, 64), (384, 384), (1024, 1024), (2048, 4096), (64, 8192))
_PRODUCTS = ((8, 8, 8), (64, 64, 64), (256, 256, 256), *((1024, 1024, n) for n in (2, 4, 8, 32)))
_GROUPS = (32, 64, 128, -1)
_COLUMNS = (2, 4, 8, 16, 32, 64, 512)
_SIDE = 1024  # of quantised matrices


class Warmed(NamedTuple):
    """One kind of product that was computed: in words, its function and its operands."""

    words: str
    product: Any
    operands: tuple[Any, ...]
    options: dict[str, str]


def warm(
    dtypes: tuple[str, ...] = DTYPES,
    bits: tuple[Literal[4, 8], ...] = BITS,
    device: str | None = None,
) -> Iterator[Warmed]:
    """Compute a product of each kind, so that what default choices need of it is compiled and kept.

    dtypes : of both operands, some of `DTYPES`. bits : of quantised matrices, some of `BITS`.
    device : ``"cuda"`` or ``"cuda:1"`` for a GPU; None for the CPU. The results are dropped; what
    was computed is told product by product. Other names: ValueError. Raises as products do.

    >>> from gemmule_lab.warming import warm
    >>> sum(1 for _ in warm(dtypes=("float32",), bits=())) > 10
    True
    """
    for one in products(dtypes, bits):
        with ahead():
            one.product(*(_placed(o, device) for o in one.operands), **one.options)
        yield one


def products(dtypes: tuple[str, ...], bits: tuple[Literal[4, 8], ...]) -> Iterator[Warmed]:
    """Yield the products that `warm` computes; their operands are made one by one."""
    unknown = [str(one) for one in (*dtypes, *bits) if one not in (*DTYPES, *BITS)]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} cannot be warmed; there are {(*DTYPES, *BITS)}.")
    for dtype in dtypes:
        yield from _of_vectors(dtype)
        yield from _of_matrices(dtype)
    for count, group, symmetric in itertools.product(bits, _GROUPS, (False, True)):
        yield from _quantised(count, group, symmetric)


def _of_vectors(dtype: str) -> Iterator[Warmed]:
    for (m, n), turned in itertools.product(_MATRICES, (False, True)):
        A = _numbers((m, n), dtype, turned)
        words = f"{dtype} {m} x {n}{' in columns' if turned else ''}"
        yield Warmed(f"matvec {words}", matvec, (A, _numbers((n,), dtype)), {})
        yield Warmed(f"vecmat {words}", vecmat, (_numbers((m,), dtype), A), {})


def _of_matrices(dtype: str) -> Iterator[Warmed]:
    for (m, k, n), left, right in itertools.product(_PRODUCTS, (False, True), (False, True)):
        A, B = _numbers((m, k), dtype, left), _numbers((k, n), dtype, right)
        yield Warmed(f"matmul {dtype} {m} x {k} x {n}", matmul, (A, B), {})


def _quantised(bits: Literal[4, 8], group: int, symmetric: bool) -> Iterator[Warmed]:
    W = np.random.default_rng(0).standard_normal((_SIDE, _SIDE), dtype=np.float32)
    Q = quantize(W, bits=bits, group_size=group, symmetric=symmetric)
    of = f"{bits}-bit weights in groups of {group}"
    for dtype in _HALVES_AND_FLOAT:
        x = _numbers((_SIDE,), dtype)
        yield Warmed(f"vecmat {of}, {dtype}", vecmat, (x, Q), {})
        for options in ({}, {"activations": "int8"}):
            yield Warmed(f"matvec {of}, {dtype}", matvec, (Q, x), options)
            for n in _COLUMNS:
                X = _numbers((_SIDE, n), dtype)
                yield Warmed(f"matmul {of}, {n} columns of {dtype}", matmul, (Q, X), options)


def _numbers(shape: tuple[int, ...], dtype: str, turned: bool = False) -> Any:
    made = np.ones(shape, numpy_dtype(dtype))
    return np.asfortranarray(made) if turned else made


def _placed(operand: Any, device: str | None) -> Any:
    if device is None:
        return operand
    return (
        asarray(operand, device=device) if isinstance(operand, np.ndarray) else operand.to(device)
    )
