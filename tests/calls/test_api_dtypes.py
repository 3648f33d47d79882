"""The dtype table of the public functions, on the host."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import gemmule as gm
from gemmule.core.problem import COMPLEX, FLOAT8, FLOATS, INTEGERS, numpy_dtype, result_dtype
from products import assert_same, exact, small

GROUPS = (FLOATS, FLOAT8 + FLOATS, INTEGERS, COMPLEX + FLOATS)
PAIRS = sorted({pair for group in GROUPS for pair in itertools.product(group, repeat=2)})


def legal(a: str, b: str) -> str | None:
    try:
        return result_dtype(a, b)
    except TypeError:
        return None


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_pair(a: str, b: str) -> None:
    rng = np.random.default_rng(1)
    A, x, B = small(rng, (7, 19), a), small(rng, (19,), b), small(rng, (19, 5), b)
    dtype = legal(a, b)
    if dtype is None:
        for function, right in ((gm.matvec, x), (gm.matmul, B)):
            with pytest.raises(TypeError, match="no integer dtype holds both"):
                function(A, right)
        return
    assert_same(gm.matvec(A, x), exact("matvec", A, x), dtype)
    assert_same(gm.vecmat(x, A.T), exact("vecmat", x, A.T), dtype)
    assert_same(gm.matmul(A, B), exact("matmul", A, B), dtype)


@pytest.mark.parametrize(("a", "b"), [*itertools.product(FLOAT8 + FLOATS, repeat=2)])
def test_nothing_that_is_not_finite_is_hidden_by_a_zero(a: str, b: str) -> None:
    """In sums of 0, 1 and 2 terms, by the default choice and by those for hosts without Numba."""
    known = [rung.name for rung in gm.ladder("matvec", "cpu") if "upcast" in rung.name]
    named = [None, *(known if numpy_dtype(a).itemsize < 4 or a == b else ())]
    for n, value in itertools.product((0, 1, 2), (np.nan, np.inf, -np.inf)):
        A, x = np.full((3, n), value).astype(numpy_dtype(a)), np.zeros(n, numpy_dtype(b))
        expected = np.full(3, np.nan if n else 0.0)
        for rung in named:
            np.testing.assert_array_equal(gm.matvec(A, x, rung=rung).astype(float), expected)
            np.testing.assert_array_equal(gm.vecmat(x, A.T, rung=rung).astype(float), expected)
        zero, there = np.zeros((3, n), A.dtype), np.full(n, value).astype(x.dtype)
        np.testing.assert_array_equal(gm.matvec(zero, there).astype(float), expected)
        product = gm.matmul(A, x[:, None]).astype(float)
        np.testing.assert_array_equal(product[:, 0], expected)
        plan, turned = gm.plan("matvec", A, x), gm.plan("vecmat", x, A.T)
        for _ in range(2):  # products that were met before, which go another way
            np.testing.assert_array_equal(plan(A, x).astype(float), expected)
            np.testing.assert_array_equal(turned(x, A.T).astype(float), expected)


@pytest.mark.parametrize("a", ["int8", "int32", "uint64"])
@pytest.mark.parametrize("b", [*FLOATS, "complex64", "float8_e4m3fn"])
def test_integers_with_floats_are_refused(a: str, b: str) -> None:
    A, B = np.zeros((3, 3), a), np.zeros((3, 3), numpy_dtype(b))
    for function, left, right in (
        (gm.matmul, A, B),
        (gm.matmul, B, A),
        (gm.matvec, A, B[0]),
        (gm.vecmat, B[0], A),
    ):
        with pytest.raises(TypeError, match="integers and floats do not mix"):
            function(left, right)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int32", "uint32", "int16", "uint16"])
def test_wide_integers_wrap_modulo_two_to_the_64(dtype: str) -> None:
    rng = np.random.default_rng(2)
    limits = np.iinfo(dtype)
    A = rng.integers(limits.min, limits.max, (9, 33), dtype, endpoint=True)
    x = rng.integers(limits.min, limits.max, (33,), dtype, endpoint=True)
    A[0], x[0] = limits.max, limits.min
    B = np.stack([x, x[::-1]], axis=1)
    unsigned = dtype.startswith("u")
    truth = A.astype(object) @ B.astype(object)
    half = 0 if unsigned else 2**63
    wrapped = ((truth + half) % 2**64 - half).astype("uint64" if unsigned else "int64")
    np.testing.assert_array_equal(gm.matmul(A, B), wrapped)
    np.testing.assert_array_equal(gm.matvec(A, x), wrapped[:, 0])
    np.testing.assert_array_equal(gm.vecmat(x, np.ascontiguousarray(A.T)), wrapped[:, 0])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("int64", "int64"),
        ("int8", "int8"),
        ("uint64", "uint64"),
        ("int16", "uint32"),
        ("uint8", "int8"),
    ],
)
@pytest.mark.parametrize("out", ["int32", "int64", "uint64"])
def test_integers_give_every_integer_result_modulo_its_size(a: str, b: str, out: str) -> None:
    rng = np.random.default_rng(4)

    def drawn(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)

    A, B, old = drawn((5, 9), a), drawn((9, 3), b), drawn((5, 3), out)
    sums = A.astype(object) @ B.astype(object)

    def wrapped(values: np.ndarray) -> np.ndarray:
        return (values % 2**64).astype("uint64").astype(out)

    y = np.empty(5, out)
    for found, truth in (
        (gm.matmul(A, B, out_dtype=out), sums),
        (gm.matvec(A, B[:, 0], out=y, out_dtype=out), sums[:, 0]),
        (gm.vecmat(A[1], B, out_dtype=out), sums[1]),
        (gm.gemm(A, B, old.copy(), alpha=3, beta=5), 3 * sums + 5 * old.astype(object)),
    ):
        assert found.dtype == out
        np.testing.assert_array_equal(found, wrapped(truth))


@pytest.mark.parametrize(("a", "b"), [*itertools.product(["int8", "uint8"], repeat=2)])
def test_8_bit_extremes_fit_int32(a: str, b: str) -> None:
    for low, high in itertools.product((True, False), repeat=2):
        A = np.full((3, 1000), np.iinfo(a).min if low else np.iinfo(a).max, a)
        x = np.full(1000, np.iinfo(b).min if high else np.iinfo(b).max, b)
        truth = np.full(3, int(A[0, 0]) * int(x[0]) * 1000)
        assert_same(gm.matvec(A, x), truth, "int32")
        assert_same(gm.matmul(A, np.stack([x, x, x], 1))[:, 1], truth, "int32")


def test_the_longest_8_bit_sum_and_the_one_beyond() -> None:
    n = 131_071
    A, x = np.full((2, n + 1), -128, np.int8), np.full(n + 1, -128, np.int8)
    assert_same(gm.matvec(A[:, :n], x[:n]), np.full(2, 2**14 * n), "int32")
    for call in (
        lambda **o: gm.matvec(A, x, **o),
        lambda **o: gm.vecmat(x, A.T, **o),
        lambda **o: gm.matmul(A, A.T, **o),
    ):
        with pytest.raises(ValueError, match=r"131,072 products.*out_dtype='int64'"):
            call()
        for wide in ("int64", "uint64"):
            assert int(call(out_dtype=wide).max()) == 2**14 * (n + 1) == 2**31
    assert_same(gm.gemv(A, x, np.zeros(2, np.int64)), np.full(2, 2**31), "int64")


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [("uint8", "uint8", 33_025), ("uint8", "int8", 65_793), ("int8", "uint8", 65_793)],
)
def test_the_longest_sum_of_unsigned_bytes(a: str, b: str, n: int) -> None:
    values = [np.iinfo(t).max if t == "uint8" else np.iinfo(t).min for t in (a, b)]
    A, x = np.full((2, n + 1), values[0], a), np.full(n + 1, values[1], b)
    product = int(values[0]) * int(values[1])
    assert_same(gm.matvec(A[:, :n], x[:n]), np.full(2, product * n), "int32")
    with pytest.raises(ValueError, match=rf"{n + 1:,} products.*out_dtype='int64'"):
        gm.matvec(A, x)
    assert_same(gm.matvec(A, x, out_dtype="int64"), np.full(2, product * (n + 1)), "int64")


@pytest.mark.parametrize(
    ("a", "out"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float64"),
        ("float64", "float32"),
        ("float16", "float64"),
        ("int8", "int64"),
        ("int64", "int32"),
        ("complex64", "complex128"),
        ("float8_e4m3fn", "float16"),
        ("float32", "bfloat16"),
    ],
)
def test_out_dtype(a: str, out: str) -> None:
    rng = np.random.default_rng(3)
    A, B = small(rng, (9, 20), a), small(rng, (20, 6), a)
    for given in (out, numpy_dtype(out), numpy_dtype(out).type):
        assert_same(gm.matmul(A, B, out_dtype=given), exact("matmul", A, B), out)
    target = np.empty(9, numpy_dtype(out))
    assert gm.matvec(A, B[:, 0].copy(), out_dtype=out, out=target) is target
    assert_same(target, exact("matvec", A, B[:, 0]), out)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_halves_accumulate_in_float32(half: str) -> None:
    n = 4096
    A = np.ones((2, n), numpy_dtype(half))
    assert gm.matvec(A, A[0])[0] == n  # a half sum stands still at 2048 or 256
    assert gm.matmul(A, A.T)[1, 0] == n
    assert gm.vecmat(A[0], np.ones((n, 3), A.dtype))[0] == n


def test_half_results_overflow_to_infinity_silently() -> None:
    A = np.full((2, 300), 60000, np.float16)
    with np.errstate(all="raise"):
        assert np.isposinf(gm.matvec(A, A[0])).all()
        assert np.isneginf(gm.matmul(A, -A.T)).all()
    assert np.isfinite(gm.matvec(A, A[0], out_dtype="float32")).all()


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_no_rung_lets_numpy_complain_of_what_ieee_has(op: str, dtype: str) -> None:
    """Overflow, infinity less infinity and NaN are results, whatever a caller's errstate says."""
    rng = np.random.default_rng(7)
    A = np.full((20, 40), float(ml_dtypes.finfo(dtype).max)).astype(numpy_dtype(dtype))
    A[3, 6], A[4, :3:2] = np.nan, (np.inf, -np.inf)
    x = np.where(rng.random(40) < 0.5, 1.0, 2.0).astype(A.dtype)
    a, b = {"matvec": (A, x), "vecmat": (x, A.T), "matmul": (A, A.T)}[op]
    finite = 20 if op != "matmul" else 400
    done = 0
    for rung in [None, *(rung.name for rung in gm.ladder(op, "cpu"))]:
        for left, right in ((a, b), (a[..., ::2], b[::2])):
            with np.errstate(all="raise"):
                try:
                    found = getattr(gm, op)(left, right, rung=rung)
                except ValueError:  # a rung that does not take these
                    continue
            done += 1
            wide = found.astype(np.float64)
            assert wide.size == finite
            assert np.isnan(wide).any()
            assert np.isposinf(wide).any()
    assert done > 4


def test_complex_products_are_not_conjugated() -> None:
    rng = np.random.default_rng(4)
    for dtype in COMPLEX:
        A, x = small(rng, (5, 8), dtype), small(rng, (8,), dtype)
        assert_same(gm.vecmat(x, A.T), exact("vecmat", x, A.T), dtype)
        assert_same(gm.matmul(x, x), np.einsum("i,i", x, x), dtype)


def test_float32_is_at_least_as_accurate_as_its_bound() -> None:
    rng = np.random.default_rng(5)
    A, B = rng.standard_normal((50, 500), "float32"), rng.standard_normal((500, 40), "float32")
    error = np.abs(gm.matmul(A, B) - A.astype("f8") @ B.astype("f8"))
    scale = np.abs(A).astype("f8") @ np.abs(B).astype("f8")
    assert (error <= 500 * 2.0**-24 * scale).all()  # gamma_500: TF32 would be 2^-11
    assert (error <= 2.0**-20 * scale).all()
