"""Volume: seeded random products through the public API, each judged by the oracle.

A *trial* is one oracle case and the way it is called: through ``matvec``, ``vecmat`` or ``matmul``,
into a poisoned ``out`` or a fresh result, with the automatic choice or a named rung. It follows
from a seed and its number alone, and its ``repr`` is Python that makes it again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import gemmule as gm
from gemmule.core.problem import (
    COMPLEX,
    FLOAT4_DTYPE,
    FLOAT8,
    INTEGERS,
    Problem,
    QuantSpec,
    result_dtype,
)
from gemmule.core.registry import all_rungs
from gemmule.core.rung import Rung, Signature
from gemmule.oracle import judge as oracle
from gemmule.oracle import relations
from gemmule.oracle.inputs import Case, Inputs, make_inputs
from gemmule.oracle.problems import (
    ALL_SIGNATURES,
    QUANTIZED_SIGNATURES,
    make_problem,
    random_case,
    values_by,
)
from gemmule.oracle.truth import reference
from gemmule_lab.verify import on_device
from gemmule_lab.verify.check import Rounding

__all__ = ["Case", "Choice", "Outcome", "Problem", "QuantSpec", "Trial", "draw", "run", "snippet"]

Array: TypeAlias = NDArray[Any]

# By these shares: a third dense matmul, a third quantised.
OPS = ("matvec", "vecmat", "matmul", "matmul", "quantized", "quantized")
DRAWS = 4  # trials in a row of one problem: later ones meet what the package kept of the first
LARGER_EVERY, LARGER = 16, 130  # now and then past a tile of 128
LARGE_EVERY, LARGE_SIDES = 256, (200, 640)  # a matmul too large for its whole truth
_FLOATS = ("float64", "float32", "float16", "bfloat16")
MIXED = tuple((a, b, result_dtype(a, b)) for a, b in itertools.permutations(_FLOATS, 2))
EIGHT_BITS = tuple((a, b, result_dtype(a, b)) for a, b in itertools.product(FLOAT8, FLOAT8))
MOST_POINTS = 256  # of a rung's parameter space


@dataclass(frozen=True, slots=True)
class Trial:
    """One case and how it is called. `into_out`: write to a poisoned, guarded array.

    library: of the operands on a device.
    """

    op: str
    case: Case
    into_out: bool = False
    rung: str | None = None
    params: tuple[tuple[str, Any], ...] | None = None
    device: str = "cpu"
    library: str = "own"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trial, and the largest error over its bound.

    status: ``ok``, ``wrong``, ``raised``, or ``refused`` where the named rung does not take the
    operands as they lie in memory: a reversed view of a matrix that it reads by rows, say.
    """

    status: str
    ratio: float
    text: str
    rung: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What trials are drawn from."""

    op: str | None = None
    rung: str | None = None
    device: str = "cpu"
    libraries: tuple[str, ...] = ("own",)

    @property
    def backend(self) -> str:
        """The back end of the device."""
        return "cpu" if self.device == "cpu" else "cuda"

    def rungs(self) -> list[Rung]:
        """Return the rungs of the given name, of the ladder `op`; ValueError when there is none."""
        if self.rung is None:
            return []
        every = [one for one in all_rungs(self.backend) if self.op in (None, one.folder)]
        named = [one for one in every if one.name == self.rung]
        if not named:
            known = ", ".join(dict.fromkeys(one.name for one in every))
            of = "" if self.op is None else f" of {self.op}"
            raise ValueError(
                f"no {self.backend} rung{of} is called {self.rung!r}; there are: {known}."
            )
        return named


def draw(choice: Choice, seed: int, number: int) -> Trial:
    """Return trial `number` of a seed: the same trial on every machine with the same libraries."""
    problem, turn = divmod(number, DRAWS)
    trial = _draw(choice, seed, problem)
    if turn:
        rng = np.random.Generator(np.random.SFC64([seed, number, turn]))
        kind, values = values_by(
            int(rng.integers(10)), int(rng.integers(1 << 48)), trial.case.problem
        )
        kind = trial.case.kind if relations.too_large(trial.case.problem) else kind
        into_out = bool(rng.integers(2)) and trial.rung is None
        trial = replace(trial, case=replace(trial.case, kind=kind, seed=values), into_out=into_out)
    return replace(trial, library=choice.libraries[problem % len(choice.libraries)])


@functools.lru_cache(maxsize=1)  # the trials of a problem are drawn one after the other
def _draw(choice: Choice, seed: int, number: int) -> Trial:
    rng = np.random.Generator(np.random.SFC64([seed, number]))
    largest = LARGER if number % LARGER_EVERY == 0 else 33
    rungs = choice.rungs()
    if number % LARGE_EVERY == LARGE_EVERY // 2 and choice.op in (None, "matmul"):
        large = _draw_large(rungs, choice, rng)
        if large is not None:
            return large
    if rungs:
        return _draw_for_rung(rungs[int(rng.integers(len(rungs)))], choice, rng, largest)
    op = choice.op or OPS[int(rng.integers(len(OPS)))]
    case = random_case(
        rng, ops=_case_ops(op), signatures=_signatures(op, choice.backend), largest=largest
    )
    if op == "quantized":
        op = ("matvec", "vecmat")[number % 2] if case.problem.op == "matvec" else "matmul"
        quant = case.problem.quant
        if choice.device == "cpu" and quant is not None and number % 3 == 0:
            permitted = replace(quant, activations="int8")
            case = replace(case, problem=replace(case.problem, quant=permitted))
    return Trial(op, case, bool(rng.integers(2)), device=choice.device)


def _case_ops(op: str) -> tuple[str, ...]:
    return {"matmul": ("matmul",), "quantized": ("matvec", "matmul")}.get(op, ("matvec",))


def _signatures(op: str, backend: str) -> Sequence[Signature]:
    if op == "quantized":  # 4-bit floats become 8-bit codes on a GPU
        given = QUANTIZED_SIGNATURES
        return tuple(s for s in given if backend == "cpu" or s[0] != FLOAT4_DTYPE)
    known = (*ALL_SIGNATURES, *MIXED)
    if backend == "cuda":
        return tuple(s for s in known if s[0] not in COMPLEX)
    return (*known, *EIGHT_BITS)


def _draw_for_rung(rung: Rung, choice: Choice, rng: np.random.Generator, largest: int) -> Trial:
    """Draw a case the rung takes: of its dtypes and layouts, at a random point of its space."""
    for _ in range(64):
        case = random_case(
            rng, ops=(rung.op,), signatures=rung.signatures, layouts=rung.layouts, largest=largest
        )
        problem = case.problem
        if rung.refusal(problem) is not None:
            continue
        points = list(itertools.islice(rung.space(problem), MOST_POINTS))
        point = points[int(rng.integers(len(points)))]
        return Trial(rung.op, case, False, rung.name, tuple(sorted(point.items())), choice.device)
    example = make_problem(rung.op, 3, 5, 7, rung.signatures[0], layout_a=rung.layouts[0])
    raise ValueError(
        f"no random problem fits rung {rung.folder}/{rung.name}; it says of one: "
        f"{rung.refusal(example)}."
    )


def _draw_large(rungs: list[Rung], choice: Choice, rng: np.random.Generator) -> Trial | None:
    """Draw a matmul that is judged without its whole truth; None where the rung takes none."""
    rung = rungs[int(rng.integers(len(rungs)))] if rungs else None
    known = _signatures("matmul", choice.backend) if rung is None else rung.signatures
    signature = known[int(rng.integers(len(known)))]
    m, n, k = (int(size) for size in rng.integers(*LARGE_SIDES, 3))
    layouts = ("row", "col") if rung is None else rung.layouts
    layouts_b = ("row", "col") if rung is None else rung.layouts_b
    problem = make_problem(
        "matmul",
        m,
        n,
        k,
        signature,
        layout_a=layouts[int(rng.integers(len(layouts)))],
        layout_b=layouts_b[int(rng.integers(len(layouts_b)))],
    )
    if not relations.too_large(problem) or (rung is not None and rung.refusal(problem) is not None):
        return None
    kinds = ("integers",) if signature[2] in INTEGERS else ("integers", "integers", "normal")
    case = Case(problem, kinds[int(rng.integers(len(kinds)))], int(rng.integers(2**31)))
    name = None if rung is None else rung.name
    return Trial("matmul", case, bool(rng.integers(2)), name, device=choice.device)


def run(trial: Trial, planned: dict[Trial, gm.Plan] | None = None) -> Outcome:
    """Make the operands, call the public function, and judge what it returns.

    planned: holds the plan of the trial before, which one of the same problem takes.
    """
    try:
        return _run(trial, {} if planned is None else planned)
    except Exception as error:  # whatever a legal call raises is the finding
        if trial.rung and str(error).startswith(f"rung {trial.rung} cannot compute"):
            return Outcome("refused", 0.0, str(error), trial.rung)
        return Outcome("raised", np.inf, f"{type(error).__name__}: {error}", trial.rung or "")


def _run(trial: Trial, planned: dict[Trial, gm.Plan]) -> Outcome:
    case = trial.case
    same = replace(trial, case=replace(case, kind="any", seed=0), into_out=False)
    plan = planned.get(same)
    first = plan is None
    inputs = make_inputs(case.problem, case.kind, case.seed, case.view)
    left, right = _operands(trial, inputs)
    out = inputs.out if trial.into_out else None
    if trial.device == "cpu":
        plan = plan or gm.plan(trial.op, left, right, **_options(trial, case.problem))
        result = _call(trial, left, right, out)
    else:
        given = on_device.placed(trial.op, inputs, trial.device, trial.library)
        plan = plan or gm.plan(trial.op, given.left, given.right, **_options(trial, case.problem))
        result = on_device.multiply(given, functools.partial(_call, trial), out)
    planned.clear()
    planned[same] = plan
    if out is not None and trial.device == "cpu" and result is not out:
        return Outcome("wrong", np.inf, "the result is not the out that was given", plan.rung.name)
    rounding = Rounding.of(plan)
    verdict = _judged(inputs, rounding, _host(result))
    if verdict.ok and trial.device == "cpu":
        # From the second product on a plan may have a shorter way to its kernel.
        again = _call(trial, left, right, None)
        if not np.array_equal(_bits(again), _bits(result)):
            verdict = _judged(inputs, rounding, _host(again))
        elif case.seed % 2:
            by_plan = _planned(plan, trial, left, right, _host(result))
            if not np.array_equal(_bits(by_plan), _bits(result)):
                verdict = _judged(inputs, rounding, _host(by_plan))
    if verdict.ok and trial.device == "cpu" and trial.rung is None and first:
        plan.explain()
        deep = _with_unit_axes(trial, left, right, _host(result).shape)
        if not np.array_equal(_bits(deep), _bits(result)):
            other = _with_unit_axes(trial, left, right, None)
            verdict = _judged(inputs, Rounding.of(other), deep)
    if verdict.ok and relations.is_repeated(inputs, rounding.arithmetic):
        verdict = _repeated(trial, inputs, verdict)
    return Outcome("ok" if verdict.ok else "wrong", verdict.ratio, verdict.text, plan.rung.name)


def _planned(plan: gm.Plan, trial: Trial, left: Any, right: Any, first: Array) -> Any:
    """Return the product by its plan, which says nothing of NaN to NumPy.

    Integers, whose sums are the same in any order, go into an `out` that the plan was not made for.
    """
    strange = trial.into_out and trial.case.kind == "integers" and first.ndim > 0
    with np.errstate(all="raise"):
        return plan(left, right, out=_strange(first) if strange else None)


def _with_unit_axes(trial: Trial, left: Any, right: Any, shape: tuple[int, ...] | None) -> Any:
    """Return the product of operands with axes of one entry before theirs; of no shape, its plan.

    Every third time one independent of the batch is planned and explained, too. Every fourth time
    one operand is there twice along an axis that the other has not: the second is returned.
    """
    more = (None,) * (trial.case.seed % 41)
    left, right = (
        one[more] if isinstance(one, np.ndarray) and one.ndim > 1 else one for one in (left, right)
    )
    one = left if trial.case.seed % 8 else right
    twice = trial.case.seed % 4 == 0 and isinstance(one, np.ndarray) and one.ndim > 1
    if twice:
        one = np.repeat(one[None, None], 2, axis=0)
        left, right = (one, right) if trial.case.seed % 8 else (left, one)
    if shape is None:
        return gm.plan(trial.op, left, right, **_options(trial, trial.case.problem))
    if trial.case.seed % 3 == 0 and left.dtype.kind != "c":
        options: dict[str, Any] = {"batch_invariant": True, "out_dtype": trial.case.problem.out}
        with contextlib.suppress(TypeError, ValueError):  # not every product has such a rung
            gm.plan(trial.op, left, right, **options).explain()
    found = _host(_call(trial, left, right, None))
    return found.reshape(2, *shape)[1] if twice else found.reshape(shape)


def _strange(like: Array) -> Array:
    """Return an array with gaps along all axes, those of one element with a step of odd bytes."""
    room = np.empty([2 * size + 1 for size in like.shape], like.dtype)
    steps = [
        step + 1 if size == 1 else 2 * step
        for size, step in zip(like.shape, room.strides, strict=True)
    ]
    return np.ndarray(like.shape, like.dtype, room.view(np.uint8).data, 0, steps)


def _judged(inputs: Inputs, rounding: Rounding, result: Array) -> oracle.Verdict:
    problem = inputs.case.problem
    if relations.too_large(problem, inputs.case.kind):
        return relations.judge_large(inputs, rounding.arithmetic, rounding.params, result)
    truth = reference(problem, inputs.a, inputs.b, exact=inputs.case.kind == "integers")
    return oracle.judge(problem, rounding.arithmetic, rounding.params, inputs, result, truth)


def _repeated(trial: Trial, inputs: Inputs, verdict: oracle.Verdict) -> oracle.Verdict:
    """Judge a right product by repeating it rearranged, where the trial's rung takes that."""
    try:
        second = relations.repeat(inputs, _multiplier(trial))
    except ValueError as error:
        if trial.rung and str(error).startswith(f"rung {trial.rung} cannot"):
            return verdict
        raise
    return verdict if second.ok else second


def _multiplier(trial: Trial) -> Callable[[Array, Array], Array]:
    """Return how a trial multiplies, as a function of any two matrices."""

    def multiply(a: Array, b: Array) -> Array:
        if trial.op == "matmul":
            return _host(_product(trial, a, b))
        x = b[..., 0]
        left, right = (a, x) if trial.op == "matvec" else (x, a.swapaxes(-1, -2))
        return _host(_product(trial, left, right))[..., None]

    return multiply


def _operands(trial: Trial, inputs: Inputs) -> tuple[Any, Any]:
    """Return the operands in the order of the public function; vecmat sees A transposed."""
    if trial.op != "vecmat":
        return inputs.a, inputs.b
    a = inputs.a
    return inputs.b, a.T if isinstance(a, gm.QuantizedMatrix) else a.swapaxes(-1, -2)


def _options(trial: Trial, problem: Problem) -> dict[str, Any]:
    return {
        "activations": "float" if problem.quant is None else problem.quant.activations,
        "out_dtype": problem.out,
        "rung": trial.rung,
        "params": None if trial.params is None else dict(trial.params),
    }


def _product(trial: Trial, left: Any, right: Any) -> Any:
    """Multiply host arrays on the trial's device."""
    if trial.device == "cpu":
        return _call(trial, left, right, None)
    placed = gm.asarray(left, device=trial.device), gm.asarray(right, device=trial.device)
    return gm.asarray(_call(trial, *placed, None), device="cpu")


def _call(trial: Trial, left: Any, right: Any, out: Any) -> Any:
    return getattr(gm, trial.op)(left, right, out=out, **_options(trial, trial.case.problem))


def _host(result: Any) -> Array:
    array: Array = np.asarray(result)
    return array


def _bits(result: Any) -> Array:
    return np.ascontiguousarray(_host(result)).reshape(-1).view(np.uint8)


def snippet(trial: Trial) -> str:
    """Return Python that repeats a trial by hand.

    >>> print(snippet(Trial("matvec", Case(Problem("matvec", 2, 3)))).splitlines()[0])
    from gemmule_lab.verify.random_products import Case, Problem, QuantSpec, Trial, run
    """
    return (
        "from gemmule_lab.verify.random_products import Case, Problem, QuantSpec, Trial, run\n"
        f"print(run({trial!r}))"
    )
