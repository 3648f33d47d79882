"""The oracle: it passes what is right, in every dtype, and kills every mutant by name."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import oracle_mutants as mutants
from gemmule.core.problem import (
    COMPLEX,
    FLOAT8,
    FLOATS,
    INTEGERS,
    UNIT_ROUNDOFF,
    Problem,
    QuantSpec,
    numpy_dtype,
)
from gemmule.core.rung import Arithmetic, same
from gemmule.oracle import exact as exact_sums
from gemmule.oracle import metamorphic as checks
from gemmule.oracle.bounds import (
    SMALLEST,
    Magnitudes,
    overflow_threshold,
    result_error,
    sum_error,
)
from gemmule.oracle.inputs import KINDS, VIEWS, make_inputs, shapes
from gemmule.oracle.judge import check, judge, sums_are_exact, tolerance
from gemmule.oracle.problems import (
    ALL_SIGNATURES,
    QUANTIZED_SIGNATURES,
    edge_problems,
    make_problem,
    nonfinite_cases,
    random_case,
)
from gemmule.oracle.truth import (
    FINITE,
    MINUS_INF,
    NOT_A_NUMBER,
    PLUS_INF,
    dequantized,
    nonfinite_map,
    reference,
)
from oracle_mutants import arithmetic, correct, operands, rounded, store, times

FLOAT8_SIGNATURES = (
    *((f, f, out) for f in FLOAT8 for out in ("float32", "float16", "bfloat16")),
    *same(*FLOAT8),
)
SIGNATURES = ALL_SIGNATURES + QUANTIZED_SIGNATURES + FLOAT8_SIGNATURES
F32 = ("float32",) * 3


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
    """A product with activations in int8 codes per group of the matrix; shift breaks it."""

    def run(i: Any) -> Any:
        spec, (a, x) = i.case.problem.quant, operands(i)
        group = spec.group_size if spec.group_size and spec.group_size > 0 else len(x)
        starts = np.arange(0, len(x), group)
        scale = np.maximum.reduceat(np.abs(x), starts, axis=0) / np.float32(127)
        scale = np.repeat(scale, group, axis=0)[: len(x)]
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
        moved = _int8_activations(shift=16)
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


# What bounds are made of, by hand.


def grown(additions: int, dtype: str = "float32") -> float:
    return math.expm1(additions * math.log1p(UNIT_ROUNDOFF[dtype]))


U32, TF32, CODE = UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF["tf32"], 1.0 / 127.0
SPEC = QuantSpec(8, -1, False, "row", "float32", False)
GROUPED = replace(SPEC, group_size=2)
BOUNDS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "sums": ({}, {}, grown(7)),
    "no additions": ({}, {"chain": lambda p, q: 0}, grown(1)),
    "float64": ({"out": "float64"}, {"accumulator": "float64"}, grown(7, "float64")),
    "complex": ({"a": "complex64", "b": "complex64", "out": "complex64"}, {}, grown(15)),
    "quantised": ({"a": "uint8", "quant": SPEC}, {}, grown(11)),
    "exact sums, scaled": ({"a": "uint8", "quant": SPEC}, {"accumulator": "int32"}, grown(11)),
    "rounded products": (
        {"a": "float16", "b": "float16"},
        {"product": "float16"},
        grown(7) + 2.0**-11 * (1 + grown(7)),
    ),
    "rounded operands": (
        {},
        {"inputs": "tf32"},
        (2 * TF32 + TF32**2) + grown(7) * (1 + 2 * TF32 + TF32**2),
    ),
    "one rounded operand": (
        {"a": "bfloat16"},
        {"inputs": "bfloat16"},
        2.0**-8 + grown(7) * (1 + 2.0**-8),
    ),
    "rounded weights": (
        {"a": "uint8", "b": "float16", "quant": SPEC},
        {"inputs": "float16"},
        grown(3, "float16") + grown(11) * (1 + grown(3, "float16")),
    ),
    "coded activations": (
        {"a": "uint8", "quant": replace(SPEC, activations="int8")},
        {"activations_bits": 8},
        CODE / 2 + 3 * U32 + grown(11) * (1 + CODE / 2 + 3 * U32),
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_is_what_its_arithmetic_implies_and_no_more(name: str) -> None:
    """Neither smaller, which would refuse what is right, nor larger, which would hide faults."""
    fields, options, share = BOUNDS[name]
    problem = Problem("matvec", 2, 8, **fields)
    promise = Arithmetic(**{"accumulator": "float32", "chain": lambda p, q: 7, **options})
    ones = Magnitudes(np.ones((2, 8)), np.ones((8, 1)), np.full((2, 1), 8.0), 0.0)
    bound = sum_error(problem, promise, {}, ones)
    np.testing.assert_allclose(bound, 8 * share, rtol=1e-3 if "16" in str(fields) else 1e-10)
    bound = sum_error(problem, promise, {}, replace(ones, reference_error=0.5))
    np.testing.assert_allclose(bound, 8 * (share + 0.5), rtol=1e-3)


def test_a_bound_counts_products_that_underflow() -> None:
    zeros = Magnitudes(np.zeros((2, 8)), np.zeros((8, 1)), np.zeros((2, 1)), 0.0)
    for name in FLOATS:
        promise = Arithmetic(name, chain=lambda p, q: 1, product="float16")
        problem = Problem("matvec", 2, 8, a=name, b=name, out=name)
        bound = sum_error(problem, promise, {}, zeros)
        np.testing.assert_allclose(bound, 8 * (SMALLEST[name] + 2.0**-24), rtol=0.02)
    for name in COMPLEX:
        promise = Arithmetic("float32", chain=lambda p, q: 1)
        problem = Problem("matvec", 2, 8, a=name, b=name, out=name)
        bound = sum_error(problem, promise, {}, zeros)
        np.testing.assert_allclose(bound, 16 * 2.0**-149, rtol=0.01)
    promise = Arithmetic("float32", chain=lambda p, q: 1, inputs="float16")
    problem = Problem("matvec", 2, 8, a="uint8", b="float16", quant=SPEC)  # weights underflow
    bound = sum_error(problem, promise, {}, replace(zeros, b=np.ones((8, 1))))
    np.testing.assert_allclose(bound, 8 * SMALLEST["float16"], rtol=0.01)


def test_activations_share_a_scale_within_their_group_alone() -> None:
    sizes = np.array([1.0, 4.0, 2.0, 0.5, 3.0])[:, None]
    magnitudes = Magnitudes(np.eye(5), sizes, np.zeros((5, 1)), 0.0)
    promise = Arithmetic("float32", chain=lambda p, q: 1, activations_bits=8)
    of_group = {
        GROUPED: [4, 4, 2, 2, 3],
        SPEC: [4] * 5,
        replace(SPEC, group_size=None): [4] * 5,
        replace(GROUPED, transposed=True): [4] * 5,
        replace(GROUPED, has_perm=True): [4] * 5,
    }
    for spec, largest in of_group.items():
        problem = Problem("matvec", 5, 5, a="uint8", quant=replace(spec, activations="int8"))
        bound = sum_error(problem, promise, {}, magnitudes)[:, 0]
        np.testing.assert_allclose(bound, np.array(largest) * (CODE / 2), rtol=1e-4)
        whole = sum_error(problem, promise, {}, magnitudes, whole_codes=True)[:, 0]
        np.testing.assert_allclose(whole, sizes[:, 0] * 4 * U32, rtol=1e-4)


def test_an_empty_sum_has_no_activations_to_round() -> None:
    empty = Magnitudes(np.zeros((5, 0)), np.zeros((0, 1)), np.zeros((5, 1)), 0.0)
    promise = Arithmetic("float32", chain=lambda p, q: 1, activations_bits=8)
    for spec in (SPEC, GROUPED):
        problem = Problem("matvec", 5, 0, a="uint8", quant=replace(spec, activations="int8"))
        assert (sum_error(problem, promise, {}, empty) == 0).all()


def test_a_narrower_result_is_rounded_once_more() -> None:
    magnitude, error = np.array([[3.0], [0.0]]), np.array([[0.25], [0.0]])
    for out in ("float16", "bfloat16", *FLOAT8):
        problem, u = Problem("matvec", 2, 8, out=out), UNIT_ROUNDOFF[out]
        for accumulator in ("float32", "int32"):
            promise = Arithmetic(accumulator, chain=lambda p, q: 1)
            bound = result_error(problem, promise, magnitude, error)
            wanted = [0.25 * (1 + u) + 3 * u + SMALLEST[out] / 2, SMALLEST[out] / 2]
            np.testing.assert_allclose(bound[:, 0], wanted, rtol=1e-12)
    same_dtype = Problem("matvec", 2, 8)
    assert result_error(same_dtype, Arithmetic("float32", chain=None), magnitude, error) is error


@pytest.mark.parametrize("name", FLOATS + FLOAT8)
def test_smallest_numbers_are_those_of_the_dtype(name: str) -> None:
    import ml_dtypes

    wide = name in ("float64", "float32")
    info = np.finfo(name) if wide else ml_dtypes.finfo(name)
    assert SMALLEST[name] == float(info.smallest_subnormal)
    assert SMALLEST["tf32"] == SMALLEST["float32"] * 2**13
    assert (SMALLEST["complex64"], SMALLEST["complex128"]) == (2.0**-149, 2.0**-1074)


def test_sums_are_exact_as_long_as_every_number_is() -> None:
    plain = Arithmetic("float32", chain=lambda p, q: 1)
    half = replace(plain, product="float16")
    coded = replace(plain, activations_bits=8)
    for promise, product, below, right in (
        (plain, 1e9, 2**24, True),
        (plain, 1.0, 2**24 + 1, False),
        (half, 2**11, 2**24, True),
        (half, 2**11 + 1, 1, False),
        (coded, 1.0, 1, False),
        (replace(plain, accumulator="int32"), 1.0, 2**40, True),
        (replace(plain, accumulator="float16"), 1.0, 2**11, True),
        (replace(plain, accumulator="float16"), 1.0, 2**11 + 1, False),
    ):
        inputs: Any = SimpleNamespace(largest_product=product, exact_below=below)
        assert sums_are_exact(promise, inputs) is right


# Overflow.


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float8_e5m2"])
def test_overflow_threshold_is_where_conversion_gives_infinity(name: str) -> None:
    edge = overflow_threshold(name)
    wide = np.float64 if name == "float32" else np.float32  # what conversions go through
    below = np.nextafter(wide(edge), wide(0))
    with np.errstate(over="ignore"):
        values = np.array([wide(edge), below]).astype(numpy_dtype(name))
    assert np.isinf(values.astype(np.float64)).tolist() == [True, False]


def test_overflow_of_half_results() -> None:
    problem = make_problem("matvec", 4, 3, 1, ("float32", "float32", "float16"))
    inputs = make_inputs(problem, "normal", 1)
    inputs.a[...] = [[3e4, 3e4, 5504], [3e4, 3e4, 5600], [-3e4, -3e4, -5520], [3e4, 3e4, 5490]]
    inputs.b[...] = 1
    fresh = replace(inputs, fingerprints=make_fingerprints(inputs))
    truth = reference(problem, fresh.a, fresh.b)

    def ok(*values: float) -> bool:
        fresh.out[...] = values
        return judge(problem, arithmetic(problem), {}, fresh, fresh.out, truth).ok

    assert ok(65504, np.inf, -np.inf, 65504)
    assert ok(65504, np.inf, -65504, 65504)  # 65520 lies on the edge, and sums may be off
    assert not ok(65504, 65504, -np.inf, 65504)
    assert not ok(65504, -np.inf, -np.inf, 65504)
    assert not ok(65504, np.nan, -np.inf, 65504)
    assert not ok(np.inf, np.inf, -np.inf, 65504)
    assert not ok(65504, np.inf, np.inf, 65504)


@pytest.mark.parametrize("name", FLOAT8)
def test_overflow_of_8_bit_results(name: str) -> None:
    """Conversions differ there: infinity, NaN, or the largest number; but only at the edge."""
    problem = make_problem("matvec", 3, 3, 1, ("float32", "float32", name))
    inputs = make_inputs(problem, "normal", 1)
    edge, largest = overflow_threshold(name), {"float8_e4m3fn": 448.0}.get(name, 57344.0)
    big = 2.0**18 * edge  # |A| |B|, so that sums may be off by a tenth of the edge
    inputs.a[...] = [[big, edge * 1.5, -big], [big, edge * 0.99, -big], [0, edge * 0.75, 0]]
    inputs.b[...] = 1
    fresh = replace(inputs, fingerprints=make_fingerprints(inputs))
    truth = reference(problem, fresh.a, fresh.b)

    def ok(*values: float) -> bool:
        fresh.out[...] = np.array(values, np.float32).astype(fresh.out.dtype)
        return judge(problem, arithmetic(problem), {}, fresh, fresh.out, truth).ok

    inside = edge * 0.75
    for over in (np.nan, largest, np.inf if name == "float8_e5m2" else np.nan):
        assert ok(over, largest, inside)
        assert ok(over, over, inside)
        assert not ok(over, over, over)
    assert not ok(-largest, largest, inside)
    assert not ok(largest / 2, largest, inside)
    assert not ok(largest, -largest, inside)


def make_fingerprints(inputs: Any) -> Any:
    return tuple(frame.buffer.tobytes() for frame in inputs.frames[1:])


def test_overflow_of_partial_sums_excuses_only_non_finite_results() -> None:
    problem = make_problem("matvec", 2, 4, 1, F32)
    inputs = make_inputs(problem, "normal", 1)
    inputs.a[...] = [[3e38, 3e38, -3e38, -3e38], [1, 2, 3, 4]]
    inputs.b[...] = 1
    fresh = replace(inputs, fingerprints=make_fingerprints(inputs))
    for values, ok in (((0, 10), True), ((np.nan, 10), True), ((0, np.inf), False)):
        fresh.out[...] = values
        assert check(fresh, arithmetic(problem), {}, fresh.out).ok is ok


# The parts of the truth.


def test_doubled_precision_matches_fractions() -> None:
    rng = np.random.default_rng(5)
    for k in (0, 1, 2, 3, 7, 16, 33):
        a = rng.standard_normal((4, k)) * 2.0 ** rng.integers(-200, 200, (4, k))
        b = rng.standard_normal((k, 3)) * 2.0 ** rng.integers(-200, 200, (k, 3))
        high, low = exact_sums.product(a, b)
        for i, j in np.ndindex(4, 3):
            terms = [Fraction(x) * Fraction(y) for x, y in zip(a[i], b[:, j], strict=True)]
            error = abs(Fraction(high[i, j]) + Fraction(low[i, j]) - sum(terms))
            size = sum(abs(t) for t in terms)
            assert error <= size * Fraction(exact_sums.relative_error(k))
            assert error <= size * Fraction(2) ** -99


def test_doubled_precision_works_block_by_block_and_in_batches() -> None:
    rng = np.random.default_rng(6)
    a, b = rng.standard_normal((3, 700, 40)), rng.standard_normal((40, 30))
    high, low = exact_sums.product(a, b)
    np.testing.assert_allclose(high, a @ b, rtol=0, atol=1e-13)
    one, one_low = exact_sums.product(a[2, 650:651], b)
    assert np.array_equal(high[2, 650:651], one)
    assert np.array_equal(low[2, 650:651], one_low)


def test_doubled_precision_holds_one_block_of_products_at_a_time(
    fault: Callable[..., Any],
    limit: Callable[..., None],
) -> None:
    limit(exact_sums, _BLOCK=200)
    sizes: list[int] = []

    def seen(sound: Any, high: Any, low: Any) -> Any:
        sizes.append(high.size)
        return sound(high, low)

    fault(exact_sums, "_tree", seen)
    exact_sums.product(np.ones((2, 20, 3)), np.ones((3, 5)))
    assert sizes == [180, 180, 180, 60]  # six rows of 30 products, and what is left
    sizes.clear()
    exact_sums.product(np.ones((2, 100)), np.ones((100, 5)))
    assert sizes == [500, 500]  # a row at least


def test_doubled_precision_refuses_what_overflows() -> None:
    for value in (2.0**480, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"A holds .*2\^480"):
            exact_sums.product(np.full((1, 1), value), np.ones((1, 1)))


def _one_by_one(a: Any, b: Any) -> list[list[int]]:
    """The IEEE rule by counting, element by element, in plain Python."""

    def category(row: Any, column: Any) -> int:
        products = [x * y for x, y in zip(row, column, strict=True)]
        if any(map(math.isnan, products)) or {math.inf, -math.inf} <= set(products):
            return NOT_A_NUMBER
        if math.inf in products:
            return PLUS_INF
        return MINUS_INF if -math.inf in products else FINITE

    return [[category(row.tolist(), column.tolist()) for column in b.T] for row in a]


def test_nonfinite_map_is_the_ieee_rule() -> None:
    rng = np.random.default_rng(7)
    values = np.array([0.0, -0.0, 1.0, -2.0, 3.0, -1.0, np.inf, -np.inf, np.nan])
    seen: set[int] = set()
    for share in (0.05, 0.3):
        chances = [(1 - share) / 6] * 6 + [share / 3] * 3
        for k in range(7):
            for _ in range(60):
                a, b = (rng.choice(values, shape, p=chances) for shape in ((5, k), (k, 4)))
                found = nonfinite_map(a, b)
                assert found.tolist() == _one_by_one(a, b)
                seen |= set(found.ravel().tolist())
    assert seen == {FINITE, PLUS_INF, MINUS_INF, NOT_A_NUMBER}


def test_dequantised_weights_are_those_of_the_matrix() -> None:
    for seed in range(60):
        case = random_case(np.random.default_rng(seed), signatures=QUANTIZED_SIGNATURES)
        q = make_inputs(case.problem, "normal", seed).a
        weights, sizes = dequantized(q)
        assert np.array_equal(weights, q.dequantize("float64"))
        assert (sizes >= np.abs(weights)).all()


def test_integer_truth_is_exact_modulo_two_to_the_64() -> None:
    for signature in (("int64",) * 3, ("uint64",) * 3, ("int8", "uint8", "int64")):
        problem = make_problem("matmul", 3, 4, 9, signature)
        inputs = make_inputs(problem, "integers", 3)
        found = reference(problem, inputs.a, inputs.b).values
        for i, j in np.ndindex(3, 4):
            total = sum(int(x) * int(y) for x, y in zip(inputs.a[i], inputs.b[:, j], strict=True))
            assert int(found[i, j]) % 2**64 == total % 2**64


def test_complex_truth() -> None:
    for name in COMPLEX:
        problem = make_problem("matmul", 3, 4, 5, (name,) * 3)
        inputs = make_inputs(problem, "normal", 3)
        found = reference(problem, inputs.a, inputs.b).values
        wanted = inputs.a.astype(complex) @ inputs.b.astype(complex)
        np.testing.assert_allclose(found[:3] + 1j * found[3:], wanted, rtol=1e-13)


# Inputs.


@pytest.mark.parametrize("n", [0, 1, 7, 64, 129, 700, 5000, 70_000])
@pytest.mark.parametrize(
    "name", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_exact_integers_stay_exact_and_every_element_counts(name: str, n: int) -> None:
    problem = make_problem("matvec", 5, n, 1, (name, name, name))
    inputs = make_inputs(problem, "integers", n)
    a, x = inputs.a.astype(np.float64), inputs.b.astype(np.float64)
    assert (a != 0).all()
    assert (x != 0).all()
    result = a @ x
    assert np.array_equal(result.astype(numpy_dtype(name)).astype(np.float64), result)
    for order in (slice(None), slice(None, None, -1)):  # partial sums that an accumulator holds
        partial = np.cumsum((a * x)[:, order], axis=1)
        assert np.abs(partial).max(initial=0.0) < 2.0**24
        assert "float8" not in name or np.abs(partial).max(initial=0.0) < 2.0**13


def test_axes_of_one_element_get_strides_of_no_alignment() -> None:
    problem = make_problem("matmul", 1, 1, 16, ("float16",) * 3)
    inputs = make_inputs(problem, "integers", 1, "loose")
    for array in (inputs.a, inputs.b, inputs.out):
        for size, step in zip(array.shape, array.strides, strict=True):
            assert size > 1 or step % 4
    drawn = [random_case(np.random.default_rng(i), views=("loose",)).problem for i in range(60)]
    assert sum(1 in (p.m, p.n) for p in drawn) > 15


def test_inputs_are_reproducible_and_differ_by_seed() -> None:
    for kind in KINDS:
        first, again, other = (make_inputs(mutants.MM, kind, s) for s in (4, 4, 5))
        assert first.a.tobytes() == again.a.tobytes()
        assert first.b.tobytes() == again.b.tobytes()
        assert first.a.tobytes() != other.a.tobytes()


def test_operands_lie_among_poison_as_aligned_as_promised() -> None:
    for view, n, name in itertools.product(VIEWS, (8, 9, 12), ("float32", "float16", "int8")):
        signature = ("int8", "int8", "int32") if name == "int8" else (name,) * 3
        problem = make_problem("matmul", 5, n, n, signature)
        inputs = make_inputs(problem, "integers", 1, view)
        for frame in inputs.frames:
            address = frame.array.__array_interface__["data"][0]
            outside = frame.buffer == frame.pattern
            assert outside[:64].all()
            assert outside[-64:].all()
            assert frame.intact_around()
            if view in ("contiguous", "padded", "loose"):
                assert address % problem.alignment == 0
                assert frame.array.strides[0] % problem.alignment == 0
                unit = max(problem.alignment, frame.array.itemsize)
                assert unit == 16 or address % (2 * unit)
        packed = view == "contiguous"
        assert inputs.a.flags.c_contiguous == packed or view in ("sliced", "loose")


def test_mistakes_in_the_question_are_refused() -> None:
    integers = make_problem("matvec", 2, 2, 1, ("int8", "int8", "int32"))
    complexes = make_problem("matvec", 2, 2, 1, ("complex64",) * 3)
    for problem, kind, view, words in (
        (mutants.MV, "ones", "contiguous", "kind is 'ones'"),
        (mutants.MV, "normal", "diagonal", "view is 'diagonal'"),
        (integers, "normal", "contiguous", "integer dtypes"),
        (complexes, "nonfinite", "contiguous", "complex"),
        (replace(mutants.Q4, batch=2), "normal", "contiguous", "shared_a"),
    ):
        with pytest.raises(ValueError, match=words):
            make_inputs(problem, kind, 0, view)
    with pytest.raises(ValueError, match="op is 'dot'"):
        next(edge_problems("dot", F32))


def test_edge_problems_hold_the_edges() -> None:
    problems = list(edge_problems("matmul", F32, ("row", "col"), tiles=(96,)))
    for size in (0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 95, 96, 97, 191, 193):
        assert all(size in {getattr(p, name) for p in problems} for name in "mnk")
    assert {p.batch for p in problems} == {0, 1, 2, 3}
    assert any(p.shared_a for p in problems)
    assert any(p.shared_b for p in problems)
    assert {(p.layout_a, p.layout_b) for p in problems} == set(
        itertools.product(("row", "col"), repeat=2)
    )
    assert len(problems) == len(set(problems))


# Checks without a reference.


def _broken_at_batch(a: Any, b: Any) -> Any:
    c = a @ b
    return c + 1 if c.ndim == 3 else c


def _order_by_contiguity(a: Any, b: Any) -> Any:
    return a @ b if a.flags.c_contiguous else (a @ b) * np.float32(1.0000001)


def _not_linear(a: Any, b: Any) -> Any:
    return (a.astype(np.float32) @ b + np.float32(1e-3)).astype(a.dtype)


def _by_row(a: Any, b: Any) -> Any:
    return a @ b + np.arange(a.shape[-2], dtype=a.dtype)[:, None]


def test_metamorphic_checks_pass_and_kill() -> None:
    problem = make_problem("matmul", 6, 7, 9, F32, batch=3)
    inputs = make_inputs(problem, "integers", 1, "strided")
    a, b = inputs.a, inputs.b
    for run in (
        checks.batch_is_loop,
        checks.view_is_copy,
        checks.transpose_swaps,
        checks.rows_permute,
        checks.scaling_is_exact,
    ):
        assert run(np.matmul, a, b).ok
    assert checks.rows_permute(lambda m, x: m @ x, a[0], b[0, :, 0]).ok
    for run, broken in (
        (checks.batch_is_loop, _broken_at_batch),
        (checks.view_is_copy, _order_by_contiguity),
        (checks.transpose_swaps, _by_row),
        (checks.rows_permute, _by_row),
        (checks.scaling_is_exact, _not_linear),
        (
            checks.view_is_copy,
            lambda m, x: (m @ x).astype(np.float64 if m.strides[-1] > 4 else "f"),
        ),
    ):
        verdict = run(broken, a, b)
        assert not verdict.ok, (run, verdict)
        assert verdict.kind == "metamorphic"


def test_transpose_within_twice_the_bound() -> None:
    problem = make_problem("matmul", 33, 34, 65, F32)
    inputs = make_inputs(problem, "normal", 2)
    truth = reference(problem, inputs.a, inputs.b)
    slack = 2 * tolerance(problem, arithmetic(problem), {}, truth)

    def sloppy(a: Any, b: Any) -> Any:
        return np.matmul(a, b) if a.shape[0] == 33 else rounded(a, "tf32") @ b

    assert checks.transpose_swaps(np.matmul, inputs.a, inputs.b, slack).ok
    assert not checks.transpose_swaps(sloppy, inputs.a, inputs.b, slack).ok
    poisoned = checks.transpose_swaps(lambda a, b: a @ b * np.nan, inputs.a, inputs.b, slack)
    assert not poisoned.ok


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "int8", "int64"])
def test_freivalds_passes_and_kills(name: str) -> None:
    out = {"int8": "int32"}.get(name, name)
    problem = make_problem("matmul", 150, 160, 170, (name, name, out))
    promise = arithmetic(problem)
    kinds = ("integers",) if out in INTEGERS else ("integers", "normal", "scaled")
    for kind, seed in itertools.product(kinds, range(3)):
        inputs = make_inputs(problem, kind, seed)
        exact = kind == "integers"
        c = correct(inputs)
        args = (inputs, promise, {})
        assert checks.freivalds(*args, c, exact=exact).ok
        if exact:
            for change in (mutants.plus_one, mutants.swap_rows):
                wrong = c.copy()
                change(wrong)
                assert not checks.freivalds(*args, wrong, exact=True).ok
        zero = np.zeros_like(c)
        verdict = checks.freivalds(*args, zero, exact=exact)
        assert not verdict.ok
        if out not in INTEGERS:
            spoiled = c.copy()
            spoiled[77, 5] = np.nan
            assert checks.freivalds(*args, spoiled, exact=exact).worst_index == (77,)


def test_the_error_of_exact_products_grows_by_one_a_doubling() -> None:
    for reduction, levels in ((0, 4), (1, 4), (2, 5), (1024, 14)):
        assert exact_sums.relative_error(reduction) == levels * 2.0**-102


def test_freivalds_refuses_what_it_cannot_check() -> None:
    promise = arithmetic(mutants.MM)
    a = np.ones((3, 3), np.float32)
    inputs = replace(make_inputs(mutants.MM, "integers", 1), a=a, b=a)
    with pytest.raises(ValueError, match="2-D"):
        checks.freivalds(replace(inputs, a=a[None]), promise, {}, a)
    with pytest.raises(ValueError, match="rounds is 0"):
        checks.freivalds(inputs, promise, {}, a, rounds=0)
    infinite = replace(inputs, case=replace(inputs.case, kind="nonfinite"))
    with pytest.raises(ValueError, match=r"oracle\.judge"):
        checks.freivalds(infinite, promise, {}, a)
    large = replace(inputs, a=a * 2.0**30, b=a * 2.0**30)
    with pytest.raises(ValueError, match=r"2\^53"):
        checks.freivalds(large, promise, {}, a, exact=True)
