"""Volume: seeded random grouped products through the public API, each judged by the oracle.

A case follows from a seed and its number alone: up to 300 experts, up to 5,000 tokens spread over
them evenly, skewed, all in one or over a few, all float dtypes and codes, layouts and views. Its
``repr`` is Python that makes it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.core.problem import QuantSpec
from gemmule.oracle import judge as oracle
from gemmule.oracle.inputs import Case, Inputs, make_inputs
from gemmule.oracle.problems import make_problem

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
class Trial:
    """One case, and whether it goes to a poisoned `out` of any strides or to a fresh result."""

    case: Case
    into_out: bool
    device: str = "cpu"
    rung: str | None = None


def draw(seed: int, number: int, device: str = "cpu", rung: str | None = None) -> Trial:
    """Return trial `number` of a seed."""
    rng = np.random.Generator(np.random.SFC64([seed, number]))
    experts = int(rng.integers(1, (5, 40, MOST_EXPERTS + 1)[number % 3]))
    tokens = int(rng.integers(0, (12, 200, MOST_TOKENS + 1)[int(rng.integers(3))]))
    room = min(MOST_ELEMENTS // experts, 4 * MOST_ELEMENTS // max(tokens, 1))
    k = int(rng.integers(0, min(200, room) + 1))
    n = int(rng.integers(1, max(2, min(200, room // max(k, 1)) + 1)))
    coded = number % 4 == 3
    dtype = _FLOATS[int(rng.integers(4))]
    options: dict[str, Any] = {"layout_a": _LAYOUTS[int(rng.integers(3))]}
    weights = dtype
    if coded:
        bits = (4, 8)[int(rng.integers(2))]
        weights, dtype = f"uint{bits}", _FLOATS[(0, 2, 3)[int(rng.integers(3))]]
        group, zeros = _GROUPS[int(rng.integers(5))], bool(rng.integers(2))
        options["quant"] = QuantSpec(bits, group, zeros, "row", "float32", False)
    else:
        options["layout_b"] = _LAYOUTS[int(rng.integers(3))]
    wide = dtype in ("float16", "bfloat16") and rng.integers(3) == 0
    signature = dtype, weights, "float32" if wide else dtype
    problem = make_problem("grouped", tokens, n, k, signature, batch=experts, **options)
    kind, view = _KINDS[int(rng.integers(6))], _VIEWS[int(rng.integers(6))]
    kind = "normal" if coded and kind == "scaled" else kind
    case = Case(problem, kind, int(rng.integers(1 << 40)), view)
    return Trial(case, bool(rng.integers(2)) and device == "cpu", device, rung)


def run(trial: Trial) -> oracle.Verdict:
    """Make the operands, call `gemmule.grouped_matmul`, and judge what it returns."""
    case = trial.case
    inputs = make_inputs(case.problem, case.kind, case.seed, case.view)
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
    weights = inputs.b
    if isinstance(weights, gm.QuantizedMatrix):
        weights = gm.QuantizedStack.from_matrix(weights, inputs.case.problem.batch)
    operands = inputs.a, weights, inputs.ends
    if device == "cpu":
        return operands
    put = (
        one.to(device) if isinstance(one, gm.QuantizedStack) else gm.asarray(one, device=device)
        for one in operands
    )
    a, w, ends = put
    return a, w, ends
