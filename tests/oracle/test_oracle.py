"""The oracle: it passes what is right, in every dtype, and kills every mutant by name."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import oracle_mutants as mutants
from gemmule.core.problem import FLOAT8, INTEGERS, Problem, QuantSpec
from gemmule.core.rung import ACTIVATION_GROUP, Arithmetic, same
from gemmule.oracle.inputs import VIEWS, make_inputs, shapes
from gemmule.oracle.judge import check, tolerance
from gemmule.oracle.problems import (
    ALL_SIGNATURES,
    QUANTIZED_SIGNATURES,
    edge_problems,
    make_problem,
    nonfinite_cases,
    random_case,
)
from gemmule.oracle.truth import reference
from oracle_mutants import F32, arithmetic, correct, operands, rounded, store, times

FLOAT8_SIGNATURES = (
    *((f, f, out) for f in FLOAT8 for out in ("float32", "float16", "bfloat16")),
    *same(*FLOAT8),
)
SIGNATURES = ALL_SIGNATURES + QUANTIZED_SIGNATURES + FLOAT8_SIGNATURES


def judged(problem: Problem, kind: str, seed: int, run: Any, promise: Arithmetic) -> Any:
    inputs = make_inputs(problem, kind, seed)
    return check(inputs, promise, {}, run(inputs))


# The correct product passes.


@pytest.mark.parametrize("signature", SIGNATURES, ids="-".join)
def test_correct_product_passes_at_random(signature: tuple[str, str, str]) -> None:
    rng = np.random.default_rng(SIGNATURES.index(signature))
    kinds: Counter[str] = Counter()
    for _ in range(200):
        case = random_case(rng, signatures=[signature])
        inputs = make_inputs(case.problem, case.kind, case.seed, case.view)
        verdict = check(inputs, arithmetic(case.problem), {}, correct(inputs))
        assert verdict.ok, (case, verdict)
        assert verdict.ratio <= 1.0
        kinds[verdict.kind] += 1
    assert kinds["equality"] >= 100
    assert signature[2] in INTEGERS or kinds["bound"] >= 20


@pytest.mark.parametrize("op", ["matvec", "matmul"])
@pytest.mark.parametrize("signature", [F32, ("float16",) * 3, ("int8", "int8", "int32")])
def test_correct_product_passes_at_edges(op: str, signature: tuple[str, str, str]) -> None:
    count = 0
    for problem in edge_problems(op, signature, ("row", "col"), tiles=(48,)):
        view = VIEWS[count % len(VIEWS)]
        inputs = make_inputs(problem, "integers", count, view)
        verdict = check(inputs, arithmetic(problem), {}, correct(inputs))
        assert verdict.ok, (problem, view, verdict)
        count += 1
    assert count > 300


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16", *FLOAT8])
def test_correct_product_passes_with_every_single_infinity(name: str) -> None:
    out = "float32" if name in FLOAT8 else name
    for problem in (
        make_problem("matvec", 35, 66, 1, (name, name, out)),
        make_problem("matmul", 5, 4, 33, (name, name, out), layout_a="col"),
    ):
        hit = 0
        for case in nonfinite_cases(problem):
            inputs = make_inputs(problem, "nonfinite", case.seed)
            verdict = check(inputs, arithmetic(problem), {}, correct(inputs))
            assert verdict.ok, (case, verdict)
            hit += not np.isfinite(inputs.out.astype(np.float64)).all()
        assert hit >= case.seed + 1 > 30


def test_every_mix_of_views_layouts_batches_passes() -> None:
    options = itertools.product(
        VIEWS,
        ("row", "col", "strided"),
        ("row", "col"),
        ({}, {"batch": 3}, {"batch": 2, "shared_a": True}, {"batch": 2, "shared_b": True}),
    )
    for view, layout_a, layout_b, batch in options:
        problem = make_problem(
            "matmul", 6, 7, 9, F32, layout_a=layout_a, layout_b=layout_b, **batch
        )
        inputs = make_inputs(problem, "integers", 1, view)
        assert (inputs.a.shape, inputs.b.shape, inputs.out.shape) == shapes(problem)
        assert check(inputs, arithmetic(problem), {}, correct(inputs)).ok


# The mutants do not.


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_mutant_is_killed_where_the_correct_product_passes(mutant: mutants.Mutant) -> None:
    right, wrong = (mutants.trial(mutant, run) for run in (correct, mutant.run))
    assert all(v.ok for v in right), [v for v in right if not v.ok]
    assert mutant.found_by in {v.kind for v in wrong if not v.ok}
    assert all(v.ratio > 1 or v.ok for v in wrong)
    for problem in mutant.problems:  # no dtype in which the mutant lives
        alone = replace(mutant, problems=(problem,))
        assert any(not v.ok for v in mutants.trial(alone, mutant.run)), problem


def test_kill_table_is_current() -> None:
    assert len(mutants.MUTANTS) >= 30
    # The counts may move with another NumPy's random numbers; names and checks may not.
    fresh, written = (
        [line.rsplit("|", 2)[0] for line in table.splitlines()]
        for table in (mutants.kill_table(), mutants.written_table())
    )
    assert fresh == written, "run python tests/oracle_mutants.py to write the kill table again"
    assert f"{len(mutants.MUTANTS)} of {len(mutants.MUTANTS)} mutants killed." in written


def test_verdict_names_the_worst_element() -> None:
    inputs = make_inputs(mutants.MM, "normal", 1)
    out = correct(inputs)
    out[3, 4] *= np.float32(1.1)
    out[20, 5] *= np.float32(1.001)
    verdict = check(inputs, arithmetic(mutants.MM), {}, out)
    assert (verdict.worst_index, verdict.kind, verdict.ok) == ((3, 4), "bound", False)
    assert verdict.ratio > 100
    assert verdict.text.startswith("[3, 4] is")
    assert "2 of 1122" in verdict.text


def test_verdict_names_an_element_whose_imaginary_part_is_wrong() -> None:
    for name, shape in (("complex64", (3, 2)), ("float32", (3, 2))):
        inputs = make_inputs(make_problem("matmul", *shape, 5, (name,) * 3), "normal", 1)
        out = correct(inputs)
        out[2, 1] += 1j if name == "complex64" else 1.0
        assert check(inputs, arithmetic(inputs.case.problem), {}, out).worst_index == (2, 1)


# Declared arithmetic that is worse than float32 passes when declared, and only then.


def _with_rounding(dtype: str) -> Any:
    return lambda i: store(i, times(*(rounded(v, dtype) for v in operands(i))))


@pytest.mark.parametrize("inputs_dtype", ["tf32", "bfloat16", "float16"])
def test_declared_input_rounding_is_bounded(inputs_dtype: str) -> None:
    promise = Arithmetic("float32", chain=lambda p, _: p.reduction, inputs=inputs_dtype)
    run = _with_rounding(inputs_dtype)
    ratios = [judged(mutants.MM, "normal", seed, run, promise).ratio for seed in range(50)]
    assert 0.01 < max(ratios) <= 1.0
    assert judged(mutants.MM, "integers", 1, run, promise).kind == "equality"


def test_declared_float16_sums_are_bounded_and_exact_on_integers() -> None:
    promise = Arithmetic("float16", chain=lambda p, _: p.reduction)
    run = mutants.accumulated("float16")
    ratios = [judged(mutants.HALF, "normal", seed, run, promise).ratio for seed in range(20)]
    assert 0.001 < max(ratios) <= 1.0
    for n in (5, 700, 5000, 70_000):
        problem = replace(mutants.HALF, n=n, m=3, accumulate="float16", alignment=2)
        verdict = judged(problem, "integers", n, run, promise)
        assert verdict.ok, verdict
        assert verdict.kind == "equality"
    problem = replace(mutants.HALF, n=5000, m=3, alignment=2)
    verdict = judged(problem, "integers", 1, run, promise)  # of which float32 holds every sum
    assert (verdict.ok, verdict.kind) == (True, "bound"), verdict


def test_declared_product_rounding_is_bounded() -> None:
    def run(i: Any) -> Any:
        a, b = operands(i)
        return store(i, rounded(a[..., :, :, None] * b[..., None, :, :], "float16").sum(axis=-2))

    promise = Arithmetic("float32", chain=lambda p, _: p.reduction, product="float16")
    plain = Arithmetic("float32", chain=lambda p, _: p.reduction)
    verdicts = [judged(mutants.MM, "normal", seed, run, promise) for seed in range(20)]
    assert all(v.ok for v in verdicts)
    assert not judged(mutants.MM, "normal", 0, run, plain).ok


def _int8_activations(shift: int = 0) -> Any:
    """A product with activations in int8 codes, whose scales a shift moves to other terms."""

    def run(i: Any) -> Any:
        a, x = operands(i)
        starts = np.arange(0, len(x), ACTIVATION_GROUP)
        scale = np.maximum.reduceat(np.abs(x), starts, axis=0) / np.float32(127)
        scale = np.repeat(scale, ACTIVATION_GROUP, axis=0)[: len(x)]
        codes = np.rint(x / np.where(scale == 0, 1, scale))
        return store(i, times(a, codes * np.roll(scale, shift, axis=0)))

    return run


@pytest.mark.parametrize("group", [16, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_int8_activations_are_bounded(group: int, bits: int) -> None:
    spec = QuantSpec(bits, group, True, "row", "float32", False, activations="int8")
    problem = make_problem("matvec", 21, 75, 1, (f"uint{bits}", "float32", "float32"), quant=spec)
    promise = Arithmetic("float32", chain=lambda p, _: p.n, activations_bits=8)
    for kind in ("integers", "normal", "scaled", "cancel"):
        ratios = []
        for seed in range(20):
            verdict = judged(problem, kind, seed, _int8_activations(), promise)
            assert verdict.ok, verdict
            ratios.append(verdict.ratio)
        assert kind == "integers" or max(ratios) > 0.02
    dropped = [judged(problem, "integers", s, mutants.without(3), promise).ok for s in range(10)]
    assert not any(dropped)
    if group == 16:
        moved = _int8_activations(shift=32)
        assert not any(judged(problem, "scaled", s, moved, promise).ok for s in range(10))
    exact = Arithmetic("float32", chain=lambda p, _: p.n)
    assert not judged(problem, "normal", 0, _int8_activations(), exact).ok
    by_name = replace(problem, quant=replace(spec, activations="float"))
    for seed in range(10):  # small integers, which are no whole codes
        assert judged(by_name, "integers", seed, _int8_activations(), promise).ok


def test_operands_that_are_whole_codes_have_less_room() -> None:
    """Rounding changes none of them: half of what it may change in others is a mistake."""
    spec = QuantSpec(8, 16, True, "row", "float32", False, activations="int8")
    by_name = QuantSpec(8, 16, True, "row", "float32", False, activations="float")
    promise = Arithmetic("float32", chain=lambda p, _: p.n, activations_bits=8)
    for quant, kind in ((spec, "integers"), (spec, "normal"), (by_name, "integers")):
        problem = make_problem("matvec", 21, 75, 1, ("uint8", "float32", "float32"), quant=quant)
        inputs = make_inputs(problem, kind, 1)
        room = tolerance(problem, promise, {}, reference(problem, inputs.a, inputs.b))
        out = correct(inputs)
        assert check(inputs, promise, {}, out).ok
        out += (room / 2).astype(out.dtype)
        assert check(inputs, promise, {}, out).ok == ((quant, kind) != (spec, "integers"))


def test_integer_accumulators_of_quantised_rungs_still_round_their_scaling() -> None:
    promise = Arithmetic("int32", chain=lambda p, _: 0)
    for seed in range(30):
        verdict = judged(replace(mutants.Q8, n=3, alignment=4), "normal", seed, correct, promise)
        assert verdict.ok, verdict
