"""The public functions on NumPy arrays: shapes, strides, out=, options, errors."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import gemmule as gm
from operand_shapes import CASES
from products import ARRANGEMENTS, assert_same, exact, small

FUNCTIONS = {"matvec": gm.matvec, "vecmat": gm.vecmat, "matmul": gm.matmul}
NUMPY = {"matvec": np.matvec, "vecmat": np.vecmat, "matmul": np.matmul}

# Larger than a SIMD register and a row block, odd, with and without a batch.
MEDIUM = [
    ("matvec", (37, 59), (59,)),
    ("matvec", (3, 37, 59), (3, 59)),
    ("matvec", (37, 59), (5, 59)),
    ("vecmat", (59,), (59, 37)),
    ("vecmat", (3, 59), (3, 59, 37)),
    ("matmul", (37, 59), (59, 18)),
    ("matmul", (3, 37, 59), (3, 59, 18)),
    ("matmul", (37, 59), (3, 59, 18)),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "float16"])
@pytest.mark.parametrize(("op", "a", "b"), CASES + MEDIUM)
def test_every_shape(op: str, a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(1)
    left, right = small(rng, a, dtype), small(rng, b, dtype)
    truth = exact(op, left, right)
    assert truth.shape == NUMPY[op](left, right).shape
    expected = "int32" if dtype == "int8" else dtype
    assert_same(FUNCTIONS[op](left, right), truth, expected)
    out = np.full(truth.shape, 99, expected)
    assert FUNCTIONS[op](left, right, out=out) is out
    assert_same(out, truth, expected)


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32",) * 2,
        ("float32", "float16"),
        ("int16", "int64"),
        ("int8", "uint8"),
        ("float8_e4m3fn", "float8_e5m2"),
    ],
)
@pytest.mark.parametrize("op", FUNCTIONS)
def test_operands_broadcast_along_different_axes(op: str, dtypes: tuple[str, str]) -> None:
    rng = np.random.default_rng(3)
    cores = {"matvec": ((4, 5), (5,)), "vecmat": ((4,), (4, 5)), "matmul": ((4, 5), (5, 6))}[op]
    batches = [(2, 3), (1, 3), (2, 1), (3,), (1, 1, 3), ()]
    for of_left, of_right in itertools.product(batches, repeat=2):
        for first, second in (dtypes, dtypes[::-1]):
            left = small(rng, (*of_left, *cores[0]), first)
            right = small(rng, (*of_right, *cores[1]), second)
            found = FUNCTIONS[op](left, right)
            np.testing.assert_array_equal(found, exact(op, left, right))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int16", "complex64"])
@pytest.mark.parametrize("op", FUNCTIONS)
def test_every_pair_of_arrangements(op: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    results = {"int16": "int64"}
    single, batched = [case[1:] for case in MEDIUM if case[0] == op][:2]
    pairs = [(single, how_a, how_b) for how_a in ARRANGEMENTS for how_b in ARRANGEMENTS]
    pairs += [(batched, how, how) for how in ARRANGEMENTS]
    for (a, b), how_a, how_b in pairs:
        left = ARRANGEMENTS[how_a](small(rng, a, dtype))
        right = ARRANGEMENTS[how_b](small(rng, b, dtype))
        before = left.tobytes(), right.tobytes()
        assert_same(FUNCTIONS[op](left, right), exact(op, left, right), results.get(dtype, dtype))
        assert (left.tobytes(), right.tobytes()) == before, f"{how_a} {how_b}: an input changed"


@pytest.mark.parametrize("how", ["row", "col", "sliced", "reversed", "step_two"])
@pytest.mark.parametrize(("op", "a", "b"), MEDIUM)
def test_out_of_any_strides(op: str, a: tuple[int, ...], b: tuple[int, ...], how: str) -> None:
    rng = np.random.default_rng(3)
    left, right = small(rng, a, "float32"), small(rng, b, "float32")
    truth = exact(op, left, right)
    out = ARRANGEMENTS[how](np.full(truth.shape, np.nan, "float32"))
    whole = out if out.base is None else out.base
    outside = whole.size - out.size
    assert FUNCTIONS[op](left, right, out=out) is out
    assert_same(out, truth, "float32")
    if how in ("sliced", "step_two"):  # the elements around hold 7 still
        assert np.count_nonzero(whole == 7) >= outside
        probe = whole.copy()
        view = ARRANGEMENTS[how](np.zeros(truth.shape, "float32"))
        mask = np.ones(view.base.shape, bool)  # type: ignore[union-attr]
        index = slice(None, None, 2) if how == "step_two" else None
        region = tuple(index or slice(1, 1 + size) for size in truth.shape)
        mask[region] = False
        assert (probe[mask] == 7).all()


@pytest.mark.parametrize("op", FUNCTIONS)
def test_bad_out_is_refused_and_left_alone(op: str) -> None:
    A, x = np.ones((4, 4)), np.ones(4)
    operands = {"matvec": (A, x), "vecmat": (x, A), "matmul": (A, A)}[op]
    shape = (4, 4) if op == "matmul" else (4,)
    for out, error in [
        (np.full((*shape, 1), 9.0), ValueError),
        (np.full(shape, 9, "float32"), TypeError),
        (np.full(shape, 9, ">f8"), ValueError),
        (ARRANGEMENTS["read_only"](np.full(shape, 9.0)), ValueError),
        (np.broadcast_to(np.full((), 9.0), shape), ValueError),
        ([9.0] * 4, TypeError),
    ]:
        before = np.array(out).tobytes()
        with pytest.raises(error, match="out "):
            FUNCTIONS[op](*operands, out=out)
        assert np.array(out).tobytes() == before
    with pytest.raises(ValueError, match="overlaps an input"):
        FUNCTIONS[op](*operands, out=A if op == "matmul" else x)
    with pytest.raises(ValueError, match="overlaps an input"):
        FUNCTIONS[op](*operands, out=A.T if op == "matmul" else A[0])
    np.testing.assert_array_equal(A, 1)


def test_inputs_may_be_one_array() -> None:
    A = small(np.random.default_rng(4), (20, 20))
    assert_same(gm.matmul(A, A), exact("matmul", A, A), "float64")
    assert_same(gm.matmul(A, A.T), exact("matmul", A, A.T), "float64")
    assert_same(gm.matvec(A, A[3]), exact("matvec", A, A[3]), "float64")
    assert_same(gm.matvec(A, A[:, 3]), exact("matvec", A, A[:, 3]), "float64")


@pytest.mark.parametrize("dtype", ["float32", "int32", "float16"])
@pytest.mark.parametrize(("rows", "columns"), [(0, 2), (2, 0)])
def test_a_batch_of_empty_results_is_not_counted_through(
    dtype: str, rows: int, columns: int
) -> None:
    A, B = np.zeros((2**40, rows, 0), dtype), np.zeros((0, columns), dtype)
    assert gm.matmul(A, B).shape == (2**40, rows, columns)


def test_empty_sums_are_zero_even_in_a_poisoned_out() -> None:
    for dtype in ("float64", "float32", "float16", "int8"):
        A, out = np.zeros((5, 0), dtype), np.full(5, 99, "int32" if dtype == "int8" else dtype)
        assert gm.matvec(A, A[0], out=out) is out
        np.testing.assert_array_equal(out, 0)
        C = np.full((5, 3), 99, out.dtype)
        gm.matmul(A, np.zeros((0, 3), dtype), out=C)
        np.testing.assert_array_equal(C, 0)


def test_the_inner_product_is_zero_dimensional() -> None:
    out = np.full((), 99.0)
    assert gm.matmul(np.arange(4.0), np.arange(4.0), out=out) is out
    assert out == 14
    assert gm.matmul(np.arange(4.0), np.arange(4.0)).shape == ()


class Frame:
    """A table of another library."""

    def to_numpy(self) -> None: ...


def test_the_signature_shows_every_keyword() -> None:
    shown = inspect.signature(gm.matvec).parameters
    assert list(shown)[:2] == ["A", "x"]
    options = {"out_dtype", "precision", "accumulate", "batch_invariant", "activations"}
    options |= {"rung", "params", "device"}
    assert set(shown) == {"A", "x", "out", *options}
    assert (shown["precision"].default, shown["out"].default) == ("float32", None)
    assert set(inspect.signature(gm.plan).parameters) == {
        "op",
        "a",
        "b",
        "offsets",
        "epilogue",
        "scale_a",
        "scale_b",
        *options,
    }
    for product, more in ((gm.vecmat, []), (gm.matmul, ["scale_a", "scale_b", "epilogue"])):
        names = [*inspect.signature(product).parameters.values()][2:]
        alike = [*shown.values()][2:]
        assert (names[: len(alike)], [one.name for one in names[len(alike) :]]) == (alike, more)


@pytest.mark.parametrize("name", ["matvec", "vecmat", "matmul", "grouped_matmul", "plan"])
def test_an_unknown_keyword_is_named_beside_those_that_there_are(name: str) -> None:
    A, x = np.eye(2), np.ones(2)
    operands = {"vecmat": (x, A), "plan": ("matvec", A, x), "grouped_matmul": (A, A[None], [2])}
    said = rf"^{name}\(\) got an unexpected keyword argument 'precison'.*(precision|params)"
    with pytest.raises(TypeError, match=said):
        getattr(gm, name)(*operands.get(name, (A, x)), precison="ieee")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda A, x: gm.matvec(A, x[:2]), ValueError, "3 elements along the summed axis"),
        (lambda A, x: gm.matvec(x, x), ValueError, "two or more dimensions"),
        (lambda A, x: gm.matmul(A, A[:2, :2]), ValueError, "3 columns and the second 2 rows"),
        (lambda A, x: gm.matmul(A, np.array(2.0)), ValueError, r"0-D .*Multiply by a scalar"),
        (lambda A, x: gm.matvec([[1.0]], x), TypeError, r"A is a list.*numpy.asarray"),
        (lambda A, x: gm.matvec(A, 1.0), TypeError, "x is a float"),
        (lambda A, x: gm.matvec(A > 0, x), TypeError, "A has dtype bool"),
        (lambda A, x: gm.matvec(A, x.astype("longdouble")), TypeError, "x has dtype"),
        (lambda A, x: gm.matvec(A.astype(object), x), TypeError, "A has dtype object"),
        (lambda A, x: gm.matvec(A, x.astype(int)), TypeError, "integers and floats do not mix"),
        (lambda A, x: gm.matvec(A, x, precision="fast"), ValueError, "precision is 'fast'"),
        (lambda A, x: gm.matvec(A, x, accumulate="int"), ValueError, "accumulate is 'int'"),
        (lambda A, x: gm.matvec(A, x, activations="int4"), ValueError, "activations is 'int4'"),
        (lambda A, x: gm.matvec(A, x, activations="int8"), ValueError, "both operands are dense"),
        (lambda A, x: gm.matvec(A, x, rung="scalar_lop"), ValueError, "mean 'scalar_loop'?"),
        (lambda A, x: gm.matvec(scipy.sparse.eye(3), x), TypeError, r"pass \.toarray\(\)"),
        (lambda A, x: gm.matvec(Frame(), x), TypeError, r"Pass \.to_numpy\(\)"),
        (lambda A, x: gm.matvec(A, x, out_dtype="int64"), TypeError, "kind float"),
        (lambda A, x: gm.matvec(A, x, out_dtype="floaty"), TypeError, "floaty"),
        (lambda A, x: gm.matvec(A, x, rung="magic"), ValueError, "'magic'; there are: "),
        (lambda A, x: gm.matvec(A, x, params={"p": 1}), ValueError, "params= goes with rung="),
        (lambda A, x: gm.matvec(A, x, device="cuda:x"), (ValueError, RuntimeError), "cuda"),
        (lambda A, x: gm.matvec(A, x, device="tpu"), (ValueError, RuntimeError), "tpu"),
        (lambda A, x: gm.plan("gemv", A, x), ValueError, "op is 'gemv'; it must be one of matvec"),
    ],
)
def test_mistakes_are_told(call: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(np.eye(3), np.ones(3))


def test_precision_and_accumulate_options_are_taken() -> None:
    rng = np.random.default_rng(5)
    A, x = small(rng, (20, 30), "float32"), small(rng, (30,), "float32")
    for options in (
        {"precision": "ieee"},
        {"precision": "tf32"},
        {"accumulate": "float32"},
        {"accumulate": "float16"},
        {"batch_invariant": True},
    ):
        assert_same(gm.matvec(A, x, **options), exact("matvec", A, x), "float32")


def test_batch_invariance_gives_each_vector_the_bits_it_gets_alone() -> None:
    rng = np.random.default_rng(6)
    A, X = rng.standard_normal((40, 300), "float32"), rng.standard_normal((7, 300), "float32")
    together = gm.matvec(A, X, batch_invariant=True)
    for i, x in enumerate(X):
        assert together[i].tobytes() == gm.matvec(A, x, batch_invariant=True).tobytes()


NAMED = [
    (op, rung.name)
    for op in ("matvec", "vecmat", "matmul")
    for rung in gm.ladder(op, "cpu")
    if rung.available() is None  # some need instructions that not every processor has
]


@pytest.mark.parametrize(("op", "name"), NAMED)
def test_every_rung_by_name(op: str, name: str) -> None:
    rng = np.random.default_rng(7)
    rung = next(r for r in gm.ladder(op, "cpu") if r.name == name)
    dtype = rung.signatures[0][0]
    shapes = {
        "matvec": ((17, 33), (33,)),
        "vecmat": ((33,), (33, 17)),
        "matmul": ((17, 33), (33, 9)),
    }
    left, right = (small(rng, shape, dtype) for shape in shapes[op])
    plan = gm.plan(op, left, right, rung=name)
    assert plan.rung.name == name
    assert plan.reason == "named by the caller"
    truth = exact(op, left, right)
    assert_same(FUNCTIONS[op](left, right, rung=name), truth, plan.problem.out)
    assert_same(plan(left, right), truth, plan.problem.out)
    params = {key: values[-1] for key, values in rung.params.items()}
    legal = [p for p in rung.space(plan.problem) if all(p[k] == v for k, v in params.items())]
    if legal:
        assert_same(FUNCTIONS[op](left, right, rung=name, params=params), truth, plan.problem.out)
    with pytest.raises(ValueError, match=r"no parameter 'nonsense'; it has: "):
        FUNCTIONS[op](left, right, rung=name, params={"nonsense": 1})
    for key in rung.params:
        with pytest.raises(ValueError, match=rf"{key}=-77 is outside its declared values"):
            FUNCTIONS[op](left, right, rung=name, params={key: -77})


def test_a_rung_of_another_operation_is_refused_with_reasons() -> None:
    with pytest.raises(ValueError, match=r"cannot compute matvec .*it computes matmul"):
        gm.matvec(np.eye(3), np.ones(3), rung="triple_loop")


@pytest.mark.parametrize("params", [["block"], 3, {1: 2}])
def test_params_must_be_a_mapping_of_names(params: Any) -> None:
    with pytest.raises(TypeError, match="params is"):
        gm.matvec(np.eye(3), np.ones(3), rung="scalar_loop", params=params)


def test_unhashable_parameter_values_are_told() -> None:
    with pytest.raises(ValueError, match=r"params: rows=\[1\] is no number"):
        gm.matvec(np.eye(3), np.ones(3), rung="threads", params={"rows": [1]})


def test_device_cpu_is_where_host_arrays_are() -> None:
    A = np.eye(3)
    assert_same(gm.matvec(A, A[0], device="cpu"), A[0], "float64")


def test_asarray_on_the_host() -> None:
    a = np.arange(6.0)[::2]
    assert gm.asarray(a) is a
    with pytest.raises(TypeError, match=r"a is a list"):
        gm.asarray([1.0])


def test_object_lifetimes_do_not_leak_results_into_each_other() -> None:
    A, x = np.eye(8), np.arange(8.0)
    first = gm.matvec(A, x)
    second = gm.matvec(A, x + 1)
    np.testing.assert_array_equal(first, np.arange(8.0))
    np.testing.assert_array_equal(second, np.arange(8.0) + 1)
    assert not np.shares_memory(first, second)


def test_one_nan_stays_in_its_row_and_column() -> None:
    for dtype in ("float64", "float32", "float16"):
        for how in ("row", "col", "reversed", "sliced"):
            A, B = np.ones((9, 11), dtype), np.ones((11, 6), dtype)
            A[4, 7] = np.nan
            B[2, 3] = np.inf
            C = gm.matmul(ARRANGEMENTS[how](A), ARRANGEMENTS[how](B))
            assert np.isnan(C[4]).all()
            rest = np.delete(C, 4, axis=0)
            assert np.isposinf(rest[:, 3]).all()
            np.testing.assert_array_equal(np.delete(rest, 3, axis=1), 11)
