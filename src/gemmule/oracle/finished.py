"""Judging products with an epilogue: a trial's operands, the truth, and how far off it may be.

The bound of the sums goes on through what follows. Sums and terms are added in the sums' dtype, of
unit roundoff u, each through at most four roundings. An activation f with ``|f'| <= s`` makes of an
error e at most ``s e``, and adds its own: exp and the polynomials in its exponent are right within
a few u times one and the exponent, which is ``v^2 / 2`` for gelu, ``1.6 |v| (1 + 0.0447 v^2)`` for
its tanh form and ``|v|`` for silu. Where results are halves, gelu's kernels take shorter
polynomials, within 2^-18 or 2^-13.6 in the place of u (``rungs/_cuda/epilogue.cuh``): of a unit of
bfloat16 the latter is a sixteenth. A gate multiplies the
error, the residual adds none; each rounds once, and so does the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import HALVES, UNIT_ROUNDOFF, Problem, numpy_dtype
from gemmule.core.rung import Arithmetic, CudaRung, DeviceRung, Params
from gemmule.oracle import scaled
from gemmule.oracle.bounds import SMALLEST
from gemmule.oracle.inputs import Frame, Inputs, lay_out, make_inputs
from gemmule.oracle.judge import Verdict, form_or_side_effect, sums_are_exact, tolerance
from gemmule.oracle.routed import within
from gemmule.oracle.truth import Truth, reference

Array: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[np.float64]
Run = Callable[..., Array]

EVERY = 2  # plain trials for one with an epilogue, which changes what comes after all sums
SCALARS = ((1.0, 1.0), (1.0, 1.0), (-0.5, 2.0), (2.0, -0.5))  # alpha and beta, by turns
ADDED, OWN = 4, 8  # roundings of a sum and its terms, of an activation besides its exponent
SLOPES = {None: 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}  # at most
# Of gelu where the result is a half: of its polynomial, and of its evaluation.
QUICK = {"float16": 2.0**-17, "bfloat16": 2.0**-13}
_EDGE = 16  # NaN beside a bias, on either side
_VIEWS = ("contiguous", "contiguous", "sliced", "strided")


@dataclass(frozen=True, slots=True)
class Around:
    """An epilogue's scalars, activation and operands, by their names in `gemmule.Epilogue`."""

    alpha: float
    beta: float
    activation: str | None
    operands: dict[str, Array]
    frames: tuple[Frame, ...] = field(repr=False, default=())


def some(rung: DeviceRung, trials: Iterable[Any]) -> Iterator[Any]:
    """Yield the launches that prove a variant with an epilogue: some of the plain variant's.

    With the parameters that the variant's key covers, and of finite operands.
    """
    usual = [t for t in trials if t.params == rung.check_params(t.problem, None)]
    usual = [t for t in usual if t.problem.outputs]
    yield from [t for t in usual if t.kind != "nonfinite"][::EVERY]


def around(problem: Problem, activations: tuple[str | None, ...], seed: int, kind: str) -> Around:
    """Return an epilogue drawn by a seed: any of its operands, each lying as it may.

    kind: ``integers`` for operands that are small integers; others are normal.
    """
    rng = np.random.default_rng(seed)
    shape = (problem.m, problem.n) if problem.batch == 1 else (problem.batch, problem.m, problem.n)
    frames, operands = [], {}
    for name in ("C", "gate", "residual"):
        if rng.random() < 0.5:
            layout = problem.layout_out if rng.random() < 0.7 else ("row", "col")[rng.integers(2)]
            lying = replace(problem, layout_out=layout)
            frame = lay_out(shape, lying, "out", _VIEWS[rng.integers(len(_VIEWS))])
            frame.array[...] = _values(rng, shape, kind)
            frames.append(frame)
            operands[name] = frame.array
    which = rng.integers(4)
    if which < 3:
        count = problem.m if which == 2 else problem.n
        memory = np.full(count + 2 * _EDGE, np.nan, numpy_dtype(problem.out))
        first = _EDGE - seed % 2
        bias = memory[first : first + count]
        bias[...] = _values(rng, (count,), kind)
        operands["bias"] = (bias, bias[None], bias[:, None])[which]
    alpha, beta = SCALARS[rng.integers(len(SCALARS))]
    if "C" not in operands:
        beta = 1.0
    activation = activations[rng.integers(len(activations))]
    return Around(alpha, beta, activation, operands, tuple(frames))


def _values(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    if kind == "integers":
        return rng.integers(-4, 5, shape).astype(np.float64)
    return rng.standard_normal(shape)


def judge_trial(
    rung: DeviceRung, trial: Any, run: Run, activations: tuple[str | None, ...]
) -> Verdict:
    """Run one trial with an epilogue and judge it: run(rung, inputs, params, epilogue=...).

    Of a rung that scales with scales as well: run(..., scales=..., epilogue=...).
    """
    problem, more, truth = trial.problem, {}, None
    if isinstance(rung, CudaRung) and rung.scaled:
        inputs, more["scales"], truth = scaled.made(rung, trial)
        rounds = scaled.arithmetic(rung, trial)
    else:
        inputs = make_inputs(problem, trial.kind, trial.seed, trial.view)
        rounds = rung.arithmetic(problem)
    given = around(problem, activations, trial.seed, trial.kind)
    seen = replace(inputs, frames=(*inputs.frames, *given.frames))
    found = run(rung, seen, trial.params, epilogue=given, **more)
    return judge_finished(rounds, trial.params, inputs, given, found, truth)


def judge_finished(
    arithmetic: Arithmetic,
    params: Params,
    inputs: Inputs,
    given: Around,
    found: Array,
    truth: Truth | None = None,
) -> Verdict:
    """Judge a result, of operands that are finite: form, side effects, then every element.

    inputs: of the product, whose problem has the result's dtype; arithmetic, params: of its rung;
    truth: of a scaled product, whose sums are rounded.
    """
    problem = inputs.case.problem
    fault = form_or_side_effect(problem, inputs, found)
    if fault is not None:
        return fault
    sums = replace(problem, out="float32" if problem.out in HALVES else problem.out)
    u, whole = UNIT_ROUNDOFF[sums.out], inputs.case.kind == "integers"
    exact = truth is None and whole and sums_are_exact(arithmetic, inputs)
    truth = truth or reference(sums, inputs.a, inputs.b, exact=whole)
    values = np.asarray(truth.values, np.float64)
    off = np.zeros_like(values) if exact else tolerance(sums, arithmetic, params, truth)
    operands = {name: one.astype(np.float64) for name, one in given.operands.items()}
    terms: list[Any] = [
        given.alpha * values,
        given.beta * operands.get("C", 0.0),
        operands.get("bias", 0.0),
    ]
    size = abs(given.alpha) * (np.abs(values) + off) + np.abs(terms[1]) + np.abs(terms[2])
    values, off = terms[0] + terms[1] + terms[2], abs(given.alpha) * off
    if not exact:
        off = off + ADDED * u * size
    values, off = _activated(given.activation, values, off, problem.out)
    exact = exact and given.activation in (None, "relu")
    for name in ("gate", "residual"):
        if name in operands:
            one = operands[name]
            off = off * np.abs(one) if name == "gate" else off
            values = values * one if name == "gate" else values + one
            off = off if exact else off + u * (np.abs(values) + np.abs(one) + off)
    if problem.out != sums.out:
        narrow = UNIT_ROUNDOFF[problem.out]
        off = off * (1 + narrow) + narrow * np.abs(values) + SMALLEST[problem.out] / 2
    elif not exact:
        off = off + u * np.abs(values) + SMALLEST[problem.out]
    return within(found.astype(np.float64), values, off, problem.out)


def _activated(how: str | None, v: Doubles, off: Doubles, dtype: str) -> tuple[Doubles, Doubles]:
    """Return an activation of values and how far it may be off, by how far those may be."""
    if how is None or how == "relu":
        return (v if how is None else np.maximum(v, 0.0)), off
    size = np.abs(v) + off
    with np.errstate(over="ignore"):
        if how == "gelu":
            result = v * _normal(v)
            exponent = size * size / 2
        elif how == "gelu_tanh":
            twice = math.sqrt(8 / math.pi) * (v + 0.044715 * v**3)
            result = v / (1.0 + np.exp(-twice))
            exponent = 1.6 * size * (1 + 0.0447 * size * size)
        else:
            result, exponent = v / (1.0 + np.exp(-v)), size
    u = UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    own = u * (OWN + 4 * exponent)
    if how == "gelu" and dtype in QUICK:
        own = own + QUICK[dtype] * (1 + exponent)
    tiny = 2.0**-124 * size  # powers of two below the least normal number are none
    error: Doubles = SLOPES[how] * off + own * (np.abs(result) + SLOPES[how] * off) + tiny
    return result, error


@np.vectorize(otypes=[np.float64])
def _normal(v: float) -> float:
    """Return the normal distribution's function by the C library's own error function."""
    return 0.5 * math.erfc(-v * math.sqrt(0.5))
