"""From a problem to a choice: a tuned entry, else the rungs' heuristics, else the simplest rung.

`choose` is pure and cached; a `Plan` holds one choice and a bound launcher, and is frozen.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gemmule import backends, hostcall, store
from gemmule.arrays import (
    Form,
    Operand,
    check_out,
    check_same_kind,
    empty_like_kind,
    to_kind,
    unwrap,
)
from gemmule.canonical import Call, Options, canonical
from gemmule.hostcall import ShortWay, short_way
from gemmule.problem import ITEMSIZE, Problem, result_dtype
from gemmule.rung import Machine, Rung, all_rungs

log = logging.getLogger("gemmule")

Frozen = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A rung with its parameters for a problem, and why.

    `problem` is what the rung is given; where it differs from ``call.problem`` the back end copies
    operands first, and `copies` says so in words.
    """

    call: Call
    problem: Problem
    rung: Rung
    params: Mapping[str, Any]
    machine: Machine
    reason: str
    expected_s: float | None
    runner_up: str
    copies: tuple[str, ...]


def choose(
    call: Call, machine: Machine, rung: str | None = None, params: Mapping[str, Any] | None = None
) -> Choice:
    """Choose rung and parameters for a canonical call on a machine.

    With `rung` the named one is taken (ValueError where it cannot compute the problem). Otherwise
    only proved rungs whose arithmetic is float32 or better take part.
    """
    if call.problem.batch_invariant and call.problem.batch != 1:
        return _as_alone(call, machine, rung, params)
    backend = backends.get(machine.backend)
    if rung is not None:
        return _named(call, machine, rung, params)
    if params:
        raise ValueError("params= goes with rung=: name the rung they belong to.")
    if call.problem.outputs * call.problem.batch == 0:
        return _simplest(call, machine, "nothing is computed: the result is empty")
    tuned = store.lookup(machine, call.problem)
    if tuned is not None and backend.proved(tuned.rung, machine):
        return Choice(
            call,
            call.problem,
            tuned.rung,
            tuned.params,
            machine,
            f"tuned on this device, {tuned.date}",
            tuned.time_s,
            "",
            (),
        )
    ranked = sorted(_suggestions(call, machine), key=lambda choice: choice.expected_s or 0.0)
    if not ranked:
        return _simplest(call, machine)
    best = ranked[0]
    other = next((c for c in ranked[1:] if c.rung is not best.rung), None)
    runner_up = "" if other is None else _in_words(other)
    return replace(best, runner_up=runner_up)


def _as_alone(
    call: Call, machine: Machine, rung: str | None, params: Mapping[str, Any] | None
) -> Choice:
    """Choose for one product of a batch as if it were alone, and run the whole batch that way.

    Where the chosen rung does not take the batch in one go, the back end walks it as outer axes.
    """
    problem = call.problem
    one = replace(call, problem=problem.alone(), outer=(*call.outer, problem.batch))
    choice = choose(one, machine, rung, params)
    expected_s = None if choice.expected_s is None else choice.expected_s * problem.batch
    together = replace(
        choice.problem, batch=problem.batch, shared_a=problem.shared_a, shared_b=problem.shared_b
    )
    if choice.rung.refusal(together) is None and all(
        constraint.holds(together, choice.params) for constraint in choice.rung.constraints
    ):
        return replace(choice, call=call, problem=together, expected_s=expected_s)
    return replace(choice, expected_s=expected_s)


def _in_words(choice: Choice) -> str:
    params = ", ".join(f"{k}={v}" for k, v in choice.params.items())
    expected = "" if choice.expected_s is None else f", {choice.expected_s * 1e6:.1f} us expected"
    return f"{choice.rung.folder}/{choice.rung.name}({params}){expected}"


def eligible(rung: Rung, problem: Problem) -> bool:
    """Tell whether the rung is for automatic choices, and its arithmetic good enough."""
    if rung.by_name_only:
        return False
    arithmetic = rung.arithmetic(problem)
    if problem.quant is not None and problem.quant.activations == "int8":
        return arithmetic.activations_bits is not None
    if problem.accumulate == "float16" and arithmetic.accumulator == "float16":
        return True
    if problem.precision == "tf32" and arithmetic.inputs == "tf32":
        return True
    return arithmetic.at_least_float32


def _suggestions(call: Call, machine: Machine) -> Iterator[Choice]:
    backend = backends.get(machine.backend)
    for problem, copies, cost_s in _variants(call.problem, machine):
        found = False
        for rung in all_rungs(machine.backend):
            if rung.refusal(problem) is not None or not eligible(rung, problem):
                continue
            suggestion = rung.suggest(problem, machine)
            if suggestion is None or not backend.proved(rung, machine):
                continue
            found = True
            yield Choice(
                call,
                problem,
                rung,
                rung.check_params(problem, suggestion.params),
                machine,
                "heuristic",
                suggestion.expected_s + cost_s,
                "",
                copies,
            )
        if found:
            return


def _variants(
    problem: Problem, machine: Machine
) -> Iterator[tuple[Problem, tuple[str, ...], float]]:
    """Yield the problem as it is, then (on back ends that copy) adapted ones, cheapest first."""
    yield problem, (), 0.0
    if not backends.get(machine.backend).adapts():
        return
    adapted: list[tuple[float, int, Problem, tuple[str, ...]]] = []
    for layout_a, layout_b in _layout_variants(problem):
        dtypes = (problem.a, problem.b, problem.out)
        quantized = problem.quant is not None
        for a, b, out in _dtype_variants(problem.op, dtypes, quantized, machine.backend):
            candidate = replace(
                problem, layout_a=layout_a, layout_b=layout_b, a=a, b=b, out=out, layout_out="row"
            )
            if candidate != problem:
                copies, moved = _copies(problem, candidate)
                adapted.append((moved, len(adapted), candidate, copies))
    for moved, _, candidate, copies in sorted(adapted, key=lambda item: item[:2]):
        yield candidate, copies, moved / machine.read_bytes_per_s


def _layout_variants(problem: Problem) -> list[tuple[str, str]]:
    layouts_a = [problem.layout_a] + (["row"] if problem.layout_a != "row" else [])
    layouts_b = [problem.layout_b] + (["row"] if problem.layout_b != "row" else [])
    return [(a, b) for a in layouts_a for b in layouts_b]


@functools.cache  # a few hundred dtype triples exist; asking every signature costs 0.5 ms
def _dtype_variants(
    op: str, own: tuple[str, str, str], quantized: bool, backend: str
) -> tuple[tuple[str, str, str], ...]:
    found = [own]
    for rung in all_rungs(backend):
        if rung.op != op or rung.quantized != quantized:
            continue
        for signature in rung.signatures:
            if signature not in found and _widens(own, signature, quantized):
                found.append(signature)
    return tuple(found)


def _widens(own: tuple[str, str, str], wider: tuple[str, str, str], quantized: bool) -> bool:
    """Whether operands of `own` convert to those of `wider` without loss, and the result back."""
    operands = zip(own[:2], wider[:2], strict=True)
    if quantized:
        if own[0] != wider[0]:
            return False
        operands = zip(own[1:2], wider[1:2], strict=True)
    try:
        if any(a != w and result_dtype(a, w) != w for a, w in operands):
            return False
        return own[2] == wider[2] or result_dtype(own[2], wider[2]) == wider[2]
    except TypeError:
        return False


def _copies(problem: Problem, adapted: Problem) -> tuple[tuple[str, ...], float]:
    words, moved = [], 0.0
    inner = problem.n if problem.op == "matvec" else problem.k
    sizes = (problem.m * inner, inner * (1 if problem.op == "matvec" else problem.n))
    before = ((problem.a, problem.layout_a), (problem.b, problem.layout_b))
    after = ((adapted.a, adapted.layout_a), (adapted.b, adapted.layout_b))
    for name, size, old, new in zip("AB", sizes, before, after, strict=True):
        if old == new:
            continue
        nbytes = size * problem.batch * ITEMSIZE.get(new[0], 1)
        moved += 4.0 * nbytes  # a strided or converting copy runs far below the read ceiling
        words.append(f"{name} copied from {old[0]} {old[1]} to {new[0]} {new[1]}, {nbytes:,} bytes")
    if adapted.out != problem.out:
        words.append(f"result converted from {adapted.out} to {problem.out}")
        moved += problem.outputs * problem.batch * ITEMSIZE[adapted.out]
    return tuple(words), moved


def _named(call: Call, machine: Machine, name: str, params: Mapping[str, Any] | None) -> Choice:
    named = [r for r in all_rungs(machine.backend) if r.name == name]
    if not named:
        known = ", ".join(dict.fromkeys(r.name for r in all_rungs(machine.backend)))
        raise ValueError(f"no {machine.backend} rung is called {name!r}; there are: {known}.")
    reasons = [f"{r.folder}/{name}: {r.refusal(call.problem)}" for r in named]
    for problem, copies, _ in _variants(call.problem, machine):
        for rung in named:
            if rung.refusal(problem) is None:
                suggestion = rung.suggest(problem, machine)
                if params is None and suggestion is not None:
                    chosen = rung.check_params(problem, suggestion.params)
                else:
                    chosen = rung.check_params(problem, params)
                expected = None if suggestion is None else suggestion.expected_s
                return Choice(
                    call,
                    problem,
                    rung,
                    chosen,
                    machine,
                    "named by the caller",
                    expected,
                    "",
                    copies,
                )
    raise ValueError(f"rung {name} cannot compute {call.problem.describe()}. {'; '.join(reasons)}.")


def _simplest(
    call: Call,
    machine: Machine,
    reason: str = "the simplest proved rung: no heuristic covers this problem",
) -> Choice:
    backend = backends.get(machine.backend)
    for problem, copies, _ in _variants(call.problem, machine):
        for rung in all_rungs(machine.backend):
            if (
                rung.refusal(problem) is None
                and eligible(rung, problem)
                and backend.proved(rung, machine)
            ):
                return Choice(
                    call,
                    problem,
                    rung,
                    rung.check_params(problem, None),
                    machine,
                    reason,
                    None,
                    "",
                    copies,
                )
    raise TypeError(
        f"no proved {machine.backend} rung computes {call.problem.describe()} on {machine.name}. "
        "Convert the operands to another dtype, or name a rung with rung=."
    )


@dataclass(frozen=True, eq=False)
class Plan:
    """One product, decided once and callable many times; frozen.

    ``plan(A, x)`` computes with operands of the planned problem: equal shapes, dtypes, layouts and
    at least the planned alignment; others raise ValueError. `explain()` tells what was chosen and
    why; `tune()` measures the alternatives and returns a new plan.
    """

    op: str
    choice: Choice
    options: Options
    forms: tuple[Form, Form]
    device: str
    rung_name: str | None
    _run: backends.Run = field(repr=False)
    short_way: ShortWay | None = field(repr=False, default=None)

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
    def reason(self) -> str:
        """Why this rung was chosen."""
        return self.choice.reason

    def __call__(self, a: Any, b: Any, /, *, out: Any = None) -> Any:
        """Compute the planned product of `a` and `b`, into `out` where given."""
        if self.short_way is not None:
            result = self.short_way.checked(a, b, out)
            if result is not None:
                return result
        left, right, target = operands(a, b, ("the first operand", "the second operand"), out)
        device = (right if left.library == "gemmule" else left).device
        self._check_device(device)
        if target is None and (left.form, right.form) == self.forms:
            return self.execute(left, right, None)
        return self._sibling(left, right, target).execute(left, right, target)

    def _check_device(self, device: str) -> None:
        if device != self.device:
            raise ValueError(
                f"this plan is for {self.device}, but the operands lie on {device}. "
                "Make another plan with gm.plan."
            )

    def _sibling(self, left: Operand, right: Operand, out: Operand | None) -> Plan:
        """Return this plan rebound to operands of other strides but the same problem."""
        target = None if out is None else out.form
        mine = canonical(self.op, *self.forms, None, self.options).problem
        theirs = canonical(self.op, left.form, right.form, target, self.options).problem
        if replace(theirs, alignment=mine.alignment, layout_out=mine.layout_out) != mine or (
            theirs.alignment < mine.alignment
        ):
            raise ValueError(
                f"this plan computes {mine.describe()} at {mine.alignment}-byte alignment; given "
                f"was {theirs.describe()} at {theirs.alignment}. Make another plan with gm.plan."
            )
        return resolve(
            self.op,
            left.form,
            right.form,
            None if out is None else out.form,
            self.device,
            self.options,
            self.rung.name,
            tuple(self.choice.params.items()),
        )

    def execute(
        self,
        left: Operand,
        right: Operand,
        out: Operand | None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> Any:
        """Run on unwrapped operands of exactly the planned forms; return the foreign result."""
        call = self.choice.call
        like = right if left.library == "gemmule" else left
        if out is None:
            fresh = empty_like_kind(call.out_shape, call.problem.out, like)
            self.launch(left, right, fresh, alpha, beta)
            return to_kind(fresh, like)
        check_out(out, call.out_shape, call.problem.out, [left, right])
        self.launch(left, right, out, alpha, beta)
        return out.original

    def launch(
        self, left: Operand, right: Operand, out: Operand, alpha: float, beta: float
    ) -> None:
        """Run on checked operands: out = alpha * product + beta * out."""
        if self.choice.call.swapped:
            left, right = right, left
        self._run(left, right, out, alpha, beta)

    def explain(self) -> str:
        """Return what runs, why, what it should cost, what is copied, and the runner-up."""
        choice, problem = self.choice, self.problem
        params = ", ".join(f"{k}={v}" for k, v in choice.params.items()) or "none"
        lines = [
            f"problem    {problem.describe()}",
            f"device     {choice.machine.name} ({choice.machine.arch})",
            f"rung       {choice.rung.folder}/{choice.rung.name}: {choice.rung.title}",
            f"parameters {params}",
            f"reason     {choice.reason}",
        ]
        if choice.expected_s is not None:
            share = problem.compulsory_bytes / choice.expected_s / choice.machine.read_bytes_per_s
            lines.append(
                f"expected   {choice.expected_s * 1e6:.1f} us, {share:.0%} of the read ceiling "
                f"({choice.machine.read_bytes_per_s / 1e9:,.0f} GB/s)"
            )
        if choice.runner_up:
            lines.append(f"runner-up  {choice.runner_up}")
        memory = choice.rung.workspace(choice.problem, choice.params, choice.machine)
        steps = (
            choice.rung.steps(choice.problem, choice.params, choice.machine)
            if choice.rung.steps is not None
            else ()
        )
        shared = max((step.smem for step in steps), default=0)
        lines.append(f"memory     workspace {memory:,} bytes, dynamic shared {shared:,} bytes")
        arithmetic = choice.rung.arithmetic(choice.problem)
        lines.append(f"sums in    {arithmetic.accumulator}")
        lines.append(f"copies     {'; '.join(choice.copies) or 'none'}")
        return "\n".join(lines)

    def tune(self, *, max_seconds: float = 30.0) -> Plan:
        """Measure this problem's candidates cold and return a plan for the winner.

        The default stays unless a candidate wins by more than the noise; every candidate is
        verified against the oracle before it is timed. The choice is stored and later plans of
        the same problem on the same device use it. ``GEMMULE_TUNE=0`` makes this a no-op.
        """
        from gemmule.tune import tune_plan  # late: the tuner needs oracle and measure

        return tune_plan(self, max_seconds=max_seconds)


@functools.lru_cache(maxsize=4096)
def resolve(
    op: str,
    left: Form,
    right: Form,
    out: Form | None,
    device: str,
    options: Options,
    rung: str | None = None,
    params: Frozen | None = None,
) -> Plan:
    """Return the plan for operands of these forms on `device`; cached."""
    call = canonical(op, left, right, out, options)
    backend = backends.get("cpu" if device == "cpu" else "cuda")
    choice = choose(call, backend.machine(device), rung, None if params is None else dict(params))
    copies = "; ".join(choice.copies)
    log.debug(
        "%s -> %s/%s %s (%s)%s",
        call.problem.describe(),
        choice.rung.folder,
        choice.rung.name,
        dict(choice.params),
        choice.reason,
        f"; {copies}" if copies else "",
    )
    if any(copy.startswith("A ") for copy in choice.copies) and call.problem.matrix_bytes > 2**20:
        log.warning("%s: %s", call.problem.describe(), copies)
    run = backend.prepare(choice)
    return Plan(
        op,
        choice,
        options,
        (left, right),
        device,
        rung,
        run,
        short_way(run, call, left, right, device),
    )


def operands(
    a: Any, b: Any, names: tuple[str, str], out: Any = None
) -> tuple[Operand, Operand, Operand | None]:
    """Unwrap a call's operands and check that they share a library and a device."""
    left, right = unwrap(a, names[0]), unwrap(b, names[1])
    check_same_kind(left, right, names)
    if out is None:
        return left, right, None
    result = unwrap(out, "out")
    check_same_kind(right if left.library == "gemmule" else left, result, (names[0], "out"))
    return left, right, result


def forget_plans() -> None:
    """Drop cached plans, so that the next call sees new tuning results."""
    resolve.cache_clear()
    hostcall.forget()
    torch_call = sys.modules.get("gemmule.backends.torch_call")
    if torch_call is not None:
        torch_call.forget()
