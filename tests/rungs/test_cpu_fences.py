"""Every CPU rung beside pages that nobody may read: it touches its operands and nothing else."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from fences import fenced
from forks import start_fork, status_of
from gemmule.core.problem import numpy_dtype
from gemmule.core.registry import all_rungs
from gemmule.core.rung import Rung
from products import OURS, small, wide
from quantized_products import make_matrix

RUNGS = [r for r in all_rungs("cpu") if r.folder != "grouped" and r.available() is None]
LIMITED = type(functools.lru_cache(maxsize=1)(len))
SIZES = ((5, 67, 3), (16, 133, 18))  # odd rows and columns, and what is left of every vector
GROUPS = ((4, 32, "float32"), (8, -1, "float16"))


def dense(rung: Rung) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield an operation, its operands in the order of calls, and the wide result."""
    rng = np.random.default_rng(7)
    for a, b, *_ in rung.signatures:
        for m, k, n in SIZES:
            A, B = small(rng, (m, k), a), small(rng, (k, n), b)
            for held in (A, np.asfortranarray(A)):
                if rung.op == "matmul":
                    yield "matmul", held, B, wide(A) @ wide(B)
                else:
                    yield "matvec", held, B[:, 0].copy(), wide(A) @ wide(B[:, 0])
                    x = small(rng, (m,), b)
                    yield "vecmat", x, held, wide(x) @ wide(A)


def coded(rung: Rung, at_end: bool) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the same beside codes, whose parts are fenced, too."""
    rng = np.random.default_rng(8)
    dtype = next(b for a, b, *_ in rung.signatures if a in ("uint4", "uint8"))
    for (bits, group, scales), (m, k, n) in [(g, s) for g in GROUPS for s in SIZES]:
        given = make_matrix(m, k, bits, group, scales, "integer")
        parts = {name: getattr(given, name) for name in ("codes", "scales", "zeros")}
        held = {name: fenced(part, at_end, 1) for name, part in parts.items()}
        Q = gm.QuantizedMatrix.from_parts(**held, shape=(m, k), bits=bits, group_size=group)
        assert np.shares_memory(Q.codes, held["codes"])
        for matrix in (Q, Q.T):
            B = rng.standard_normal((matrix.shape[1], n)).astype(numpy_dtype(dtype))
            B = B[:, 0].copy() if rung.op == "matvec" else B
            yield rung.op, matrix, B, matrix.dequantize().astype(np.float64) @ wide(B)


def forget() -> None:
    """Empty the caches of the package that may forget, and write over the memory they had."""
    for module in [one for name, one in sys.modules.items() if name.startswith("gemmule.")]:
        for one in vars(module).values():
            if type(one) is LIMITED and one.cache_info().maxsize:
                one.cache_clear()
    for size in range(1, 1024):  # NumPy keeps up to seven of a size that are freed
        _ = [np.full(size, 0xFF, np.uint8) for _ in range(8)]


def within_pages(rung: Rung, at_end: bool) -> None:
    calls: list[tuple[Callable[[], Any], Any]] = []
    for op, left, right, wanted in coded(rung, at_end) if rung.quantized else dense(rung):
        given = [fenced(x, at_end, 1) if type(x) is np.ndarray else x for x in (left, right)]
        activations = {"activations": "int8"} if "int8" in rung.name and rung.quantized else {}
        call = partial(OURS[op], *given, rung=rung.name, **activations)
        try:
            result = call()
        except ValueError as error:
            if "cannot compute" in str(error):
                continue
            raise
        size = np.abs(wanted).max() or 1.0
        assert np.abs(wide(result) - wanted).max() <= 0.05 * size, (op, left, right)
        calls.append((call, result))
    forget()
    for call, result in calls:  # the matrices are there still, and all that their products read
        assert np.array_equal(call(), result), call.keywords
    assert calls


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.folder}-{rung.name}")
def test_nothing_beyond_the_operands_is_read(rung: Rung) -> None:
    """In children, since they die where a kernel reads in front of an operand or behind it."""
    for at_end in (False, True):
        ended = status_of(start_fork(partial(within_pages, rung, at_end)))
        assert ended == 0, f"ended by {ended}, operands at a page's end: {at_end}"
