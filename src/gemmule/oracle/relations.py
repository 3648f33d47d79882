"""Judging products without their truth: what must hold between two of them, and Freivalds' check.

The truth of a product costs more than the product. Where a matmul has more than `MOST_PRODUCTS`
multiplications, its first, last and some other rows are judged in full, and all of it at once by
Freivalds' check. And a product of small integers, whatever its size, is repeated with its operands
rearranged: both results must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import COMPLEX, FLOAT8, INTEGERS, Problem
from gemmule.core.rung import Arithmetic, Params
from gemmule.oracle import judge as oracle
from gemmule.oracle import metamorphic
from gemmule.oracle.inputs import Inputs
from gemmule.oracle.metamorphic import Multiply

Array: TypeAlias = NDArray[Any]
Relation: TypeAlias = Callable[[Multiply, Array, Array], oracle.Verdict]

MOST_PRODUCTS = 1 << 22
FULL_ROWS = 8  # of a product that is too large for its truth, judged in full
REPEATED = 8  # one of so many products of integers is repeated, and every large one


def too_large(problem: Problem, kind: str = "integers") -> bool:
    """Tell whether a product is judged without its whole truth.

    Sums over a row of C cannot tell which of its elements are NaN or infinite, so operands of the
    kind ``nonfinite`` need the truth, whatever it costs.
    """
    if kind == "nonfinite":
        return False
    simple = problem.quant is None and problem.batch == 1 and problem.out not in COMPLEX
    return problem.op == "matmul" and simple and _products(problem) > MOST_PRODUCTS


def _products(problem: Problem) -> int:
    return problem.m * problem.n * problem.k


def judge_large(
    inputs: Inputs, arithmetic: Arithmetic, params: Params, out: Array
) -> oracle.Verdict:
    """Judge a product that is `too_large`: form, side effects, some rows in full, all at once."""
    case, problem = inputs.case, inputs.case.problem
    fault = oracle.form_or_side_effect(problem, inputs, out)
    if fault is not None:
        return fault
    rows = some_rows(problem.m, case.seed)
    part = replace(
        inputs, case=replace(case, problem=replace(problem, m=len(rows))), a=inputs.a[rows]
    )
    some = oracle.check(part, arithmetic, params, out[rows])
    if not some.ok:
        place = (int(rows[some.worst_index[0]]), *some.worst_index[1:])
        return replace(some, worst_index=place, text=f"{some.text} (of rows {rows.tolist()})")
    exact = case.kind == "integers" and (
        problem.out in INTEGERS or oracle.sums_are_exact(arithmetic, inputs)
    )
    whole = metamorphic.freivalds(inputs, arithmetic, params, out, exact=exact)
    return whole if not whole.ok or whole.ratio > some.ratio else some


def some_rows(count: int, seed: int) -> NDArray[np.int64]:
    """Return the first row, the last, and some between."""
    between = np.random.default_rng(seed).integers(0, count, FULL_ROWS - 2)
    return np.unique(np.concatenate([[0, count - 1], between]))


def is_repeated(inputs: Inputs, arithmetic: Arithmetic) -> bool:
    """Tell whether a product is repeated with its operands rearranged."""
    case = inputs.case
    if case.kind != "integers" or case.problem.quant is not None or inputs.out.size == 0:
        return False
    drawn = case.seed % REPEATED == 0 or too_large(case.problem)
    exact = case.problem.out in INTEGERS or oracle.sums_are_exact(arithmetic, inputs)
    return drawn and exact


def repeat(inputs: Inputs, multiply: Multiply) -> oracle.Verdict:
    """Judge a product by one of the relations that hold for it, drawn by the case's seed.

    multiply: computes it for any two matrices, a vector being one of a single column.
    """
    case = inputs.case
    known = list(_relations(case.problem))
    b = inputs.b[..., None] if case.problem.op == "matvec" else inputs.b
    return known[case.seed // REPEATED % len(known)](multiply, inputs.a, b)


def _relations(problem: Problem) -> Iterator[Relation]:
    yield metamorphic.view_is_copy
    yield metamorphic.rows_permute
    if problem.batch > 1:
        yield metamorphic.batch_is_loop
    if problem.op == "matmul" and problem.a == problem.b:
        yield metamorphic.transpose_swaps
    if not {problem.a, problem.b, problem.out} & {*FLOAT8, *INTEGERS}:
        yield metamorphic.scaling_is_exact
