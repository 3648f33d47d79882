"""From a problem to a choice: a tuned entry, else the rungs' heuristics, else the simplest rung."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from gemmule import backends
from gemmule.core.canonical import Call, Frozen, Options
from gemmule.core.choice import Choice, duration
from gemmule.core.problem import FLOAT8, HALVES, INTEGERS, ITEMSIZE, Problem, result_dtype
from gemmule.core.registry import all_rungs, rungs_for
from gemmule.core.rung import (
    Arithmetic,
    CudaRung,
    LibraryRung,
    Machine,
    Rung,
    may_round_weights,
)
from gemmule.storage import evidence, margins, models
from gemmule.storage import tuned as tuned_store

# A rung that rounds weights is taken only where it saves more than a twentieth.
WORTH_ROUNDING = 1.05
# What dequantises for the vendor's library took 1.4 times what was expected in 23 random products
# of less than 100 us, where a kernel of codes had been expected within half as much again (H200,
# 2026-11); by 4096 columns of large matrices it takes what is expected.
WORTH_LIBRARY, SURE_S = 1.45, 100e-6
# By what is not measured, BLAS is expected to be up to 2.7 times as quick at shapes where it takes
# twice as long, as 100000 x 16 (x A, Xeon with AMX, 2026-11), and 5.5 times at 100000 x 4, where it
# takes half.
WORTH_WAITING = 3.0
NOT_WAITING = "the vendor's threads wait for each other, also where other programs are at work"


def choose(
    call: Call,
    machine: Machine,
    rung: str | None = None,
    params: Frozen | None = None,
    *,
    scaled: bool = False,
) -> Choice:
    """Choose rung and parameters for a canonical call on a machine.

    With `rung` the named one is taken (ValueError where it cannot compute the problem). Otherwise
    only proved rungs whose arithmetic is float32 or better take part; `scaled`: no library's.
    """
    backend = backends.get(machine.backend)
    one_by_one = call.problem.quant is not None and not backend.adapts()
    batched = call.problem.batch != 1 and call.problem.op != "grouped"
    if (call.problem.batch_invariant or one_by_one) and batched:
        return _as_alone(call, machine, rung, params)
    if rung is not None:
        return _named(call, machine, rung, params)
    if params:
        raise ValueError("params= goes with rung=: name the rung they belong to.")
    if call.problem.outputs * call.problem.batch == 0:
        return _simplest(call, machine, "nothing is computed: the result is empty")
    tuned = tuned_store.lookup(machine, call.problem)
    if scaled and tuned is not None and isinstance(tuned.rung, LibraryRung):
        tuned = None
    if tuned is not None and backend.proved(tuned.rung, call.problem, machine):
        reason = f"tuned on this device, {tuned.date}"
        own = call.problem
        return Choice(call, own, tuned.rung, tuned.params, machine, reason, tuned.time_s)
    ranked = sorted(suggestions(call, machine), key=lambda choice: choice.expected_s or 0.0)
    ranked = [choice for choice in ranked if not (scaled and isinstance(choice.rung, LibraryRung))]
    if not ranked:
        return _simplest(call, machine)
    best = known_best(ranked, machine)
    other = next((c for c in ranked if c.rung is not best.rung), None)
    runner_up = "" if other is None else _in_words(other)
    return replace(best, runner_up=runner_up)


def known_best(ranked: list[Choice], machine: Machine) -> Choice:
    """Return the vendor's choice, or one measured here to be faster; without a vendor the first.

    A heuristic may be wrong on a machine it has never seen; the vendor's library is what the user
    would have without us. Only a measurement there speaks for another rung: of this product, which
    `choose` looks up before, or of one like it; a model that was fitted to such, by as much; or
    that the vendor's threads wait for each other.
    """
    vendor = next((choice for choice in ranked if choice.rung.vendor), None)
    if vendor is None:
        return _exact_if_near(ranked)
    ours = [choice for choice in ranked if choice is not vendor]
    if vendor.rung.waits(vendor.problem, machine):
        limit = WORTH_WAITING * (vendor.expected_s or 0.0)
        own = next((choice for choice in ours if (choice.expected_s or 0.0) <= limit), None)
        if own is not None:
            return replace(own, reason=NOT_WAITING)
    near = margins.near(machine, vendor.problem)
    first = ours[0] if ours and _is_fitted(ours[0], machine) else None
    for choice in ours:
        margin = near.get(_name(choice))
        if margin is not None and margin.ratio >= margins.ENOUGH:
            if first is None or first is choice:
                return replace(choice, reason=margin.words())
            reason = f"expected to be quicker than {choice.rung.name}, which is {margin.words()}"
            return replace(first, reason=reason)
    if first is None or _name(first) in near:
        return vendor
    ratio = (vendor.expected_s or 0.0) / (first.expected_s or math.inf)
    reason = f"a model of this device expects {ratio:.1f} x the vendor's library"
    return replace(first, reason=reason) if ratio >= margins.ENOUGH else vendor


def _name(choice: Choice) -> tuple[str, str]:
    return choice.rung.folder, choice.rung.name


def _is_fitted(choice: Choice, machine: Machine) -> bool:
    """Tell whether the rung's times were measured on such a device; not so the vendor's by tf32."""
    known = machine.backend == "cuda" and choice.problem.precision != "tf32"
    return known and models.error(machine, "/".join(_name(choice))) is not None


def _exact_if_near(ranked: list[Choice]) -> Choice:
    """Return the first, or one that rounds no weight where that costs hardly anything.

    A library behind a kernel that dequantises is the first of short products only by far.
    """
    first = ranked[0]
    if isinstance(first.rung, LibraryRung) and (first.expected_s or 0.0) < SURE_S:
        limit = WORTH_LIBRARY * (first.expected_s or 0.0)
        own = (choice for choice in ranked[1:] if (choice.expected_s or 0.0) <= limit)
        first = next(own, first)
    if not _rounds_weights(first.problem, first.rung.arithmetic(first.problem)):
        return first
    limit = WORTH_ROUNDING * (first.expected_s or 0.0)
    near = (choice for choice in ranked if (choice.expected_s or 0.0) <= limit)
    exact = (c for c in near if not _rounds_weights(c.problem, c.rung.arithmetic(c.problem)))
    return next(exact, first)


def _as_alone(call: Call, machine: Machine, rung: str | None, params: Frozen | None) -> Choice:
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
    expected = "" if choice.expected_s is None else f", {duration(choice.expected_s)} expected"
    return f"{choice.rung.folder}/{choice.rung.name}({params}){expected}"


def _rounds_weights(problem: Problem, arithmetic: Arithmetic) -> bool:
    """Tell whether codes beside halves become halves, each weight rounded once."""
    beside = problem.a if problem.op == "grouped" else problem.b
    return problem.quant is not None and arithmetic.inputs == beside in HALVES


def _sums_float8(problem: Problem, arithmetic: Arithmetic) -> bool:
    """Tell whether float8 is summed by tensor cores that keep fewer bits than float32 does."""
    both = problem.a in FLOAT8 and problem.b in FLOAT8
    return both and arithmetic.accumulator == "float32" and not arithmetic.at_least_float32


def eligible(rung: Rung, problem: Problem) -> bool:
    """Tell whether the rung is for automatic choices, and its arithmetic good enough."""
    if rung.by_name_only or rung.precision not in ("", problem.precision):
        return False
    arithmetic = rung.arithmetic(problem)
    if problem.quant is not None and problem.quant.activations == "int8":
        return arithmetic.activations_bits is not None
    if problem.accumulate == "float16" and arithmetic.accumulator == "float16":
        return True
    if problem.precision == "tf32" and arithmetic.inputs == "tf32":
        return True
    if _sums_float8(problem, arithmetic):
        return problem.precision != "ieee"
    if _rounds_weights(problem, arithmetic):
        return may_round_weights(problem)
    return arithmetic.at_least_float32


def _rungs(problem: Problem, machine: Machine) -> tuple[Rung, ...]:
    return rungs_for(machine.backend, problem.op, quantized=problem.quant is not None)


def suggestions(call: Call, machine: Machine) -> Iterator[Choice]:
    """Yield what each proved rung that may be chosen by itself offers for a canonical call."""
    backend = backends.get(machine.backend)
    for problem, copies, cost_s in _variants(call.problem, machine):
        found = False
        for rung in _rungs(problem, machine):
            if rung.refusal(problem) is not None or not eligible(rung, problem):
                continue
            suggestion = rung.suggest(problem, machine)
            if suggestion is None or not backend.proved(rung, problem, machine):
                continue
            found = True
            params = rung.check_params(problem, suggestion.params)
            expected_s = suggestion.expected_s + cost_s
            yield Choice(call, problem, rung, params, machine, "heuristic", expected_s, copies)
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
    for rung in rungs_for(backend, op, quantized=quantized):
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
        wraps = own[2] in INTEGERS and wider[2] in ("int64", "uint64")  # both modulo 2^64
        return wraps or own[2] == wider[2] or result_dtype(own[2], wider[2]) == wider[2]
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


def _named(call: Call, machine: Machine, name: str, params: Frozen | None) -> Choice:
    named = [r for r in all_rungs(machine.backend) if r.name == name]
    if not named:
        raise ValueError(_no_such_rung(call.problem, machine, name))
    reasons = [f"{r.folder}/{name}: {_refusal(r, call.problem, machine)}" for r in named]
    for problem, copies, _ in _variants(call.problem, machine):
        for rung in named:
            if _refusal(rung, problem, machine) is None:
                suggestion = rung.suggest(problem, machine)
                if params is None and suggestion is not None:
                    chosen = rung.check_params(problem, suggestion.params)
                else:
                    chosen = rung.check_params(problem, dict(params or ()))
                expected = None if suggestion is None else suggestion.expected_s
                why = "named by the caller"
                return Choice(call, problem, rung, chosen, machine, why, expected, copies)
    raise ValueError(f"rung {name} cannot compute {call.problem.describe()}. {'; '.join(reasons)}.")


def _no_such_rung(problem: Problem, machine: Machine, name: str) -> str:
    """Return that a back end has no rung of this name, and which compute the operation there."""
    import difflib

    coded = problem.quant is not None
    rungs = [r for r in all_rungs(machine.backend) if (r.op, r.quantized) == (problem.op, coded)]
    known, other = [r.name for r in rungs], "cuda" if machine.backend == "cpu" else "cpu"
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}? There are" if near else "there are"
    if any(r.name == name for r in all_rungs(other)):
        meant = f"it is one of {other}, for operands there. Here are"
    return f"no {machine.backend} rung is called {name!r}; {meant}: {', '.join(known)}."


def _refusal(rung: Rung, problem: Problem, machine: Machine) -> str | None:
    """Return why a rung does not compute a problem on a machine, or None when it does."""
    if isinstance(rung, CudaRung | LibraryRung) and not rung.runs_on(machine.arch):
        return f"its kernels are for {', '.join(rung.archs)}, and {machine.name} is {machine.arch}"
    return rung.refusal(problem)


def _simplest(
    call: Call,
    machine: Machine,
    reason: str = "the simplest proved rung: no heuristic covers this problem",
) -> Choice:
    backend = backends.get(machine.backend)
    for problem, copies, _ in _variants(call.problem, machine):
        for rung in _rungs(problem, machine):
            if (
                rung.refusal(problem) is None
                and eligible(rung, problem)
                and backend.proved(rung, problem, machine)
            ):
                params = rung.check_params(problem, None)
                return Choice(call, problem, rung, params, machine, reason, None, copies)
    quant, advice = call.problem.quant, "Convert the operands to another dtype"
    if quant is not None and quant.layout != "row":
        advice = f"The codes lie in layout {quant.layout}: multiply by Q.to(layout='row')"
    raise TypeError(
        f"no proved {machine.backend} rung computes {call.problem.describe()} on {machine.name}. "
        f"{advice}, or name a rung with rung=."
    )


def scaled_choice(
    call: Call,
    machine: Machine,
    options: Options,
    kernels: tuple[bool, ...],
    function: str | None = None,
) -> Choice | None:
    """Choose for a product whose kernel applies scales; None where no proved rung does.

    call.problem: of the operands' dtypes and the scaled result's. kernels: rungs of which
    `by_blocks` serve. function: of an epilogue that it applies as well, as in `finished_choice`.
    ValueError where the named rung takes no such scales, or operands.
    """
    taken = [
        one
        for one in _kernels(call, machine)
        if one.by_blocks in kernels
        and not (one.refusal_scaled if function is None else one.refusal_finished)(call.problem)
    ]
    end = evidence.SCALED + ("" if function is None else evidence.FINISHED[function])
    best = _best_of(taken, call, machine, end, (options.rung, options.params))
    if options.rung is not None and best is None and function is None:
        raise ValueError(
            f"rung {options.rung} computes no scaled product {call.problem.describe()}."
        )
    return best


def finished_choice(
    call: Call, machine: Machine, function: str, rung: str | None, params: Frozen | None
) -> Choice | None:
    """Choose for a product whose kernel applies an epilogue; None where no proved rung does.

    function: what of `gemmule.core.epilogue.FUNCTIONS` it is compiled for.
    """
    every = [one for one in _kernels(call, machine) if not one.scaled]
    taken = [one for one in every if not one.refusal_finished(call.problem)]
    return _best_of(taken, call, machine, evidence.FINISHED[function], (rung, params))


def _kernels(call: Call, machine: Machine) -> list[CudaRung]:
    every = rungs_for(machine.backend, call.problem.op, quantized=False)
    return [one for one in every if isinstance(one, CudaRung)]


def _best_of(
    rungs: list[CudaRung],
    call: Call,
    machine: Machine,
    end: str,
    named: tuple[str | None, Frozen | None],
) -> Choice | None:
    """Return the choice of least time among rungs whose variant with this end is proved.

    named: the caller's rung, which needs no proof, and its parameters.
    """
    problem, backend, found, (name, params) = call.problem, backends.get(machine.backend), [], named
    for one in rungs:
        if name not in (None, one.name):
            continue
        suggestion = one.suggest(problem, machine)
        if name is None and not (suggestion and backend.proved(one, problem, machine, end)):
            continue
        given = suggestion.params if params is None and suggestion else dict(params or ())
        expected = None if suggestion is None else suggestion.expected_s
        why = "heuristic" if name is None else "named by the caller"
        chosen = one.check_params(problem, given)
        found.append(Choice(call, problem, one, chosen, machine, why, expected))
    return min(found, key=lambda choice: choice.expected_s or 0.0, default=None)
