"""Checks without a reference: products against rearranged ones, and Freivalds' check."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import oracle_mutants as mutants
from gemmule.core.problem import INTEGERS
from gemmule.oracle import exact as exact_sums
from gemmule.oracle import metamorphic as checks
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.judge import tolerance
from gemmule.oracle.problems import make_problem
from gemmule.oracle.truth import reference
from oracle_mutants import F32, arithmetic, correct, rounded


def _broken_at_batch(a: Any, b: Any) -> Any:
    c = a @ b
    return c + 1 if c.ndim == 3 else c


def _order_by_contiguity(a: Any, b: Any) -> Any:
    return a @ b if a.flags.c_contiguous else (a @ b) * np.float32(1.0000001)


def _not_linear(a: Any, b: Any) -> Any:
    return (a.astype(np.float32) @ b + np.float32(1e-3)).astype(a.dtype)


def _by_row(a: Any, b: Any) -> Any:
    return a @ b + np.arange(a.shape[-2], dtype=a.dtype)[:, None]


def test_metamorphic_checks_pass_and_kill() -> None:
    problem = make_problem("matmul", 6, 7, 9, F32, batch=3)
    inputs = make_inputs(problem, "integers", 1, "strided")
    a, b = inputs.a, inputs.b
    for run in (
        checks.batch_is_loop,
        checks.view_is_copy,
        checks.transpose_swaps,
        checks.rows_permute,
        checks.scaling_is_exact,
    ):
        assert run(np.matmul, a, b).ok
    assert checks.rows_permute(lambda m, x: m @ x, a[0], b[0, :, 0]).ok
    for run, broken in (
        (checks.batch_is_loop, _broken_at_batch),
        (checks.view_is_copy, _order_by_contiguity),
        (checks.transpose_swaps, _by_row),
        (checks.rows_permute, _by_row),
        (checks.scaling_is_exact, _not_linear),
        (
            checks.view_is_copy,
            lambda m, x: (m @ x).astype(np.float64 if m.strides[-1] > 4 else "f"),
        ),
    ):
        verdict = run(broken, a, b)
        assert not verdict.ok, (run, verdict)
        assert verdict.kind == "metamorphic"


def test_transpose_within_twice_the_bound() -> None:
    problem = make_problem("matmul", 33, 34, 65, F32)
    inputs = make_inputs(problem, "normal", 2)
    truth = reference(problem, inputs.a, inputs.b)
    slack = 2 * tolerance(problem, arithmetic(problem), {}, truth)

    def sloppy(a: Any, b: Any) -> Any:
        return np.matmul(a, b) if a.shape[0] == 33 else rounded(a, "tf32") @ b

    assert checks.transpose_swaps(np.matmul, inputs.a, inputs.b, slack).ok
    assert not checks.transpose_swaps(sloppy, inputs.a, inputs.b, slack).ok
    poisoned = checks.transpose_swaps(lambda a, b: a @ b * np.nan, inputs.a, inputs.b, slack)
    assert not poisoned.ok


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "int8", "int64"])
def test_freivalds_passes_and_kills(name: str) -> None:
    out = {"int8": "int32"}.get(name, name)
    problem = make_problem("matmul", 150, 160, 170, (name, name, out))
    promise = arithmetic(problem)
    kinds = ("integers",) if out in INTEGERS else ("integers", "normal", "scaled")
    for kind, seed in itertools.product(kinds, range(3)):
        inputs = make_inputs(problem, kind, seed)
        exact = kind == "integers"
        c = correct(inputs)
        args = (inputs, promise, {})
        assert checks.freivalds(*args, c, exact=exact).ok
        if exact:
            for change in (mutants.plus_one, mutants.swap_rows):
                wrong = c.copy()
                change(wrong)
                assert not checks.freivalds(*args, wrong, exact=True).ok
        zero = np.zeros_like(c)
        verdict = checks.freivalds(*args, zero, exact=exact)
        assert not verdict.ok
        if out not in INTEGERS:
            spoiled = c.copy()
            spoiled[77, 5] = np.nan
            assert checks.freivalds(*args, spoiled, exact=exact).worst_index == (77,)


def test_the_error_of_exact_products_grows_by_one_a_doubling() -> None:
    for reduction, levels in ((0, 4), (1, 4), (2, 5), (1024, 14)):
        assert exact_sums.relative_error(reduction) == levels * 2.0**-102


def test_freivalds_refuses_what_it_cannot_check() -> None:
    promise = arithmetic(mutants.MM)
    a = np.ones((3, 3), np.float32)
    inputs = replace(make_inputs(mutants.MM, "integers", 1), a=a, b=a)
    with pytest.raises(ValueError, match="2-D"):
        checks.freivalds(replace(inputs, a=a[None]), promise, {}, a)
    with pytest.raises(ValueError, match="rounds is 0"):
        checks.freivalds(inputs, promise, {}, a, rounds=0)
    infinite = replace(inputs, case=replace(inputs.case, kind="nonfinite"))
    with pytest.raises(ValueError, match=r"oracle\.judge"):
        checks.freivalds(infinite, promise, {}, a)
    large = replace(inputs, a=a * 2.0**30, b=a * 2.0**30)
    with pytest.raises(ValueError, match=r"2\^53"):
        checks.freivalds(large, promise, {}, a, exact=True)
