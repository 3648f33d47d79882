"""Judging an output: equality for exact sums, else an error bound derived from the rung.

Pure NumPy, independent of every back end. The strongest check that fits a case is used, always
elementwise: equality for integers, else the bound that the rung's declared arithmetic implies (see
`gemmule.oracle.bounds`), with the IEEE rule for NaN and infinities. No tolerance is chosen by hand,
and a NaN never passes a comparison.

>>> from gemmule.oracle.inputs import make_inputs
>>> from gemmule.core.problem import Problem
>>> from gemmule.core.rung import Arithmetic
>>> problem = Problem("matvec", m=3, n=50)
>>> inputs = make_inputs(problem, "normal", seed=7)
>>> np.matmul(inputs.a, inputs.b, out=inputs.out).shape
(3,)
>>> check(inputs, Arithmetic("float32", chain=lambda p, params: p.n), {}, inputs.out).ok
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import COMPLEX, FLOAT8, INTEGERS, UNIT_ROUNDOFF, Problem, numpy_dtype
from gemmule.core.rung import Arithmetic, Params
from gemmule.oracle.bounds import largest_finite, overflow_threshold, result_error, sum_error
from gemmule.oracle.inputs import Inputs, shapes
from gemmule.oracle.truth import (
    CATEGORIES,
    FINITE,
    MINUS_INF,
    NOT_A_NUMBER,
    PLUS_INF,
    Truth,
    grouped_reference,
    reference,
)

Array: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge found.

    kind: the check that decided (``equality``, ``bound``, ``nonfinite``, ``side effect``,
    ``form``). ratio: largest error over its bound (0 or inf for the other kinds); worst_index:
    where, in the output's own indices. text: one sentence for people.
    """

    ok: bool
    ratio: float
    worst_index: tuple[int, ...]
    text: str
    kind: str


def check(inputs: Inputs, arithmetic: Arithmetic, params: Params, out: Array) -> Verdict:
    """Judge the output of one case, computing its truth on the way."""
    return judge(inputs.case.problem, arithmetic, params, inputs, out, truth_of(inputs))


def truth_of(inputs: Inputs) -> Truth:
    """Compute the right result of a case."""
    exact, operands = inputs.case.kind == "integers", (inputs.case.problem, inputs.a, inputs.b)
    if inputs.ends is None:
        return reference(*operands, exact=exact)
    return grouped_reference(*operands, inputs.ends, exact=exact)


def judge(
    problem: Problem,
    arithmetic: Arithmetic,
    params: Params,
    inputs: Inputs,
    out: Array,
    truth: Truth,
) -> Verdict:
    """Judge an output: form, side effects, then every element.

    out: what was computed, `inputs.out` or a fresh array of the same shape and dtype. Integer
    results, and floats of kind ``integers`` where the rung's accumulator holds every sum, must be
    equal (0 and -0 are); other floats must lie within the bound.
    """
    fault = form_or_side_effect(problem, inputs, out)
    if fault is not None:
        return fault
    found = out[..., None] if problem.op == "matvec" else out
    if inputs.ends is not None:
        found = out[: len(truth.values)]
    if problem.out in INTEGERS:
        return _equality(problem, found, truth.values.astype(found.dtype))
    if problem.out in COMPLEX:
        found = np.concatenate([found.real, found.imag], axis=-2)
    whole = inputs.case.kind == "integers"
    if whole and sums_are_exact(arithmetic, inputs):
        with np.errstate(over="ignore"):
            expected = truth.values.astype(found.dtype)
        return _equality(problem, found, expected)
    # Only problems that ask for int8 activations get operands that are whole codes.
    whole = whole and problem.quant is not None and problem.quant.activations != "float"
    return _within_bound(problem, arithmetic, params, found, truth, whole_codes=whole)


def form_or_side_effect(problem: Problem, inputs: Inputs, out: Array) -> Verdict | None:
    """Return what is wrong with an output's shape or dtype, or was written beside it."""
    shape = shapes(problem)[2]
    if out.shape != shape or out.dtype != numpy_dtype(problem.out):
        text = f"the result is {out.dtype} {out.shape}; it must be {problem.out} {shape}"
        return Verdict(False, math.inf, (), text, "form")
    effect = inputs.side_effects()
    behind = None if inputs.ends is None else out[inputs.ends[-1] if len(inputs.ends) else 0 :]
    if behind is not None and not np.isnan(behind).all():
        effect = effect or "rows behind the last group were written"
    return Verdict(False, math.inf, (), effect, "side effect") if effect else None


def tolerance(problem: Problem, arithmetic: Arithmetic, params: Params, truth: Truth) -> Doubles:
    """Return how far each element may be from the truth, in the shape of the result.

    Not for integer dtypes (ValueError), nor complex ones, whose parts are bounded apart.
    """
    if truth.sizes is None or problem.out in COMPLEX:
        raise ValueError(f"a result of {problem.out} has no bound of this form; use judge.")
    error = sum_error(problem, arithmetic, params, truth.sizes)
    bound = result_error(problem, arithmetic, np.abs(truth.values), error)
    return bound[..., 0] if problem.op == "matvec" else bound


def sums_are_exact(arithmetic: Arithmetic, inputs: Inputs) -> bool:
    """Tell whether every sum of operands of kind ``integers`` is exact in this arithmetic."""
    if arithmetic.activations_bits is not None:
        return False
    if arithmetic.product is not None and inputs.largest_product > (
        1.0 / UNIT_ROUNDOFF[arithmetic.product]
    ):
        return False
    u = UNIT_ROUNDOFF.get(arithmetic.accumulator, 0.0)
    return inputs.exact_below * u <= 1.0


def _equality(problem: Problem, found: Array, expected: Array) -> Verdict:
    wrong = found != expected
    count = int(np.count_nonzero(wrong))
    if count == 0:
        return Verdict(True, 0.0, (), f"all {found.size} elements equal", "equality")
    place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    text = _complaint(problem, place, found[place], expected[place], count, found.size)
    return Verdict(False, math.inf, _own_index(problem, place), text, "equality")


def _within_bound(
    problem: Problem,
    arithmetic: Arithmetic,
    params: Params,
    found: Array,
    truth: Truth,
    *,
    whole_codes: bool,
) -> Verdict:
    if truth.sizes is None:
        raise ValueError("the truth of an integer problem has no bound; judge it by equality.")
    out = found.astype(np.float64)
    error = sum_error(problem, arithmetic, params, truth.sizes, whole_codes=whole_codes)
    magnitude = np.abs(truth.values)
    bound = result_error(problem, arithmetic, magnitude, error)
    with np.errstate(invalid="ignore"):
        distance = np.abs(
            out - truth.values if truth.low is None else (out - truth.values) - truth.low
        )
        good = distance <= bound  # False for a NaN
    finite = True if truth.category is None else truth.category == FINITE
    most = truth.sizes.product + error
    overflow = _may_overflow(problem, arithmetic, out, truth.values, most, error)
    if overflow is not None:
        must, may = overflow
        good = (good & ~must) | may
        finite = finite & ~may
    if truth.category is not None:
        good = np.where(truth.category == FINITE, good, _category_agrees(out, truth.category))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratios = np.where(distance == 0.0, 0.0, distance / bound)
        ratios = np.where(finite, np.where(np.isnan(ratios), np.inf, ratios), 0.0)
    wrong = ~good
    count = int(np.count_nonzero(wrong))
    if count == 0:
        return _pass(problem, ratios)
    flat = np.where(wrong, np.maximum(ratios, 1.0), 0.0)
    place = np.unravel_index(int(np.argmax(flat)), flat.shape)
    if truth.category is not None and truth.category[place] != FINITE:
        wanted: Any = CATEGORIES[truth.category[place]]
        kind, ratio = "nonfinite", math.inf
    else:
        wanted = f"{truth.values[place]:.9g} within {bound[place]:.3g}"
        kind = "bound" if np.isfinite(out[place]) else "nonfinite"
        ratio = float(flat[place])
    text = _complaint(problem, place, found[place], wanted, count, out.size)
    return Verdict(False, ratio, _own_index(problem, place), text, kind)


def _pass(problem: Problem, ratios: Doubles) -> Verdict:
    if ratios.size == 0:
        return Verdict(True, 0.0, (), "no elements", "bound")
    place = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    ratio = float(ratios[place])
    text = f"largest error is {ratio:.3g} of its bound, {ratios.size} elements"
    return Verdict(True, ratio, _own_index(problem, place), text, "bound")


def _category_agrees(out: Doubles, category: NDArray[np.int8]) -> NDArray[np.bool_]:
    agrees = np.select(
        [category == PLUS_INF, category == MINUS_INF, category == NOT_A_NUMBER],
        [out == np.inf, out == -np.inf, np.isnan(out)],
        ~np.isfinite(out),
    )
    return np.asarray(agrees, np.bool_)


def _may_overflow(
    problem: Problem,
    arithmetic: Arithmetic,
    out: Doubles,
    values: Doubles,
    most: Doubles,
    error: Doubles,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | None:
    """Return where the result has to overflow, and where the overflow found is legitimate.

    values: the truth; most: what any partial sum may come to; error: that of the sums as they are.
    None when nothing can. Overflow means the infinity of the right sign; for 8-bit floats also NaN
    or the largest number, as conversions differ. Where partial sums may leave the accumulator's
    range, any non-finite result is legitimate.
    """
    if most.size == 0:
        return None
    ceiling = overflow_threshold(problem.out)
    held = overflow_threshold(
        arithmetic.accumulator if arithmetic.accumulator in UNIT_ROUNDOFF else "float32"
    )
    if float(most.max()) < min(ceiling, held):
        return None
    magnitude = np.abs(values)
    must = magnitude - error >= ceiling
    may = (magnitude + error >= ceiling) & (out == np.copysign(np.inf, values))
    may |= (error - magnitude >= ceiling) & np.isinf(out)
    if problem.out in FLOAT8:
        saturated = out == np.copysign(largest_finite(problem.out), values)
        may |= (magnitude + error >= ceiling) & (np.isnan(out) | saturated)
    may |= (most >= held) & ~np.isfinite(out)
    return must, may


def _complaint(
    problem: Problem, place: tuple[Any, ...], found: Any, wanted: Any, count: int, size: int
) -> str:
    index = ", ".join(str(i) for i in _own_index(problem, place))
    return f"[{index}] is {found}, must be {wanted}; {count} of {size} elements wrong"


def _own_index(problem: Problem, place: tuple[Any, ...]) -> tuple[int, ...]:
    """Turn an index of the matrix form into one of the result."""
    *batch, row, column = (int(i) for i in place)
    row = row % problem.m if problem.out in COMPLEX else row
    return (*batch, row) if problem.op == "matvec" else (*batch, row, column)
