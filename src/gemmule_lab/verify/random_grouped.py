"""Volume: seeded random grouped products through the public API, each judged by the oracle.

A case follows from a seed and its number alone: up to 300 experts, up to 5,000 tokens spread over
them evenly, skewed, all in one or over a few, all float dtypes and codes, layouts and views; two of
five are surrounded by indices, weights or a gate. Its ``repr`` is Python that makes it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.arrays.interop import unwrap
from gemmule.core.canonical import Options
from gemmule.core.grouped import routed
from gemmule.core.problem import FLOAT4_DTYPE, FLOAT8_CODES, QuantSpec, numpy_dtype
from gemmule.oracle import judge as oracle
from gemmule.oracle.inputs import Case, Inputs, make_inputs
from gemmule.oracle.problems import float4_spec, make_problem
from gemmule.oracle.routed import judge_routed
from gemmule.routed import plan_within

MOST_EXPERTS, MOST_TOKENS = 300, 5000
MOST_ELEMENTS = (
    400_000  # of the matrices together, and of A: what the oracle judges in milliseconds
)
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_LAYOUTS = ("row", "col", "strided")
_VIEWS = ("contiguous", "padded", "sliced", "strided", "reversed", "loose")
_KINDS = ("integers", "integers", "normal", "cancel", "scaled", "nonfinite")
_GROUPS = (16, 32, 64, 128, -1)


@dataclass(frozen=True, slots=True)
class Around:
    """What surrounds the product of a trial: its tokens find experts by indices, or by offsets.

    top_k: slots of a token, 0 for offsets. by_slot: each slot has a row of A. weights: their dtype,
    None for none.
    """

    top_k: int
    by_slot: bool
    index: str
    weights: str | None
    gated: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """One case, and whether it goes to a poisoned `out` of any strides or to a fresh result."""

    case: Case
    into_out: bool
    device: str = "cpu"
    rung: str | None = None
    around: Around | None = None


def draw(seed: int, number: int, device: str = "cpu", rung: str | None = None) -> Trial:
    """Return trial `number` of a seed."""
    rng = np.random.Generator(np.random.SFC64([seed, number]))
    experts = int(rng.integers(1, (5, 40, MOST_EXPERTS + 1)[number % 3]))
    tokens = int(rng.integers(0, (12, 200, MOST_TOKENS + 1)[int(rng.integers(3))]))
    most = MOST_ELEMENTS if number % 8 == 0 else MOST_ELEMENTS // 8
    room = min(most // experts, 4 * most // max(tokens, 1))
    k = int(rng.integers(0, min(200, room) + 1))
    n = int(rng.integers(1, max(2, min(200, room // max(k, 1)) + 1)))
    if rng.integers(2):  # as most rungs want them
        k, n = -(-k // 32) * 32, -(-n // 8) * 8
    coded = number % 4 == 3
    dtype = _FLOATS[int(rng.integers(4))]
    options: dict[str, Any] = {"layout_a": _LAYOUTS[int(rng.integers(3))]}
    weights = dtype
    if coded:
        bits = (4, 8)[int(rng.integers(2))]
        weights, dtype = f"uint{bits}", _FLOATS[(0, 2, 3)[int(rng.integers(3))]]
        group, zeros = _GROUPS[int(rng.integers(5))], bool(rng.integers(2))
        options["quant"] = QuantSpec(bits, group, zeros, "row", "float32", False)
        if bits == 4 and rng.integers(3) == 0:
            weights, options["quant"] = FLOAT4_DTYPE, float4_spec(int(rng.integers(2)))
        elif bits == 8 and rng.integers(3) == 0:
            weights = FLOAT8_CODES
            options["quant"] = replace(options["quant"], has_zeros=False)
    else:
        options["layout_b"] = _LAYOUTS[int(rng.integers(3))]
    wide = dtype in ("float16", "bfloat16") and rng.integers(3) == 0
    signature = dtype, weights, "float32" if wide else dtype
    problem = make_problem("grouped", tokens, n, k, signature, batch=experts, **options)
    kind, view = _KINDS[int(rng.integers(6))], _VIEWS[int(rng.integers(6))]
    kind = "normal" if coded and kind == "scaled" else kind
    case = Case(problem, kind, int(rng.integers(1 << 40)), view)
    into_out = bool(rng.integers(2)) and device == "cpu"
    if number % 5 > 1:
        return Trial(case, into_out, device, rung)
    kind = kind if kind in ("integers", "normal", "cancel") else "normal"
    top_k = int(rng.integers(0, 9))
    by_slot = bool(rng.integers(2))
    if top_k and not by_slot:
        top_k = max(1, min(top_k, MOST_TOKENS // max(tokens, 1)))
    index = ("int32", "int64")[int(rng.integers(2))]
    shares = (None, dtype, "float32")[int(rng.integers(3))] if top_k else None
    gated = n % 2 == 0 and (not top_k or bool(rng.integers(2)))
    around = Around(top_k, by_slot, index, shares, gated)
    return Trial(replace(case, kind=kind), into_out, device, rung, around)


def run(trial: Trial) -> oracle.Verdict:
    """Make the operands, call `gemmule.grouped_matmul`, and judge what it returns."""
    case = trial.case
    inputs = make_inputs(case.problem, case.kind, case.seed, case.view)
    if trial.around is not None:
        return _run_around(trial, trial.around, inputs)
    operands = placed(inputs, trial.device)
    options: dict[str, Any] = {"out_dtype": case.problem.out, "rung": trial.rung}
    plan: Any = gm.plan("grouped_matmul", *operands, **options)
    arithmetic, params = plan.rung.arithmetic(plan.choice.problem), plan.params
    if trial.into_out:
        result = gm.grouped_matmul(*operands, out=inputs.out, **options)
        if result is not inputs.out:
            return oracle.Verdict(False, np.inf, (), "it is not the out that was given", "form")
        return oracle.check(inputs, arithmetic, params, result)
    fresh = gm.asarray(plan(*operands), device="cpu")
    inputs.out[...] = np.nan  # rows behind the last end may hold anything in a fresh result
    last = int(inputs.ends[-1]) if inputs.ends is not None and inputs.ends.size else 0
    inputs.out[:last] = fresh[:last]
    return oracle.check(_unguarded(inputs), arithmetic, params, inputs.out)


def _run_around(trial: Trial, around: Around, inputs: Inputs) -> oracle.Verdict:
    """Call with indices, weights or a gate, on the operands of the case, and judge the result."""
    problem, rng = trial.case.problem, np.random.default_rng(trial.case.seed)
    a, w, ends = _operands(inputs)
    indices = weights = None
    if around.top_k:
        tokens = problem.m // around.top_k if around.by_slot else problem.m
        a = (
            a[: tokens * around.top_k].reshape(tokens, around.top_k, problem.k)
            if around.by_slot
            else a
        )
        share = rng.random(problem.batch + 2) ** (1, 4, 12)[int(rng.integers(3))]
        size = (tokens, around.top_k)
        indices = (
            rng.choice(problem.batch + 2, size, p=share / share.sum()).astype(around.index) - 1
        )
        if around.weights is not None:
            weights = rng.standard_normal(size).astype(numpy_dtype(around.weights))
    epilogue = "silu_gate" if around.gated else None
    options: dict[str, Any] = {"out_dtype": problem.out, "rung": trial.rung}
    surrounding = {"indices": indices, "weights": weights}
    moved = {
        name: None if one is None else _put(one, trial.device) for name, one in surrounding.items()
    }
    offsets = () if around.top_k else (_put(ends, trial.device),)
    given = (_put(a, trial.device), _put(w, trial.device), *offsets)
    result = gm.grouped_matmul(*given, **moved, epilogue=epilogue, **options)
    found = gm.asarray(result, device="cpu")
    of_ends = None if around.top_k else unwrap(ends, "offsets").form
    of_a, of_w = unwrap(a, "A").form, unwrap(w, "W").form
    of_indices, of_weights = (
        None if one is None else unwrap(one, "it").form for one in (indices, weights)
    )
    named = trial.rung is not None
    made = Options(out_dtype=problem.out, rung=trial.rung, literal=named)
    about = routed(of_a, of_w, (of_indices, of_weights, of_ends), epilogue, made)
    device = unwrap(given[0], "A").device
    plan = plan_within(about, of_a, of_w, of_ends, device, made)
    within = replace(problem, m=about.slots, out=about.sums)
    arithmetic = plan.rung.arithmetic(plan.problem)
    operands = (a, inputs.b, indices, weights, None if around.top_k else ends)
    return judge_routed(about, within, arithmetic, plan.params, operands, np.asarray(found))


class _Unguarded(Inputs):
    """Operands whose surroundings were overwritten by the judge itself."""

    def side_effects(self) -> str:
        """Return that nothing was found."""
        return ""


def _unguarded(inputs: Inputs) -> Inputs:
    names = ("case", "a", "b", "out", "exact_below", "frames", "fingerprints", "ends")
    return _Unguarded(*(getattr(inputs, name) for name in names))


def placed(inputs: Inputs, device: str) -> tuple[Any, Any, Any]:
    """Return A, W and the offsets on a device: packed there, on the host as they lie."""
    a, w, ends = (_put(one, device) for one in _operands(inputs))
    return a, w, ends


def _operands(inputs: Inputs) -> tuple[Any, Any, Any]:
    weights = inputs.b
    if isinstance(weights, gm.QuantizedMatrix):
        weights = gm.QuantizedStack.from_matrix(weights, inputs.case.problem.batch)
    return inputs.a, weights, inputs.ends


def _put(one: Any, device: str) -> Any:
    if device == "cpu":
        return one
    return one.to(device) if isinstance(one, gm.QuantizedStack) else gm.asarray(one, device=device)
