"""gemv and gemm: alpha, beta, and what must not be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmule as gm
import scalars_campaign
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from gemmule.core.problem import HALVES, numpy_dtype
from gemmule.core.registry import all_rungs
from gemmule.core.scalars import passes
from products import ARRANGEMENTS, assert_same, exact, small

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "uint16", "complex128"]
RESULT = {"uint16": "uint64"}


def operands(dtype: str) -> tuple[Any, Any, Any, Any, str]:
    rng = np.random.default_rng(1)
    A, x, B = small(rng, (6, 11), dtype), small(rng, (11,), dtype), small(rng, (11, 4), dtype)
    return A, x, B, rng, RESULT.get(dtype, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alpha", [0, 1, 2, 3])
@pytest.mark.parametrize("beta", [0, 1, 2])
def test_alpha_and_beta(dtype: str, alpha: int, beta: int) -> None:
    A, x, B, rng, result = operands(dtype)
    for function, op, right, shape in (
        (gm.gemv, "matvec", x, (6,)),
        (gm.gemm, "matmul", B, (6, 4)),
    ):
        y = small(rng, shape, result)
        truth = alpha * exact(op, A, right) + beta * exact(
            "matmul", y, np.eye(shape[-1], dtype=int)
        )
        assert function(A, right, y, alpha=alpha, beta=beta) is y
        assert_same(y, truth, result)
        if beta == 0:
            assert_same(function(A, right, alpha=alpha), truth, result)


def test_fractions_and_negatives() -> None:
    A, x, _, _, _ = operands("float32")
    y = np.ones(6, np.float32)
    gm.gemv(A, x, y, alpha=-0.5, beta=0.25)
    assert_same(y, -0.5 * exact("matvec", A, x) + 0.25, "float32")
    y = np.ones(6, np.float32)
    gm.gemv(A, x, y, alpha=np.float32(-0.5), beta=np.int64(2))
    assert_same(y, -0.5 * exact("matvec", A, x) + 2, "float32")
    z = np.ones(6, np.complex128)
    gm.gemv(A.astype("c16"), x.astype("c16"), z, alpha=1j, beta=-1j)
    assert_same(z, 1j * exact("matvec", A, x) - 1j, "complex128")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("how", ["row", "reversed", "step_two"])
def test_beta_zero_never_reads_y(dtype: str, how: str) -> None:
    A, x, B, _, _ = operands(dtype)
    for poison in (np.nan, np.inf, -np.inf):
        y = ARRANGEMENTS[how](np.full(6, poison, numpy_dtype(dtype)))
        C = ARRANGEMENTS[how](np.full((6, 4), poison, numpy_dtype(dtype)))
        assert_same(gm.gemv(A, x, y, alpha=2), 2 * exact("matvec", A, x), dtype)
        assert_same(gm.gemm(A, B, C, alpha=2), 2 * exact("matmul", A, B), dtype)
        y[...] = poison
        assert_same(gm.gemv(A, x, y, alpha=0), np.zeros(6), dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_alpha_zero_reads_neither_operand(dtype: str) -> None:
    A, x, B = np.full((6, 11), np.nan, dtype), np.full(11, np.inf, dtype), np.ones((11, 4), dtype)
    y, C = np.arange(6).astype(dtype), np.ones((6, 4), dtype)
    assert_same(gm.gemv(A, x, y, alpha=0, beta=2), 2.0 * np.arange(6), dtype)
    assert_same(gm.gemm(A, B, C, alpha=0, beta=3), np.full((6, 4), 3.0), dtype)


def test_nan_in_y_stays_with_beta_one() -> None:
    A, x, _, _, _ = operands("float64")
    y = np.zeros(6)
    y[2] = np.nan
    gm.gemv(A, x, y, beta=1)
    assert np.flatnonzero(np.isnan(y)).tolist() == [2]


def test_empty_reductions_scale_y() -> None:
    y = np.full(3, 2.0)
    assert_same(gm.gemv(np.zeros((3, 0)), np.zeros(0), y, beta=3), np.full(3, 6.0), "float64")
    assert gm.gemm(np.zeros((0, 2)), np.zeros((2, 3))).shape == (0, 3)


@pytest.mark.parametrize("how", ["col", "sliced", "reversed", "step_two"])
def test_results_of_any_strides(how: str) -> None:
    A, _, B, rng, _ = operands("float32")
    C = ARRANGEMENTS[how](small(rng, (6, 4), "float32"))
    truth = exact("matmul", A, B) - 2 * C.astype("f8")
    assert gm.gemm(A, B, C, beta=-2) is C
    assert_same(C, truth, "float32")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda A, x: gm.gemv(A, x, beta=1), ValueError, "no array to add to"),
        (lambda A, x: gm.gemv(A[None], x), ValueError, "gemv takes operands of 2 and 1 dimensions"),
        (lambda A, x: gm.gemv(A, A), ValueError, "gemv takes operands of 2 and 1"),
        (lambda A, x: gm.gemm(A, x), ValueError, "gemm takes operands of 2 and 2"),
        (lambda A, x: gm.gemv(A, x[:2]), ValueError, "along the summed axis"),
        (lambda A, x: gm.gemv(A, x, np.zeros(4)), ValueError, r"out has shape \(4,\)"),
        (lambda A, x: gm.gemv(A, x, np.zeros(3, int)), TypeError, "kind float"),
        (lambda A, x: gm.gemv(A, x, x), ValueError, "overlaps an input"),
        (lambda A, x: gm.gemv(A, x, alpha="2"), TypeError, r"alpha is '2' of type str"),
        (lambda A, x: gm.gemv(A, x, alpha=1j), TypeError, "must be int or float"),
        (lambda A, x: gm.gemv(A.astype(int), x.astype(int), alpha=0.5), TypeError, "must be int"),
        (
            lambda A, x: gm.gemv(A.astype("u8"), x.astype("u8"), alpha=-1),
            ValueError,
            "alpha is -1, which uint64",
        ),
        (
            lambda A, x: gm.gemv(A.astype(int), x.astype(int), alpha=2**63),
            ValueError,
            "alpha is 9223372036854775808, which int64",
        ),
        (
            lambda A, x: gm.gemv(A.astype(int), x.astype(int), alpha=10**40),
            ValueError,
            "alpha is an integer of 133 bits",
        ),
        (lambda A, x: gm.gemv(A, x, alpha=10**400), ValueError, "an integer of 1329 bits"),
        (lambda A, x: gm.gemv(A, x, x * 1, beta=-(10**400)), ValueError, "beta is an integer of"),
        (lambda A, x: gm.gemm(A + 0j, A + 0j, alpha=10**400), ValueError, "the largest double"),
    ],
)
def test_mistakes_are_told(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(np.eye(3), np.ones(3))


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_scaled_before_they_are_rounded(dtype: str) -> None:
    """A sum of 10^6 is no float16, and 10^3 is one."""
    kind = numpy_dtype(dtype)
    A, B = np.full((100, 100), 100, kind), np.full((100, 3), 100, kind)
    truth = np.full((100, 3), 1000, np.float32).astype(kind).astype(float)
    assert_same(gm.gemm(A, B, alpha=1e-3), truth, dtype)
    assert_same(gm.gemv(A, B[:, 0].copy(), alpha=1e-3), truth[:, 0], dtype)
    row = gm.gemm(A[:1], A, np.ones((1, 100), kind), alpha=1e-3, beta=24)  # runs as a matvec
    assert_same(row, np.full((1, 100), 1024.0), dtype)
    Q = gm.quantize(np.full((8, 32), 100.0, np.float32), 8, -1, symmetric=True)
    made = gm.gemv(Q, np.full(32, 1000, kind), alpha=1e-3)
    np.testing.assert_allclose(made.astype(float), 3200, rtol=2**-7)


def test_a_half_is_rounded_once() -> None:
    """2049 is no float16: rounded before -2047 is added, the result would be 1."""
    A, x, y = np.ones((1, 2), "f2"), np.array([2048, 1], "f2"), np.array([2047], "f2")
    assert gm.gemv(A, x, y, beta=-1).tolist() == [2]
    C = np.array([[2047]], "f2")
    assert gm.gemm(A, x[:, None], C, beta=-1).tolist() == [[2]]


def test_a_narrow_result_is_scaled_in_the_dtype_of_the_sum() -> None:
    y = gm.gemv(np.full((2, 2), 1e300), np.ones(2), np.ones(2, "f4"), alpha=1e-300, beta=1)
    assert y.tolist() == [3, 3]


@pytest.mark.parametrize("rung", list(all_rungs("cpu")), ids=lambda r: f"{r.folder}-{r.name}")
def test_rungs_of_halves_give_their_sums_too(rung: Any) -> None:
    """gemv and gemm take the float32 sums of the rung that computes the half."""
    narrow = [s for s in rung.signatures if s[2] in HALVES]
    assert {(a, b, "float32") for a, b, _ in narrow} <= set(rung.signatures)


LARGE = [2**53 + 1, -(2**53) - 1, 2**62 + 3, 2**63 - 1, -(2**63), -(2**63) + 1, 2**64 - 1, 2**63]


@pytest.mark.parametrize("alpha", [0, 1, 3, *LARGE])
@pytest.mark.parametrize("beta", [0, 1, *LARGE, 6 * (2**60 + 1), 2**40 * (2**23 + 1)])
def test_launches_of_doubles_make_up_every_integer(alpha: int, beta: int) -> None:
    product, out = 12345678901, 987654321
    truth = alpha * product + beta * out
    launches = passes(alpha, beta, "uint64")
    assert len(launches) <= 3
    for first, second in launches:
        assert -(2.0**63) <= first < 2.0**63
        assert -(2.0**63) <= second < 2.0**63
        out = int(first) * product + int(second) * out
    assert (out - truth) % 2**64 == 0


def test_scalars_of_every_kind_on_the_host() -> None:
    signatures = [s for s in scalars_campaign.SIGNATURES if s[0] in DTYPES and s[0] == s[2]]
    counts = scalars_campaign.judged(
        800, 15, scalars_campaign.on_host, tuple(signatures), scalars_campaign.LAID
    )
    assert counts == {"right": 800}


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
def test_scalars_on_an_emulated_device() -> None:
    """Whole calls, from the public function to the kernel: NaN behind alpha = 0, 64-bit scalars."""
    signatures = (("int64",) * 3, ("float16",) * 3, ("float32",) * 3)
    with emulated(seed=3):
        counts = scalars_campaign.judged(
            120, 16, scalars_campaign.on_device, signatures, ("row", "col")
        )
    assert counts == {"right": 120}


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
def test_old_results_are_scaled_alone_beside_codes_and_other_dtypes_on_an_emulated_device() -> None:
    """With alpha = 0 nothing is multiplied, whatever the operands hold."""
    nan = np.full((3, 12), np.nan, "f4")
    Q = gm.quantize(np.ones((12, 64), "f4"), bits=4, group_size=32)
    half, whole = nan.astype("f2"), np.ones((12, 5), "i1")
    with emulated():
        for A, B in ((nan, Q), (Q, np.full((64, 3), np.inf, "f4")), (half, whole.astype("f8")),
                     (nan.astype("f8"), whole.astype("f2")), (whole.T, whole)):  # fmt: skip
            shape = (A.shape[0], B.shape[1])
            dtype = "i4" if A.dtype == "i1" else "f8" if "f8" in (A.dtype, B.dtype) else "f4"
            C = np.arange(shape[0] * shape[1], dtype=dtype).reshape(shape)
            twice = 2 * C
            made = gm.gemm(A, B, C, alpha=0, beta=2, device="cuda:1")
            np.testing.assert_array_equal(made, twice)


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
def test_host_arrays_by_way_of_a_device() -> None:
    """device="cuda:1" copies in and out: into a given result of any strides, or a fresh one."""
    rng = np.random.default_rng(4)
    A, x = rng.integers(-4, 5, (5, 48)).astype("f4"), rng.integers(-4, 5, 48).astype("f4")
    with emulated():
        made = gm.matvec(A, x, device="cuda:1")
        assert type(made) is np.ndarray
        np.testing.assert_array_equal(made, A @ x)
        for out in (np.full(5, np.nan, "f4"), np.full((5, 2), np.nan, "f4")[:, 1]):
            assert gm.matvec(A, x, out=out, device="cuda:1") is out
            np.testing.assert_array_equal(out, A @ x)
        with pytest.raises(ValueError, match="out has shape"):
            gm.matvec(A, x, out=np.zeros(6, "f4"), device="cuda:1")
        with pytest.raises(ValueError, match="overlaps an input"):
            gm.matvec(A[:, :5], x[:5], out=x[:5], device="cuda:1")


@pytest.mark.parametrize("fault", ["rounded alpha", "skipped beta", "lost sign", "read at zero"])
def test_the_judge_of_scalars_sees(fault: str) -> None:
    def faulty(case: scalars_campaign.Case) -> Any:
        alpha = np.float16(case.alpha) if fault == "rounded alpha" else case.alpha
        made = np.zeros(case.C.shape)
        if alpha != 0 or fault == "read at zero":
            made = float(alpha.real) * (case.A @ case.B)
        if case.beta != 0 and fault != "skipped beta":
            made = made + case.beta * case.C
        return abs(made) if fault == "lost sign" else made

    counts = scalars_campaign.judged(300, 15, faulty, (("float64",) * 3,), ("row",))
    assert counts["wrong"]


def test_parts_that_cancel_may_end_in_infinity_where_a_rounding_reaches_it() -> None:
    def said(c: float, result: float) -> str:
        A, B, C, made = (np.array([[v]], np.float16) for v in (2, 3, c, result))
        return scalars_campaign.wrong(scalars_campaign.Case("gemm", A, B, C, 1e30, 1e30), made)

    assert not any(said(-6, result) for result in (0, np.inf, -np.inf, 5e4))
    assert said(-6, np.nan)
    assert not said(-5, np.inf)
    assert all(said(-5, result) for result in (0, -np.inf, 5e4))
