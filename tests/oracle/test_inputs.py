"""The operands that the oracle makes: exact, reproducible, among poison, at every edge."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import oracle_mutants as mutants
from gemmule.core.problem import QuantSpec, numpy_dtype
from gemmule.oracle.inputs import KINDS, VIEWS, make_inputs
from gemmule.oracle.problems import edge_problems, make_problem, random_case
from oracle_mutants import F32


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


@pytest.mark.parametrize("transposed", [False, True])
def test_quantised_matrices_are_of_every_kind_that_is_told(transposed: bool) -> None:
    """Of random parts, with zero points between codes and upon them, and of extreme weights."""
    spec = QuantSpec(4, 32, True, "row", "float32", transposed)
    signature = ("uint4", "float32", "float32")
    problem = make_problem("matvec", 24, 96, 1, signature, quant=spec)
    seen: Counter[str] = Counter()
    for seed, kind in itertools.product(range(40), ("normal", "scaled", "cancel")):
        inputs = make_inputs(problem, kind, seed)
        scales, zeros = (np.asarray(one) for one in (inputs.a.scales, inputs.a.zeros))
        drawn = bool(((scales >= 0.5 / 8) & (scales <= 2 / 8)).all())
        seen["drawn" if drawn else "made"] += 1
        seen["none"] += bool((scales == 0).any())
        seen["tiny"] += bool(((scales > 0) & (scales < 2.0**-40)).any())
        seen["huge"] += bool((np.abs(scales) > 2.0**40).any())
        seen["upon codes"] += drawn and bool((zeros == np.rint(zeros)).all())
        seen["between codes"] += drawn and not (zeros == np.rint(zeros)).all()
        if kind == "cancel":
            b = inputs.b.astype(np.float64).reshape(96, -1)
            assert np.array_equal(b[48:], -b[:48])
        elif kind == "scaled":
            seen["scaled"] += bool(np.abs(inputs.b).max() > 8)
    assert all(seen[name] > 10 for name in ("drawn", "made", "tiny", "none", "scaled")), seen
    assert all(seen[name] > 10 for name in ("huge", "upon codes", "between codes")), seen
    assert seen["drawn"] + seen["made"] == 120


@pytest.mark.parametrize("has_zeros", [True, False])
@pytest.mark.parametrize("group_size", [32, -1, None])
def test_exact_quantised_matrices_have_scales_and_weights_of_both_signs(
    group_size: int | None, has_zeros: bool
) -> None:
    spec = QuantSpec(4, group_size, has_zeros, "row", "float16", False)
    problem = make_problem("matvec", 24, 96, 1, ("uint4", "float16", "float32"), quant=spec)
    scales, signs = Counter[float](), Counter[float]()
    for seed in range(40):
        Q = make_inputs(problem, "integers", seed).a
        scales.update(np.asarray(Q.scales, np.float64).ravel().tolist())
        signs.update(np.sign(Q.dequantize()).ravel().tolist())
    assert set(scales) == {-2.0, -1.0, 1.0, 2.0}
    assert min(signs[-1.0], signs[1.0]) > 1000


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
