"""Products with an epilogue: where it is computed, its checks, and `EpiloguePlan`.

On a GPU the kernel that multiplies, or cuBLAS, applies an epilogue to its sums where it can; else
the sums are written in the type that they were summed in, and one pass makes the result of them. On
the host the pass is NumPy's, over rows that lie in the cache. Either way a result is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gemmule import backends
from gemmule.arrays.interop import (
    check_out,
    check_same_kind,
    empty_like_kind,
    mark_written,
    to_kind,
    unwrap,
    unwrap_all,
)
from gemmule.backends.cpu import epilogue as on_host
from gemmule.backends.cuda import arrays as device_arrays
from gemmule.backends.cuda.epilogue import Pass, Place, steps_of, sums_dtype
from gemmule.backends.cuda.finished import FinishedLauncher
from gemmule.backends.cuda.library.finished import FinishedLibrary, knows, library_run
from gemmule.backends.explained import explained
from gemmule.choose import finished_choice
from gemmule.core import epilogue as rules
from gemmule.core.caches import remembered
from gemmule.core.canonical import NAMES, Call, Options, canonical
from gemmule.core.choice import Choice
from gemmule.core.epilogue import FUNCTIONS, Epilogue, Shape
from gemmule.core.operand import Form, Operand, deciding
from gemmule.core.problem import ITEMSIZE, Problem
from gemmule.core.rung import CudaRung, Machine, Rung
from gemmule.plan import Plan, resolve
from gemmule.scaled import (
    OUTS,
    Scaled,
    finishing,
    result_dtype,
    result_shape,
    scaled_product,
    scales_of,
)
from gemmule.scaled import ScaledPlan as ScaledPlan
from gemmule.scaled import planned_scaled as planned_scaled
from gemmule.storage import evidence

Scalars = tuple[float, float]


class Given(NamedTuple):
    """A call's operands, unwrapped and checked, and where its result goes."""

    a: Operand
    b: Operand
    out: Operand
    fresh: bool
    scalars: Scalars
    operands: Mapping[str, Operand]
    what: Shape

    def result(self) -> Any:
        """Return the caller's result."""
        if self.fresh:
            return to_kind(self.out, deciding(self.a, self.b))
        mark_written(self.out)
        return self.out.original

    def places(self) -> dict[str, Place]:
        """Return where the epilogue's operands lie."""
        shape = self.out.form.shape
        return {
            name: Place(one.pointer, steps_of(shape, one.form))
            for name, one in self.operands.items()
        }


def finished_product(a: Any, b: Any, epilogue: Epilogue, out: Any, options: Options) -> Any:
    """Return the product with an epilogue; PyTorch learns nothing of it."""
    given = taken(a, b, epilogue, out, options)
    if 0 in given.out.form.shape:
        return given.result()
    way = _way(given, options)
    way.run(given)
    return given.result()


def scaled_and_finished(
    operands: tuple[Any, Any, Any, Any], epilogue: Epilogue, out: Any, options: Options
) -> Any:
    """Return the scaled product (A, B and both scales) with an epilogue.

    The kernel that scales applies it, or a pass over scaled sums in float32.
    """
    left, right, target = unwrap_all(*operands[:2], NAMES["matmul"], out)
    dtype = result_dtype(left.form.dtype, right.form.dtype, options.out_dtype)
    shape = result_shape(left.form.shape, right.form.shape)
    scales = scales_of(*operands[2:], (*shape, left.form.shape[1]), left)
    given = _checked((left, right), epilogue, target, (shape, dtype))
    if 0 in shape:
        return given.result()
    whole = Scaled(left, right, scales, given.out)
    kernel = finishing(whole, dtype, epilogue.activation, options)
    if kernel is not None:
        kernel.multiply(given.a, given.b, given.out, given.scalars, given.places(), scales[:2])
    else:
        sums = scaled_product(*operands, None, replace(options, out_dtype=OUTS[0]))
        _pass_over(unwrap(sums, "the sums"), given)
    return given.result()


def taken(a: Any, b: Any, epilogue: Epilogue, out: Any, options: Options) -> Given:
    """Unwrap and check what a call was given."""
    if not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"epilogue is a {type(epilogue).__name__}; give a gemmule.Epilogue(bias=..., ...)."
        )
    left, right, target = unwrap_all(a, b, NAMES["matmul"], out)
    call = canonical("matmul", left.form, right.form, None, options)
    result = call.out_shape, call.problem.out
    rules.check_result(*result)
    return _checked((left, right), epilogue, target, result)


def _checked(
    pair: tuple[Operand, Operand],
    epilogue: Epilogue,
    target: Operand | None,
    result: tuple[tuple[int, ...], str],
) -> Given:
    """Check the epilogue's scalars and operands, and the result's place."""
    shape, dtype = result
    like = deciding(*pair)
    alpha, beta = (
        rules.checked_scalar(name, getattr(epilogue, name)) for name in ("alpha", "beta")
    )
    operands = {}
    for name, array in epilogue.operands().items():
        one = unwrap(array, f"the epilogue's {name}")
        check_same_kind(like, one, ("A", f"the epilogue's {name}"))
        if one.form.quant is not None or one.form.ready is not None:
            raise TypeError(f"the epilogue's {name} is a matrix of codes or prepared; give arrays.")
        rules.check_operand(name, one.form.shape, one.form.dtype, shape, dtype)
        operands[name] = one
    if "residual" in operands and not (epilogue.activation or {"C", "gate"} & operands.keys()):
        operands["C"], beta = operands.pop("residual"), 1.0  # the same, and more kernels know it
    by_row = "bias" in operands and rules.bias_is_by_row(operands["bias"].form.shape, shape)
    names = tuple(name for name in rules.OPERANDS if name in operands)
    what = Shape(epilogue.activation, names, by_row, alpha != 1)
    fresh = target is None
    if target is None:
        target = empty_like_kind(shape, dtype, like)
    else:
        check_same_kind(like, target, ("A", "out"))
        check_out(target, shape, dtype, [*pair, *operands.values()])
    return Given(*pair, target, fresh, (alpha, beta), operands, what)


@dataclass(frozen=True, eq=False)
class Way:
    """How products of some forms get their epilogue; `kernel` where the one that multiplies does.

    plan: of the product, whose result is the sums where a pass follows.
    """

    plan: Plan
    kernel: FinishedLauncher | FinishedLibrary | None = None

    def run(self, given: Given) -> None:
        """Compute into the result's place."""
        if self.kernel is not None:
            places = given.places()
            if self.kernel.takes(places):
                self.kernel.multiply(given.a, given.b, given.out, given.scalars, places)
                return
        sums = given.out
        if sums_dtype(sums.form.dtype) != sums.form.dtype:
            like = deciding(given.a, given.b)
            shape, wide = sums.form.shape, sums_dtype(sums.form.dtype)
            sums = empty_like_kind(shape, wide, like)
        self.plan.launch(given.a, given.b, sums, 1.0, 0.0)
        _pass_over(sums, given)

    def words(self, what: Shape, out: str) -> str:
        """Return where the epilogue is computed, for people."""
        if isinstance(self.kernel, FinishedLauncher):
            return f"{what.describe()}, by the kernel that multiplies"
        if self.kernel is not None:
            return f"{what.describe()}, by the library, or a pass where C or bias has gaps"
        wide = sums_dtype(out)
        where = "where the result will lie" if wide == out else f"in {wide}"
        return f"{what.describe()}, by a pass over the sums {where}"


@dataclass(frozen=True, eq=False, repr=False)
class EpiloguePlan:
    """A product with an epilogue, decided once and callable many times; frozen.

    ``plan(A, B)`` computes with operands of the planned problem, and with what the epilogue held or
    another that is given: arrays may be others, which parts there are may not. `explain()` tells
    what was chosen, and where the epilogue is computed.

    >>> import numpy as np, gemmule as gm
    >>> A, B, bias = np.eye(2), np.ones((2, 3)), np.arange(3.0)
    >>> plan = gm.plan("matmul", A, B, epilogue=gm.Epilogue(bias=bias))
    >>> plan(A, B)
    array([[1., 2., 3.],
           [1., 2., 3.]])
    >>> plan.explain().splitlines()[-1]
    'epilogue   A B + bias of columns, by a pass over the sums where the result will lie'
    """

    epilogue: Epilogue
    problem: Problem
    options: Options
    what: Shape
    device: str
    way: Way

    def __repr__(self) -> str:
        return f"EpiloguePlan({self.problem.describe()}, {self.what.describe()} on {self.device})"

    @property
    def choice(self) -> Choice:
        """The rung that runs, with its parameters and why."""
        return self.way.plan.choice if self.way.kernel is None else self.way.kernel.choice

    @property
    def rung(self) -> Rung:
        """The rung that runs."""
        return self.choice.rung

    def __call__(self, a: Any, b: Any, /, *, out: Any = None, epilogue: Any = None) -> Any:
        """Compute the planned product of `a` and `b`, into `out` where given."""
        given = taken(a, b, epilogue or self.epilogue, out, self.options)
        problem = _problem(given, self.options)
        device, mine = deciding(given.a, given.b).device, self.problem
        same = replace(problem, alignment=mine.alignment, layout_out=mine.layout_out) == mine
        if not same or given.what != self.what or device != self.device:
            raise ValueError(
                f"this plan computes {mine.describe()}, {self.what.describe()}, on {self.device}; "
                f"given was {problem.describe()}, {given.what.describe()}, on {device}. Make "
                "another plan: gm.plan."
            )
        if 0 not in given.out.form.shape:
            _way(given, self.options).run(given)
        return given.result()

    def explain(self) -> str:
        """Return what runs, why, what it should cost, and where the epilogue is computed."""
        kernel = self.way.kernel
        run = kernel if isinstance(kernel, FinishedLauncher) else self.way.plan.launcher
        lines = explained("matmul", self.choice, run)
        return "\n".join([*lines, f"epilogue   {self.way.words(self.what, self.problem.out)}"])


def planned(a: Any, b: Any, epilogue: Epilogue, options: Options) -> EpiloguePlan:
    """Return the plan of a product with an epilogue."""
    given = taken(a, b, epilogue, None, options)
    device = deciding(given.a, given.b).device
    problem = _problem(given, options)
    return EpiloguePlan(epilogue, problem, options, given.what, device, _way(given, options))


def _problem(given: Given, options: Options) -> Problem:
    form = None if given.fresh else given.out.form
    return canonical("matmul", given.a.form, given.b.form, form, options).problem


def _pass_over(sums: Operand, given: Given) -> None:
    """Make the result of its sums, which may lie where it will."""
    out = given.out
    if out.device == "cpu":
        arrays = {name: one.array for name, one in given.operands.items()}
        on_host.finish(sums.array, out.array, given.scalars, arrays, given.what.activation)
        return
    ordinal = device_arrays.ordinal_of(out)
    places = (Place(one.pointer, one.form.strides) for one in (sums, out))
    stream = device_arrays.current_stream(out, ordinal)
    finish_on = pass_on(out.form.dtype, given.what.activation, ordinal)
    finish_on(out.form.shape, (*places,), given.scalars, given.places(), stream)


@remembered(64)
def pass_on(dtype: str, activation: str | None, ordinal: int) -> Pass:
    """Return the pass over results of one dtype on a device, compiled once."""
    return Pass(dtype, activation, ordinal)


def _way(given: Given, options: Options) -> Way:
    form = None if given.fresh else given.out.form
    device = deciding(given.a, given.b).device
    return resolved(given.a.form, given.b.form, form, device, (given.what, options))


@remembered(4096)
def resolved(a: Form, b: Form, out: Form | None, device: str, asked: tuple[Shape, Options]) -> Way:
    """Return how products of these forms get their epilogue; cached.

    The kernel of the plan's own rung, where it knows epilogues; else another that does, where it
    takes no longer than the plan and a pass.
    """
    what, options = asked
    call = canonical("matmul", a, b, out, options)
    dtype, wide = call.problem.out, sums_dtype(call.problem.out)
    sums = out if wide == dtype else None
    apart = resolve("matmul", a, b, sums, device, replace(options, out_dtype=wide))
    plain = (a.ready, b.ready) == (None, None) and a.quant is None and b.quant is None
    if device == "cpu" or not plain or call.swapped or call.outer:
        return Way(apart)
    if call.problem.op != "matmul" or call.problem.batch_invariant:
        return Way(apart)
    options = replace(options, out_dtype=dtype)
    whole = resolve("matmul", a, b, out, device, options)
    library = library_run(whole.launcher)
    if library is not None and knows(what, whole.choice):
        return Way(apart, FinishedLibrary(whole.choice, library, what))
    choice = _fused(call, apart, whole, asked)
    return Way(apart) if choice is None else Way(apart, FinishedLauncher(choice, what.activation))


def _is_fused(choice: Choice, machine: Machine, end: str) -> bool:
    """Tell whether the rung of a choice has a proved variant with this end of its name."""
    rung, problem = choice.rung, choice.problem
    if not isinstance(rung, CudaRung) or rung.refusal_finished(problem) is not None:
        return False
    return backends.get("cuda").proved(rung, problem, machine, end)


def _fused(call: Call, apart: Plan, whole: Plan, asked: tuple[Shape, Options]) -> Choice | None:
    """Return the choice of a kernel that applies the epilogue, or None.

    apart: the plan of sums for a pass; whole: that of the same product without an epilogue.
    """
    what, options = asked
    machine, function = whole.choice.machine, FUNCTIONS[what.activation]
    if options.rung is not None:
        return finished_choice(call, machine, function, options.rung, options.params)
    if call.problem.out == "float32" and what.activation not in (None, "relu"):
        return None  # whose exact functions take a pass less time than a kernel's few warps
    if _is_fused(whole.choice, machine, evidence.FINISHED[function]):
        return whole.choice
    best = finished_choice(call, machine, function, None, None)
    moved = call.problem.outputs * (2 * ITEMSIZE["float32"] + ITEMSIZE[call.problem.out])
    later = (apart.choice.expected_s or math.inf) + moved / machine.read_bytes_per_s
    return None if best is None or (best.expected_s or 0.0) > later else best
