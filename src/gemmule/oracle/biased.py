"""Judging kernels compiled to add a bias to each row: their trials, and the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import numpy_dtype
from gemmule.core.rung import DeviceRung
from gemmule.oracle.inputs import Inputs, make_inputs
from gemmule.oracle.judge import Verdict, judge
from gemmule.oracle.truth import Truth, reference

EVERY = 4  # plain trials for one with a bias, which changes what comes after all sums
SCALARS = ((1.0, 0.0), (1.0, 0.0), (-0.5, 0.0), (1.0, 2.0))  # alpha and beta, by turns
_EDGE = 16  # NaN beside the bias, on either side

Run = Callable[..., Any]


def some(rung: DeviceRung, trials: Iterable[Any]) -> Iterator[Any]:
    """Yield the launches that prove a variant which adds a bias: some of the plain variant's.

    With the parameters that the variant's key covers.
    """
    usual = [t for t in trials if t.params == rung.check_params(t.problem, None)]
    usual = [t for t in usual if t.problem.outputs and t.problem.batch]
    yield from usual[::EVERY]


def judge_trial(rung: DeviceRung, trial: Any, run: Run) -> Verdict:
    """Run one trial with a bias and judge it: run(rung, inputs, params, alpha, beta, bias)."""
    problem, arithmetic = trial.problem, rung.arithmetic(trial.problem)
    inputs = make_inputs(problem, trial.kind, trial.seed, trial.view)
    turn = 0 if trial.kind == "nonfinite" else trial.seed
    alpha, beta = SCALARS[turn % len(SCALARS)]
    before = _small(inputs.out.size, trial.seed).reshape(inputs.out.shape)
    if beta:  # else it keeps its NaN
        inputs.out[...] = before
    bias = bias_of(problem.m, problem.out, trial.seed)
    out = run(rung, inputs, trial.params, alpha, beta, bias=bias)
    truth = _truth(inputs, bias, alpha, beta * before if beta else np.zeros_like(before))
    return judge(problem, arithmetic, trial.params, inputs, out, truth)


def bias_of(rows: int, dtype: str, seed: int) -> NDArray[Any]:
    """Return small integers, a number for each row, that lie among NaN."""
    whole = np.full(rows + 2 * _EDGE, np.nan, numpy_dtype(dtype))
    bias: NDArray[Any] = whole[_EDGE - seed % 2 : _EDGE - seed % 2 + rows]
    bias[...] = _small(rows, seed + 1)
    return bias


def _small(count: int, seed: int) -> NDArray[Any]:
    return np.random.default_rng(seed).integers(-8, 9, count).astype(np.float64)


def _truth(inputs: Inputs, bias: NDArray[Any], alpha: float, rest: NDArray[Any]) -> Truth:
    """Return alpha times the product, plus the bias of each row, plus the rest."""
    exact = inputs.case.kind == "integers"
    truth = reference(inputs.case.problem, inputs.a, inputs.b, exact=exact)
    rest = rest[..., None] if inputs.case.problem.op == "matvec" else rest
    added = bias.astype(np.float64)[:, None] + rest
    low, sizes = truth.low, truth.sizes
    if sizes is not None:
        # either may be rounded to before the other takes it away
        product = abs(alpha) * sizes.product + np.abs(bias)[:, None] + np.abs(rest)
        sizes = replace(sizes, product=product)
    return replace(
        truth,
        values=alpha * truth.values + added,
        low=None if low is None else alpha * low,
        sizes=sizes,
    )
