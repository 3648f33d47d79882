"""Judging kernels compiled to scale rows and columns: their trials, and the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmule.core.problem import INTEGERS
from gemmule.core.rung import Arithmetic, CudaRung, DeviceRung
from gemmule.oracle.bounds import Magnitudes
from gemmule.oracle.inputs import Inputs, lay_out, make_inputs, shapes
from gemmule.oracle.judge import Verdict, judge
from gemmule.oracle.truth import Truth, reference

EVERY = 3  # plain trials for one with scales, which change what comes after all sums
EACH = ((True, True), (False, True), (True, False), (False, False))  # of rows, of columns, by turns
ROUNDINGS = 3  # of the sum, if it is an integer, and by each scale
BLOCK = 128  # steps, and columns of B, that share a scale by blocks
KINDS_A = ("rows and steps", "blocks", "rows", "one")  # of scales of A by blocks, by turns
_EDGE = 16  # NaN beside the scales, on either side

Run = Callable[..., Any]


def some(rung: CudaRung, trials: Iterable[Any], out: str) -> Iterator[Any]:
    """Yield the launches that prove a scaled variant: some of the plain one's, with this result.

    With the parameters that the variant's key covers, and of one product: scales have no batches.
    """
    whole = rung.by_blocks  # whose key covers all
    usual = [t for t in trials if whole or t.params == rung.check_params(t.problem, None)]
    usual = [t for t in usual if t.problem.outputs and t.problem.batch == 1]
    for trial in usual[::EVERY]:
        yield replace(trial, problem=replace(trial.problem, out=out))


def judge_trial(rung: DeviceRung, trial: Any, run: Run) -> Verdict:
    """Run one trial with scales and judge it: run(rung, inputs, params, scales=...)."""
    inputs, scales, truth = made(rung, trial)
    found = run(rung, inputs, trial.params, scales=scales)
    return judge(trial.problem, arithmetic(rung, trial), trial.params, inputs, found, truth)


def made(rung: DeviceRung, trial: Any) -> tuple[Inputs, tuple[NDArray[np.float32], ...], Truth]:
    """Return a trial's operands, its scales, and the exact scaled product."""
    problem = trial.problem
    if not isinstance(rung, CudaRung):
        raise TypeError(f"rung {rung.name} is a library's, which is given no scales.")
    plain = replace(problem, out=rung.unscaled(problem))
    given = make_inputs(plain, trial.kind, trial.seed, trial.view)
    out = lay_out(shapes(problem)[2], problem, "out", trial.view)
    # Integer sums become floats: equal to the truth they are not, but within a rounding.
    kind = "normal" if plain.out in INTEGERS else trial.kind
    case = replace(given.case, problem=problem, kind=kind)
    inputs = replace(given, case=case, out=out.array, frames=(out, *given.frames[1:]))
    whole, exact = trial.kind != "normal", trial.kind == "integers"
    if isinstance(rung, CudaRung) and rung.by_blocks:
        scales = block_scales_of(problem, trial.seed, whole=whole)
        truth = _truth_of_blocks(plain, inputs, scales, exact=exact)
    else:
        scales = scales_of(problem.m, problem.n, trial.seed, whole=whole)
        truth = _truth(plain, inputs, scales, exact=exact)
    return inputs, scales, truth


def scales_of(
    rows: int, columns: int, seed: int, *, whole: bool
) -> tuple[NDArray[np.float32], ...]:
    """Return scales of A and of B that lie among NaN: one each, or one; whole: powers of two."""
    rng = np.random.default_rng(seed)
    found = []
    for size, each in zip((rows, columns), EACH[seed % len(EACH)], strict=True):
        count = size if each else 1
        memory = np.full(count + 2 * _EDGE, np.nan, np.float32)
        scale = memory[_EDGE : _EDGE + count]
        scale[...] = 2.0 ** rng.integers(-3, 4, count)
        if not whole:
            scale[...] = rng.uniform(-1.0, 1.0, count) * scale
        found.append(scale)
    return tuple(found)


def block_scales_of(problem: Any, seed: int, *, whole: bool) -> tuple[NDArray[np.float32], ...]:
    """Return scales of A and of B by blocks, in either order in memory, among NaN.

    whole: powers of two that lie close together, so that sums stay exact.
    """
    rng = np.random.default_rng(seed)
    rows, columns, steps = (-(-size // BLOCK) for size in (problem.m, problem.n, problem.k))
    shapes = {
        "rows and steps": (problem.m, steps),
        "blocks": (rows, steps),
        "rows": (problem.m, 1),
        "one": (1, 1),
    }
    found = []
    for turn, shape in enumerate(
        (shapes[KINDS_A[seed % 4]], ((steps, columns), (1, 1))[seed % 3 // 2])
    ):
        count = shape[0] * shape[1]
        memory = np.full(count + 2 * _EDGE, np.nan, np.float32)
        memory[_EDGE : _EDGE + count] = 2.0 ** rng.integers(-1, 2, count)
        if not whole:
            memory[_EDGE : _EDGE + count] *= rng.uniform(-4.0, 4.0, count).astype(np.float32)
        scale = memory[_EDGE : _EDGE + count]
        turned = (seed // 2 + turn) % 2
        found.append(scale.reshape(shape[::-1]).T if turned else scale.reshape(shape))
    return tuple(found)


def spread(scale: NDArray[Any], shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return scales by blocks as one for each element of a matrix of this shape."""
    wide = scale.astype(np.float64)
    for axis, size in enumerate(shape):
        if wide.shape[axis] not in (1, size):
            wide = np.repeat(wide, BLOCK, axis).take(range(size), axis)
    return np.broadcast_to(wide, shape)


def _truth_of_blocks(
    plain: Any, inputs: Inputs, scales: tuple[NDArray[np.float32], ...], *, exact: bool
) -> Truth:
    """Return the product of operands that are scaled before; float64 holds these to 2^-53."""
    a, b = (
        one.astype(np.float64) * spread(scale, one.shape)
        for one, scale in zip((inputs.a, inputs.b), scales, strict=True)
    )
    return reference(plain, a, b, exact=exact)


def arithmetic(rung: Any, trial: Any) -> Arithmetic:
    """Return how a plain product rounds, and its scales after it."""
    plain = replace(trial.problem, out=rung.unscaled(trial.problem))
    own: Arithmetic = rung.arithmetic(plain)
    if plain.out in INTEGERS:
        return Arithmetic("float32", chain=lambda problem, params: ROUNDINGS)
    return replace(own, chain=lambda problem, params: own.chain(problem, params) + ROUNDINGS)


def _truth(
    plain: Any, inputs: Inputs, scales: tuple[NDArray[np.float32], ...], *, exact: bool
) -> Truth:
    """Return the product of the plain problem, each row and column times its scale."""
    truth = reference(plain, inputs.a, inputs.b, exact=exact)
    factor = scales[0].astype(np.float64)[:, None] * scales[1].astype(np.float64)
    values = truth.values.astype(np.float64)
    if truth.sizes is None:
        sizes = Magnitudes(np.zeros((plain.m, 0)), np.zeros((0, plain.n)), np.abs(values), 2.0**-52)
    else:
        sizes = truth.sizes
    sizes = replace(sizes, product=sizes.product * np.abs(factor))
    return replace(truth, values=values * factor, low=None, sizes=sizes)
