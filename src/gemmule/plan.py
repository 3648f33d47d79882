"""The frozen `Plan`: one choice with its launcher, callable many times."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from numpy.typing import NDArray

from gemmule import backends
from gemmule.arrays.interop import (
    check_out,
    empty_like_kind,
    mark_written,
    to_kind,
    unwrap_all,
)
from gemmule.backends.base import Run
from gemmule.backends.cuda import convert
from gemmule.backends.explained import explained
from gemmule.core.caches import remembered
from gemmule.core.canonical import NAMES, Call, Options, canonical
from gemmule.core.choice import Choice
from gemmule.core.operand import Factor, Form, Operand, deciding, multiplied
from gemmule.core.problem import COMPLEX, FLOATS, ITEMSIZE, Problem, numpy_dtype
from gemmule.core.rung import Rung
from gemmule.dispatch.bind import bind
from gemmule.dispatch.host import FastPath
from gemmule.errors import INSTALL
from gemmule.tuning.choosing import chosen

if TYPE_CHECKING:
    import jax
    import torch

Result = TypeVar("Result")
Array = TypeVar("Array", NDArray[Any], "torch.Tensor", "jax.Array")
log = logging.getLogger("gemmule")


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """One product, decided once and callable many times; frozen.

    ``plan(A, x)`` computes with operands of the planned problem: equal shapes, dtypes, layouts and
    at least the planned alignment; others raise ValueError. `explain()` tells what was chosen and
    why; `tune()` measures the alternatives and returns a new plan. A plan can be pickled: whoever
    loads it chooses anew, for the machine there.

    >>> import numpy as np, gemmule as gm
    >>> A, x = np.eye(3, dtype=np.float32), np.ones(3, np.float32)
    >>> plan = gm.plan("matvec", A, x)
    >>> plan(2 * A, x).tolist(), plan.rung.name
    ([2.0, 2.0, 2.0], 'blas')
    """

    op: str
    choice: Choice
    options: Options
    forms: tuple[Form, Form]
    device: str
    _run: Run
    fast_path: FastPath | None = None

    def __repr__(self) -> str:
        rung = self.choice.rung
        return f"Plan({self.problem.describe()}: {rung.folder}/{rung.name} on {self.device})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was asked for; whoever loads the plan chooses on its own machine."""
        return resolve, (self.op, *self.forms, None, self.device, self.options)

    def _repr_html_(self) -> str:
        """Return the explanation as a small table, for notebooks."""
        from html import escape

        rows = ((line[:11], line[11:]) for line in self.explain().splitlines())
        cells = (f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows)
        return f"<table>{''.join(cells)}</table>"

    @property
    def short_way(self) -> FastPath | None:
        """The name that `fast_path` had in release 0.1.0."""
        return self.fast_path

    @property
    def problem(self) -> Problem:
        """The canonical problem; where vectors go one by one, that of one."""
        return self.choice.call.problem

    @property
    def rung(self) -> Rung:
        """The rung that runs."""
        return self.choice.rung

    @property
    def params(self) -> Mapping[str, Any]:
        """The rung's parameter values."""
        return dict(self.choice.params)

    @property
    def launcher(self) -> Run:
        """What launches it, on operands of the canonical order."""
        return self._run

    @property
    def reason(self) -> str:
        """Why this rung was chosen."""
        return self.choice.reason

    @overload
    def __call__(self, a: Any, b: Any, /, *, out: Result) -> Result: ...
    @overload
    def __call__(self, a: Any, b: Array, /) -> Array: ...
    @overload
    def __call__(self, a: Array, b: Factor, /) -> Array: ...
    def __call__(self, a: Any, b: Any, /, *, out: Any = None) -> Any:
        """Compute the planned product of `a` and `b`, into `out` where given.

        For a function of one operand, as solvers want it: ``functools.partial(plan, A)``, and with
        SciPy `operator`.
        """
        fast_path = self.fast_path
        if fast_path is not None:
            result = fast_path.call(a, b, out)
            if result is not None:
                return result
        if "torch" in sys.modules:
            from gemmule.dispatch.tracked import refuse_plan  # only where PyTorch is

            refuse_plan(a, b)
        left, right, target = unwrap_all(a, b, ("the first operand", "the second operand"), out)
        self._check_device(deciding(left, right).device)
        if target is None and (left.form, right.form) == self.forms:
            return self.execute(left, right, None)
        form = None if target is None else target.form
        return rebound(self, left.form, right.form, form).execute(left, right, target)

    def _check_device(self, device: str) -> None:
        if device != self.device:
            raise ValueError(
                f"this plan is for {self.device}, but the operands lie on {device}. "
                "Make another plan with gm.plan."
            )

    def execute(
        self,
        left: Operand,
        right: Operand,
        out: Operand | None,
        alpha: complex = 1.0,
        beta: complex = 0.0,
    ) -> Any:
        """Run on unwrapped operands of exactly the planned forms; return the foreign result."""
        call = self.choice.call
        like = deciding(left, right)
        if out is None:
            fresh = empty_like_kind(call.out_shape, call.problem.out, like)
            self.launch(left, right, fresh, alpha, beta)
            return to_kind(fresh, like)
        check_out(out, call.out_shape, call.problem.out, [left, right])
        self.launch(left, right, out, alpha, beta)
        mark_written(out)
        return out.original

    def launch(
        self, left: Operand, right: Operand, out: Operand, alpha: complex, beta: complex
    ) -> None:
        """Run on checked operands: out = alpha * product + beta * out."""
        if alpha == 0 and self.device != "cpu":  # kernels read what they are given
            self._without_terms(left, right, out, beta)
            return
        if self.choice.call.swapped:
            left, right = right, left
        self._run(left, right, out, alpha, beta)

    def _without_terms(self, left: Operand, right: Operand, out: Operand, beta: complex) -> None:
        """Set out = beta * out by a product that sums nothing: no NaN of an operand gets in."""
        plain = left if left.form.quant is None else right
        shape, dtypes = out.form.shape, [plain.form.dtype] * 2
        if left.form.quant is None is right.form.quant:
            dtypes = [left.form.dtype, right.form.dtype]
        shapes = ((shape[0], 0), (0, *shape[1:]))
        first, second = map(Form.packed, shapes, dtypes)
        options = Options(out_dtype=self.problem.out)
        plan = resolve(self.op, first, second, out.form, self.device, options)
        plan._run(plain, plain, out, 1.0, beta)

    def explain(self) -> str:
        """Return what runs, why, what it should cost, what is copied, and the runner-up."""
        return "\n".join(explained(self.op, self.choice, self._run))

    def operator(self, A: Any, /) -> Any:
        """Return A as a `scipy.sparse.linalg.LinearOperator` whose matvec is this plan.

        A : the planned matrix of a matvec on the host. SciPy's solvers call it with vectors of
        their own dtype, which are converted to the planned one; its other products (``A^H y``, and
        those by matrices) are `gemmule.matmul`'s. ValueError for another plan; ImportError, saying
        what to install, without SciPy.

        >>> import gemmule as gm, numpy as np
        >>> from scipy.sparse.linalg import eigsh  # doctest: +SKIP
        >>> A = np.diag(np.arange(1.0, 9.0))
        >>> p = gm.plan("matvec", A, A[0])
        >>> eigsh(p.operator(A), k=1, return_eigenvectors=False).round(6)  # doctest: +SKIP
        array([8.])
        """
        if self.op != "matvec" or len(self.forms[1].shape) != 1 or self.device != "cpu":
            raise ValueError(f"{self!r} is no product of one matrix and one vector on the host.")
        try:
            from scipy.sparse.linalg import LinearOperator
        except ImportError:
            raise ImportError(f"operators are SciPy's: {INSTALL['io']}") from None
        taken, given = numpy_dtype(self.forms[1].dtype), numpy_dtype(self.problem.out)
        return LinearOperator(
            self.forms[0].shape,
            lambda x: self(A, x.reshape(-1).astype(taken, copy=False)),
            rmatvec=lambda y: multiplied(A.T, y.conj().astype(taken, copy=False)).conj(),
            matmat=lambda X: multiplied(A, X.astype(taken, copy=False)),
            dtype=given,
        )

    def tune(self, *, max_seconds: float = 30.0) -> Plan:
        """Measure this problem's candidates cold and return a plan for the winner.

        The default stays unless a candidate wins by more than the noise; every candidate is
        verified against the oracle before it is timed. The choice is stored and later plans of
        the same problem on the same device use it. ``GEMMULE_TUNE=0`` makes this a no-op.
        """
        from gemmule.tuning.tuner import tuned_choice  # late: it loads the oracle and the clocks

        choice = tuned_choice(self.choice, self.options.rung, self.device, max_seconds)
        if choice is None:
            return self
        run = backends.get(choice.machine.backend).prepare(choice)
        fast_path = bind(run, choice.call, *self.forms, self.device)
        return replace(self, choice=choice, _run=run, fast_path=fast_path)


@remembered(256)
def rebound(plan: Plan, left: Form, right: Form, out: Form | None) -> Plan:
    """Return the plan for operands of other strides but the same problem; cached."""
    mine = canonical(plan.op, *plan.forms, None, plan.options).problem
    given = canonical(plan.op, left, right, None, plan.options)  # an `out` may fold other batches
    same = replace(given.problem, alignment=mine.alignment) == mine
    if not same or given.problem.alignment < mine.alignment:
        raise ValueError(
            f"this plan computes {mine.describe()} at {mine.alignment}-byte alignment; given was "
            f"{given.problem.describe()} at {given.problem.alignment}. Make another plan: gm.plan."
        )
    theirs = canonical(plan.op, left, right, out, plan.options).problem
    options = plan.options
    if plan.rung.refusal(theirs) is None:  # a vendor's library may not take this result
        params = tuple(plan.choice.params.items())
        options = replace(options, rung=plan.rung.name, params=params)
    return resolve(plan.op, left, right, out, plan.device, options)


@remembered(4096)
def resolve(
    op: str, left: Form, right: Form, out: Form | None, device: str, options: Options
) -> Plan:
    """Return the plan for operands of these forms on `device`; cached."""
    call = canonical(op, left, right, out, options)
    backend = backends.get("cpu" if device == "cpu" else "cuda")
    try:
        choice = chosen(call, backend.machine(device), device, options)
    except (TypeError, ValueError):
        plan = None if backend.adapts() else _widened(call, left, right, out, device, options)
        if plan is None:
            raise
        return plan
    copies = "; ".join(choice.copies)
    where = f"{choice.rung.folder}/{choice.rung.name} {dict(choice.params)} ({choice.reason})"
    log.debug("%s -> %s%s", call.problem.describe(), where, f"; {copies}" if copies else "")
    if any(copy.startswith("A ") for copy in choice.copies) and call.problem.matrix_bytes > 2**20:
        log.warning("%s: %s", call.problem.describe(), copies)
    run = backend.prepare(choice)
    fast_path = bind(run, call, left, right, device)
    return Plan(op, choice, options, (left, right), device, run, fast_path)


def _widened(
    call: Call, left: Form, right: Form, out: Form | None, device: str, options: Options
) -> Plan | None:
    """Return the plan for operands of one float dtype, after those of another are converted.

    None where that does not help. The cheapest conversion that some rung then takes.
    """
    dtype = call.problem.out
    if any(name not in (*FLOATS, *COMPLEX) for name in (left.dtype, right.dtype, dtype)):
        return None
    dtypes = (left.dtype, right.dtype)
    ways = {(dtype, right.dtype), (left.dtype, dtype), (dtype, dtype)} - {dtypes}
    for way in sorted(ways, key=lambda way: _converted_elements(left, right, way)):
        forms = [
            form if form.dtype == to else Form.packed(form.shape, to)
            for form, to in zip((left, right), way, strict=True)
        ]
        try:
            plan = resolve(call.op, *forms, out, device, replace(options, out_dtype=dtype))
        except (TypeError, ValueError):
            continue
        named = zip(NAMES[call.op], (left, right), way, strict=True)
        words = [_copied(*one) for one in named if one[1].dtype != one[2]]
        choice = replace(plan.choice, copies=(*words, *plan.choice.copies))
        seen = way[::-1] if choice.call.swapped else way
        run = convert.Converting(plan._run, seen)
        return Plan(call.op, choice, options, (left, right), device, run)
    return None


def _copied(name: str, form: Form, dtype: str) -> str:
    nbytes = math.prod(form.shape) * ITEMSIZE[dtype]
    return f"{name} converted from {form.dtype} to {dtype}, {nbytes:,} bytes"


def _converted_elements(left: Form, right: Form, way: tuple[str, str]) -> int:
    pairs = zip((left, right), way, strict=True)
    return sum(math.prod(form.shape) for form, to in pairs if form.dtype != to)
