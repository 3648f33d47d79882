"""Canonical calls: interpreted by einsum, they must give what NumPy gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gemmule.arrays.interop import unwrap
from gemmule.core.canonical import DEFAULT, Call, Options, canonical
from gemmule.core.operand import Form, View, alignment_of, c_strides, vector_alignment
from gemmule.core.problem import QuantSpec
from gemmule.oracle.inputs import make_inputs
from gemmule.oracle.problems import random_case
from operand_shapes import CASES
from products import ARRANGEMENTS, Array, exact, small

Shape = tuple[int, ...]
DENSE = (*(((t,) * 3) for t in ("float64", "float32", "float16")), ("int8", "int8", "int32"))


def interpret(call: Call, a: Array, b: Array, out: Array) -> None:
    """Compute a canonical call by its views alone, checking them against its problem."""
    if call.swapped:
        a, b = b, a

    def see(array: Array, view: View) -> Array:
        steps = tuple(step * array.itemsize for step in view.strides)
        return np.lib.stride_tricks.as_strided(array, view.shape, steps)

    problem, lead = call.problem, (*call.outer, *([call.problem.batch] * (call.problem.batch != 1)))
    left, right, result = see(a, call.a), see(b, call.b), see(out, call.out)
    if problem.op == "matvec":
        spec = "...mn,...n->...m"
        assert left.shape == (*lead, problem.m, problem.n)
    else:
        spec = "...mk,...kn->...mn"
        assert left.shape == (*lead, problem.m, problem.k)
        assert right.shape == (*lead, problem.k, problem.n)
    if problem.shared_a:
        assert left.strides[len(lead) - 1] == 0
    result[...] = np.einsum(spec, left, right)


def run(op: str, a: Array, b: Array, options: Options) -> tuple[Array, Call]:
    left, right = unwrap(a, "a"), unwrap(b, "b")
    call = canonical(op, left.form, right.form, None, options)
    out = np.full(call.out_shape, 99.0)
    interpret(call, left.array, right.array, out)
    return out, call


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize(("op", "a", "b"), CASES)
def test_every_shape(op: str, a: tuple[int, ...], b: tuple[int, ...], literal: bool) -> None:
    rng = np.random.default_rng(1)
    left, right = small(rng, a), small(rng, b)
    out, _ = run(op, left, right, Options(literal=literal))
    np.testing.assert_array_equal(out, exact(op, left, right))


@pytest.mark.parametrize(("how_a", "how_b"), [*itertools.product(ARRANGEMENTS, repeat=2)])
def test_every_pair_of_arrangements(how_a: str, how_b: str) -> None:
    rng = np.random.default_rng(2)
    for op, a, b in CASES:
        if 0 in a + b:
            continue
        left, right = ARRANGEMENTS[how_a](small(rng, a)), ARRANGEMENTS[how_b](small(rng, b))
        out, _ = run(op, left, right, Options())
        np.testing.assert_array_equal(out, exact(op, left, right), err_msg=f"{op} {a} {b}")


@pytest.mark.parametrize(
    ("shape", "strides", "batch", "aligned"),
    [
        ((8, 4), (4, 1), (), 16),
        ((8, 5), (5, 1), (), 4),
        ((8, 6), (6, 1), (), 8),
        ((1, 5), (5, 1), (), 16),  # one row: its step is never taken
        ((5, 1), (4, 7), (), 16),  # one column
        ((4, 8), (1, 4), (), 16),
        ((4, 8), (1, 5), (), 4),
        ((8, 4), (4, 1), (6,), 8),
        ((8, 4), (4, 1), (-32,), 4),  # backwards
        ((8,), (3,), (), 16),
    ],
)
def test_what_strides_leave_of_an_alignment(
    shape: tuple[int, ...], strides: tuple[int, ...], batch: tuple[int, ...], aligned: int
) -> None:
    for own, found in ((16, aligned), (2, 2)):
        form = Form(shape, strides, "float32", own)
        assert vector_alignment(form, View(shape, strides), batch) == found


def test_the_form_of_an_array_to_come() -> None:
    for shape in ((), (3,), (2, 3), (4, 0, 5)):
        assert Form.packed(shape, "float16") == Form(shape, c_strides(shape), "float16", 16)


@pytest.mark.parametrize(("op", "a", "b"), CASES)
def test_results_of_any_strides(op: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    left, right = unwrap(small(rng, a), "a"), unwrap(small(rng, b), "b")
    shape = canonical(op, left.form, right.form, None, Options()).out_shape
    for how in ("col", "sliced", "reversed", "step_two"):
        out = ARRANGEMENTS[how](np.full(shape, 99.0)) if shape else np.full((), 99.0)
        call = canonical(op, left.form, right.form, unwrap(out, "out").form, Options())
        interpret(call, left.array, right.array, out)
        np.testing.assert_array_equal(out, exact(op, left.array, right.array), err_msg=how)


def problem_of(op: str, a: Array, b: Array, **options: Any) -> Any:
    forms = unwrap(a, "a").form, unwrap(b, "b").form
    return canonical(op, *forms, None, Options(**options)).problem


def test_vecmat_is_the_matvec_of_the_transpose() -> None:
    problem = problem_of("vecmat", np.zeros(3), np.zeros((3, 4)))
    assert (problem.op, problem.m, problem.n, problem.layout_a) == ("matvec", 4, 3, "col")
    problem = problem_of("vecmat", np.zeros(3), np.zeros((4, 3)).T)
    assert problem.layout_a == "row"


def test_thin_products_run_as_matvec_unless_a_rung_is_named() -> None:
    column, row = problem_of("matmul", np.zeros((3, 4)), np.zeros((4, 1))), None
    assert (column.op, column.m, column.n) == ("matvec", 3, 4)
    row = problem_of("matmul", np.zeros((1, 4)), np.zeros((4, 5)))
    assert (row.op, row.m, row.n, row.layout_a) == ("matvec", 5, 4, "col")
    assert problem_of("matmul", np.zeros((3, 4)), np.zeros((4, 1)), literal=True).op == "matmul"


def test_batches_of_thin_products_run_as_batches_of_matvecs() -> None:
    column = problem_of("matmul", np.zeros((6, 3, 4)), np.zeros((6, 4, 1)))
    assert (column.op, column.m, column.n, column.batch) == ("matvec", 3, 4, 6)
    row = problem_of("matmul", np.zeros((6, 1, 4)), np.zeros((6, 4, 5)))
    assert (row.op, row.m, row.n, row.batch, row.layout_a) == ("matvec", 5, 4, 6, "col")
    shared = problem_of("matmul", np.zeros((3, 4)), np.zeros((6, 4, 1)))
    assert (shared.op, shared.batch, shared.shared_a) == ("matmul", 6, True)


def test_many_vectors_run_as_one_matmul_unless_invariance_is_asked() -> None:
    A, X = np.zeros((3, 4)), np.zeros((5, 4))
    stacked = problem_of("matvec", A, X)
    assert (stacked.op, stacked.m, stacked.k, stacked.n) == ("matmul", 5, 4, 3)
    for option in ("batch_invariant", "literal"):
        alone = problem_of("matvec", A, X, **{option: True})
        assert (alone.op, alone.batch, alone.shared_a) == ("matvec", 5, True)


def test_rows_of_a_batch_that_shares_b_run_as_one_product() -> None:
    A, B = np.zeros((2, 3, 4, 5)), np.zeros((5, 6))
    whole = problem_of("matmul", A, B)
    assert (whole.m, whole.batch, whole.shared_b) == (24, 1, False)
    single = problem_of("matmul", np.zeros((6, 1, 4)), np.zeros((4, 5)))
    assert (single.op, single.m, single.batch) == ("matmul", 6, 1)
    partly = problem_of("matmul", A, np.zeros((2, 1, 5, 6)))
    assert (partly.m, partly.batch, partly.shared_b) == (12, 2, False)
    apart = problem_of("matmul", A[0, :, :3], B)  # rows with gaps
    assert (apart.m, apart.batch, apart.shared_b) == (3, 3, True)
    asked = problem_of("matmul", A, B, literal=True)
    assert (asked.m, asked.batch, asked.shared_b) == (4, 6, True)


def test_batches_collapse_to_one_axis() -> None:
    problem = problem_of("matmul", np.zeros((2, 3, 4, 5)), np.zeros((2, 3, 5, 6)))
    assert problem.batch == 6
    call_problem = problem_of("matmul", np.zeros((2, 1, 4, 5)), np.zeros((3, 5, 6)))
    assert call_problem.batch == 3  # the outer axis of 2 cannot be walked with one stride


STEPS = (1, 2, 3, 6, 54, 64)
SIZES = [(), (2,), (3, 2)]


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
@pytest.mark.parametrize("lead", SIZES, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_alignment_holds_wherever_vectors_start(op: str, lead: Shape, itemsize: int) -> None:
    """Unit sizes too: their strides say nothing, and those beside them are no longer excused."""
    dtype = {2: "float16", 4: "float32", 8: "float64"}[itemsize]
    for rows, cols, down, across in itertools.product((1, 2, 9), (1, 2, 32), STEPS, STEPS):
        shape = (*lead, rows, cols)
        outward = tuple(192 * (i + 1) for i in range(len(lead)))
        matrix = Form(shape, (*outward, down, across), dtype, 16)
        other = {"matvec": (cols,), "vecmat": (rows,), "matmul": (cols, 4)}[op]
        beside = Form(other, c_strides(other), dtype, 16)
        pair = (beside, matrix) if op == "vecmat" else (matrix, beside)
        call = canonical(op, *pair, None, Options(literal=True))
        assert call.a.shape[-2:] in ((rows, cols), (cols, rows))
        for start in _starts(call.a, call.problem.layout_a):
            assert start * itemsize % call.problem.alignment == 0, (matrix, call)


def _starts(view: View, layout: str) -> Iterator[int]:
    """Yield where the rows (columns, elements) of every batch entry begin, in elements."""
    walked = {"row": view.shape[:-1], "col": (*view.shape[:-2], 1, view.shape[-1])}
    for index in np.ndindex(walked.get(layout, view.shape)):
        yield sum(i * step for i, step in zip(index, view.strides, strict=False))


@pytest.mark.parametrize(
    ("op", "shape", "strides", "dtype"),
    [
        ("matvec", (1, 9), (54, 3), "float64"),
        ("vecmat", (1, 32, 1), (192, 6, 3), "float32"),
        ("matvec", (4, 1, 9), (108, 54, 3), "float64"),
    ],
)
def test_strides_beside_a_unit_size_count(
    op: str, shape: Shape, strides: Shape, dtype: str
) -> None:
    length = shape[-1] if op == "matvec" else shape[-2]
    matrix, vector = Form(shape, strides, dtype, 16), Form((length,), (1,), dtype, 16)
    pair = (matrix, vector) if op == "matvec" else (vector, matrix)
    assert canonical(op, *pair, None, Options()).problem.alignment == 8


def test_c_strides() -> None:
    assert c_strides((2, 3, 4)) == (12, 4, 1)
    assert c_strides((2, 0, 4)) == (4, 4, 1)
    assert c_strides(()) == ()


@pytest.mark.parametrize(
    ("op", "a", "b", "words"),
    [
        ("matmul", (), (3,), "0-D"),
        ("matmul", (3,), (), "0-D"),
        ("matmul", (3,), (4,), "equally long"),
        ("matmul", (2, 3), (4, 2), "3 columns and the second 4 rows"),
        ("matmul", (2, 2, 3), (3, 3, 2), "do not broadcast"),
        ("matvec", (3,), (3,), "two or more dimensions"),
        ("matvec", (2, 3), (2,), "3 elements along the summed axis and the vector 2"),
        ("matvec", (2, 2, 3), (4, 3), "do not broadcast"),
        ("vecmat", (3,), (2, 3), "seen transposed"),
        ("vecmat", (), (2, 3), "two or more"),
    ],
)
def test_wrong_shapes(op: str, a: tuple[int, ...], b: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        problem_of(op, np.zeros(a), np.zeros(b))


def test_every_vector_of_a_random_product_starts_as_aligned_as_the_problem_says() -> None:
    """Rows of a row-major matrix, columns of a column-major one, vectors, in every batch entry."""
    rng = np.random.default_rng(11)
    aligned = 0
    for number in range(600):
        op = ("matvec", "vecmat", "matmul")[number % 3]
        case = random_case(rng, ops=("matmul" if op == "matmul" else "matvec",), signatures=DENSE)
        inputs = make_inputs(case.problem, case.kind, case.seed, case.view)
        a, b = inputs.a, inputs.b
        left, right = (b, a.swapaxes(-1, -2)) if op == "vecmat" else (a, b)
        forms = [_device_form(array) for array in (left, right, inputs.out)]
        call = canonical(op, *forms, Options(out_dtype=case.problem.out))
        arrays = (right, left, inputs.out) if call.swapped else (left, right, inputs.out)
        problem = call.problem
        aligned += problem.alignment == 16
        layouts = (problem.layout_a, problem.layout_b, problem.layout_out)
        for array, view, layout in zip(arrays, (call.a, call.b, call.out), layouts, strict=True):
            if 0 in view.shape:
                continue
            vectors = (view.shape == call.b.shape and problem.op == "matvec") or view is call.out
            walked = len(view.shape) - (2 if layout == "col" and not vectors else 1)
            starts = [s for axis, s in enumerate(view.shape) if axis != walked]
            steps = [s for axis, s in enumerate(view.strides) if axis != walked]
            base = array.__array_interface__["data"][0]
            for index in np.ndindex(*starts):
                offset = sum(i * step for i, step in zip(index, steps, strict=True))
                assert (base + offset * array.itemsize) % problem.alignment == 0, (case, call)
    assert aligned > 30


def _device_form(array: Array) -> Form:
    strides = tuple(step // array.itemsize for step in array.strides)
    pointer = array.__array_interface__["data"][0]
    return Form(array.shape, strides, array.dtype.name, alignment_of(pointer))


def test_a_batch_that_lies_backwards_is_aligned_to_its_elements() -> None:
    """TMA knows no negative steps, and reads what is aligned to 16 bytes."""
    form = Form((4, 16, 16), (-256, 16, 1), "float16", 16)
    forwards = Form((4, 16, 16), (256, 16, 1), "float16", 16)
    for a, b in ((form, forwards), (forwards, form)):
        assert canonical("matmul", a, b, None, Options()).problem.alignment == 2
    assert canonical("matmul", forwards, forwards, None, Options()).problem.alignment == 16


def test_who_names_no_option_asks_for_none() -> None:
    """Each of these keeps a library's or a rounding rung from products that did not ask for it."""
    asked = DEFAULT.batch_invariant, DEFAULT.literal, DEFAULT.scaled, DEFAULT.exact
    assert asked == (False,) * 4
    assert (DEFAULT.out_dtype, DEFAULT.accumulate, DEFAULT.rung) == (None,) * 3


def test_activations_may_be_asked_for_on_either_side_of_codes() -> None:
    spec = QuantSpec(4, 64, True, "mma16", "float16", False)
    codes = Form.packed((64, 64), "uint4")._replace(quant=spec)
    floats, asked = Form.packed((64, 64), "float32"), Options(activations="int8")
    for pair in ((codes, floats), (floats, codes)):
        assert canonical("matmul", *pair, None, asked).problem.codes.activations == "int8"
    with pytest.raises(ValueError, match="both operands are dense"):
        canonical("matmul", floats, floats, None, asked)
