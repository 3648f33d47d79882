"""Operands and result anywhere in one block: refused exactly where the result shares memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmule as gm

BYTES = 1600
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {  # of the operands, and of the result
    "matvec": ((6, 8), (8,), (6,)),
    "vecmat": ((6,), (6, 8), (8,)),
    "matmul": ((6, 8), (8, 5), (6, 5)),
    "grouped_matmul": ((6, 8), (3, 8, 5), (3,), (6, 5)),
}


def views(rng: random.Random, shapes: tuple[tuple[int, ...], ...], dtype: str) -> list[Any]:
    """Return arrays of these shapes at random places of one block of memory."""
    block = np.random.default_rng(rng.randrange(10**6)).standard_normal(BYTES // 8).astype("f8")
    memory = block.astype(dtype).view("u1")
    found = []
    for shape in shapes:
        step = np.dtype(dtype).itemsize
        first = rng.randrange((len(memory) - step * int(np.prod(shape))) // step) * step
        found.append(np.ndarray(shape, dtype, memory, first))
    return found


def ways(op: str, operands: list[Any]) -> list[Callable[[Any], Any]]:
    """Return the calls that take an `out`: by function and by plans, which are faster when met."""
    plan = gm.plan(op, *operands)
    others = [lambda out: gm.gemv(*operands, out)] if op == "matvec" else []
    others += [lambda out: gm.gemm(*operands, out)] if op == "matmul" else []
    return [
        lambda out: getattr(gm, op)(*operands, out=out),
        lambda out: plan(*operands, out=out),
        lambda out: plan(*operands, out=out),
        *others,
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", SHAPES)
def test_a_result_is_refused_exactly_where_it_shares_memory(op: str, dtype: str) -> None:
    rng, refused = random.Random(f"{op} {dtype}"), [0] * 4
    for _ in range(60):
        *operands, out = views(rng, SHAPES[op], dtype)
        if op == "grouped_matmul":
            ends = np.sort(np.array([rng.randint(0, 6) for _ in range(2)] + [6], np.int32))
            # Of another dtype, so in memory of their own, but for the times that the result is it.
            operands[2] = ends if rng.random() < 0.8 else out.view("i4").reshape(-1)[:3]
            operands[2][:] = ends
        shared = [np.shares_memory(out, one) for one in operands]
        kept = [one.copy() for one in operands]
        wanted = getattr(gm, op)(*kept)
        for call in ways(op, operands):
            if any(shared):
                with pytest.raises(ValueError, match="overlaps an input"):
                    call(out)
            else:
                np.testing.assert_array_equal(call(out), wanted)
            for one, before in zip(operands, kept, strict=True):
                np.testing.assert_array_equal(one, before)
        refused = [n + one for n, one in zip(refused, [*shared, not any(shared)], strict=False)]
    assert all(refused[: len(SHAPES[op])]), "each operand is met, and none of them"


# Of operands of different dtypes: each one's shape, dtype and least and greatest integer, the
# result's, and the call.
Mixed = tuple[tuple[tuple[tuple[int, ...], str, tuple[int, int] | None], ...], Callable[..., Any]]
MIXED: dict[str, Mixed] = {
    "scaled": (
        (
            ((6, 8), "i1", (-128, 127)),
            ((8, 5), "i1", (-128, 127)),
            ((6,), "f4", None),
            ((5,), "f4", None),
            ((6, 5), "f4", None),
        ),
        lambda a, b, rows, columns, out: gm.matmul(a, b, scale_a=rows, scale_b=columns, out=out),
    ),
    "routed": (
        (
            ((6, 8), "f4", None),
            ((3, 8, 5), "f4", None),
            ((6, 2), "i4", (0, 2)),
            ((6, 2), "f4", None),
            ((6, 5), "f4", None),
        ),
        lambda a, w, indices, weights, out: gm.grouped_matmul(
            a, w, indices=indices, weights=weights, out=out
        ),
    ),
}


def placed(rng: random.Random, op: str) -> list[Any]:
    """Return the arrays of a call side by side in one block of floats, and a result anywhere."""
    draw = np.random.default_rng(rng.randrange(10**6))
    block, first, found = draw.standard_normal(600, "f4"), 0, []
    *operands, (shape, dtype, _) = MIXED[op][0]
    for form, kind, bounds in operands:
        one = np.ndarray(form, kind, block, 4 * first)
        first += 4 + -(-one.nbytes // 4)
        if bounds is not None:
            one[...] = draw.integers(*bounds, form, endpoint=True)
        found.append(one)
    return [*found, np.ndarray(shape, dtype, block, 4 * rng.randrange(first))]


@pytest.mark.parametrize("op", MIXED)
def test_a_result_that_shares_memory_with_scales_or_weights_is_refused(op: str) -> None:
    rng, call = random.Random(op), MIXED[op][1]
    met = [0] * len(MIXED[op][0])
    for _ in range(80):
        *operands, out = placed(rng, op)
        shared = [np.shares_memory(out, one) for one in operands]
        kept = [one.copy() for one in operands]
        if any(shared):
            with pytest.raises(ValueError, match="overlaps an input"):
                call(*operands, out)
        else:
            wanted = call(*kept, np.empty_like(out))
            np.testing.assert_array_equal(call(*operands, out), wanted)
        for one, before in zip(operands, kept, strict=True):
            np.testing.assert_array_equal(one, before)
        met = [n + one for n, one in zip(met, [*shared, not any(shared)], strict=True)]
    assert all(met), f"each operand is met, and none of them: {met}"
