"""What is refused of what NumPy multiplies: exactly what these tables hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.core.registry import all_rungs

# Of NumPy's dtypes, by their characters: what no product here takes. Times are numbers to NumPy.
REFUSED = {"?": "bool", "g": "longdouble", "G": "clongdouble", "O": "object", "m": "timedelta64"}
# Integers that no integer dtype holds both; NumPy's product is of float64.
NO_INTEGER = {frozenset(pair) for pair in itertools.product("bhilqnp", "LQNP")}
# An integer beside a float: which of both was meant is the caller's to say.
UNLIKE = {frozenset(pair) for pair in itertools.product("bBhHiIlLqQnNpP", "efdFD")}
MADE = {"S": "S2", "U": "U2", "V": "V2", "M": "M8[s]", "m": "m8[s]"}
SHAPES = {"matvec": ((2, 3), (3,)), "vecmat": ((2,), (2, 3)), "matmul": ((2, 3), (3, 2))}


def ones(shape: tuple[int, ...], char: str) -> Any:
    return np.ones(shape, "i8").astype(MADE.get(char, char))


def promoted(a: str, b: str) -> str:
    """Return the dtype of a product: NumPy's, but for integers, whose sums must not wrap."""
    pair = [np.dtype(char) for char in (a, b)]
    if any(one.kind not in "iu" for one in pair):
        return np.result_type(*pair).name
    if all(one.itemsize == 1 for one in pair):
        return "int32"
    return "uint64" if all(one.kind == "u" for one in pair) else "int64"


@pytest.mark.parametrize("op", SHAPES)
def test_every_pair_of_dtypes(op: str) -> None:
    chars = np.typecodes["All"]
    assert set(REFUSED) | set(MADE) <= set(chars)
    for a, b in itertools.product(chars, chars):
        left, right = (ones(shape, char) for shape, char in zip(SHAPES[op], (a, b), strict=True))
        try:
            getattr(np, op)(left, right)
            taken = not {a, b} & set(REFUSED) and frozenset((a, b)) not in NO_INTEGER | UNLIKE
        except (TypeError, ValueError, AttributeError):
            taken = False
        if taken:
            plan = gm.plan(op, left, right)  # type: ignore[call-overload]
            assert plan.problem.out == promoted(a, b), (a, b)
            continue
        with pytest.raises(TypeError, match=r"dtype|integers and floats"):
            gm.plan(op, left, right)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (np.longdouble, "float64"),
        (np.clongdouble, "complex128"),
        (np.bool, "float32"),
        ("complex32", "complex64"),
    ],
)
def test_the_advice_is_a_dtype_that_holds_the_numbers(given: Any, advice: str) -> None:
    if isinstance(given, str):
        torch = pytest.importorskip("torch")
        A = torch.ones(2, 2, dtype=torch.complex64).to(getattr(torch, given))
        x = torch.ones(2)
    else:
        A, x = np.ones((2, 2), given), np.ones(2)
    with pytest.raises(TypeError, match=f"'{advice}'.*PyTorch tensor with .to.torch.{advice}"):
        gm.matvec(A, x)


def test_what_lacks_beside_a_matrix_of_codes_or_of_experts_is_named() -> None:
    Q = gm.quantize(np.ones((8, 8), np.float32))
    for product in (gm.matmul, gm.matvec, gm.vecmat):
        with pytest.raises(TypeError, match=r"both operands are quantised.*\.dequantize\(\)"):
            product(Q, Q.T)
    with pytest.raises(TypeError, match=r"offsets are missing.*where each expert's rows end"):
        gm.plan("grouped_matmul", np.ones((3, 2)), np.ones((3, 2, 2)))


# Shapes of both operands, by what NumPy makes of them and we do.
FITTING: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "matvec": [((0, 3), (3,)), ((3, 0), (0,)), ((2, 1, 4, 3), (5, 3)), ((0, 2, 3), (3,))],
    "vecmat": [((3,), (3, 0)), ((0,), (0, 3)), ((5, 3), (2, 1, 3, 4)), ((0, 3), (3, 2))],
    "matmul": [
        ((3,), (3,)),
        ((3,), (3, 2)),
        ((2, 3), (3,)),
        ((4, 1, 2, 3), (5, 3, 0)),
        ((0,), (0,)),
    ],
}
UNFIT: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "matvec": [((2, 3), (2,)), ((3,), (3,)), ((2, 3), ()), ((), (3,)), ((2, 2, 3), (5, 3))],
    "vecmat": [((3,), (2, 3)), ((3,), (3,)), ((), (3, 2)), ((3,), ()), ((5, 2), (2, 2, 3))],
    "matmul": [((2, 3), (2, 3)), ((), (3, 2)), ((3,), ()), ((2, 2, 3), (5, 3, 2)), ((2,), (3,))],
}


@pytest.mark.parametrize("op", SHAPES)
def test_shapes_that_numpy_takes_are_taken(op: str) -> None:
    for shapes in FITTING[op]:
        left, right = (np.ones(shape) for shape in shapes)
        truth = getattr(np, op)(left, right)
        result = getattr(gm, op)(left, right)
        assert np.shape(result) == truth.shape, shapes
        np.testing.assert_array_equal(result, truth)


@pytest.mark.parametrize("op", SHAPES)
def test_shapes_that_numpy_refuses_are_refused(op: str) -> None:
    for shapes in UNFIT[op]:
        left, right = (np.ones(shape) for shape in shapes)
        with pytest.raises(ValueError, match=r"matmul|mismatch|scalar|dimension|operand"):
            getattr(np, op)(left, right)
        with pytest.raises(ValueError, match=r"shape|dimension|equally long"):
            getattr(gm, op)(left, right)


# Results that NumPy writes to and we do not, by the words of the refusal; A is 2 x 3 of float32.
OUTS = {
    "a wider dtype": (lambda A, x: np.empty(2), "dtype"),
    "more axes, broadcast": (lambda A, x: np.empty((4, 2), "f4"), "shape"),
    "an operand's memory": (lambda A, x: x[:2], "overlap"),
    "the matrix's memory": (lambda A, x: A[0, :2], "overlap"),
}


@pytest.mark.parametrize("kind", OUTS)
def test_results_that_are_refused(kind: str) -> None:
    make, words = OUTS[kind]
    A, x = np.ones((2, 3), "f4"), np.ones(3, "f4")
    np.matvec(A, x, out=make(A.copy(), x.copy()))
    with pytest.raises((TypeError, ValueError), match=words):
        gm.matvec(A, x, out=make(A, x))
    assert (A == 1).all()
    assert (x == 1).all()


@pytest.mark.parametrize(
    ("a", "b", "longest"),
    [("int8", "int8", 131_071), ("uint8", "int8", 65_793), ("uint8", "uint8", 33_025)],
)
def test_bytes_of_sums_that_int32_does_not_hold(a: str, b: str, longest: int) -> None:
    row, x = np.ones((1, longest + 1), a), np.ones(longest + 1, b)
    with pytest.raises(ValueError, match="out_dtype='int64'"):
        gm.plan("matvec", row, x)
    assert gm.plan("matvec", row, x, out_dtype="int64").problem.out == "int64"
    assert gm.plan("matvec", row[:, 1:], x[1:]).problem.out == "int32"
    extremes = [max(abs(np.iinfo(t).min), np.iinfo(t).max) for t in (a, b)]
    assert longest * extremes[0] * extremes[1] < 2**31 <= (longest + 1) * extremes[0] * extremes[1]


# Every way to multiply by a named rung: what it is called with beside its options.
FLAT, BYTES = np.ones((6, 8), np.float32), np.ones((6, 8), np.int8)
CODES, STACK = gm.quantize(FLAT), np.ones((3, 8, 4), np.float32)
ENDS, INDICES = np.array([2, 4, 6], np.int32), np.zeros((6, 2), np.int32)
WAYS: dict[str, Any] = {
    "matvec": lambda **given: gm.matvec(FLAT, FLAT[0], **given),
    "vecmat": lambda **given: gm.vecmat(FLAT[:, 0], FLAT, **given),
    "matmul": lambda **given: gm.matmul(FLAT, FLAT.T, **given),
    "invariant": lambda **given: gm.matmul(FLAT, FLAT.T, batch_invariant=True, **given),
    "a plan": lambda **given: gm.plan("matmul", FLAT, FLAT.T, **given),
    "scaled": lambda **given: gm.matmul(BYTES, BYTES.T, scale_a=0.5, **given),
    "finished": lambda **given: gm.matmul(FLAT, FLAT.T, epilogue=gm.Epilogue(alpha=2), **given),
    "codes": lambda **given: gm.matmul(CODES, FLAT.T, **given),
    "of codes": lambda **given: gm.vecmat(FLAT[:, 0], CODES, **given),
    "grouped": lambda **given: gm.grouped_matmul(FLAT, STACK, ENDS, **given),
    "routed": lambda **given: gm.grouped_matmul(FLAT, STACK, indices=INDICES, **given),
    "gated": lambda **given: gm.grouped_matmul(FLAT, STACK, ENDS, epilogue="silu_gate", **given),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_reach_the_rung_that_is_named(way: str) -> None:
    multiply, met = WAYS[way], 0
    with pytest.raises(ValueError, match="name the rung they belong to"):
        multiply(params={"pieces": 1})
    for rung in {rung.name: rung for rung in all_rungs("cpu")}:
        try:
            multiply(rung=rung)
        except (TypeError, ValueError):
            continue  # it takes no such operands
        met += 1
        with pytest.raises(ValueError, match="has no parameter 'nonesuch'"):
            multiply(rung=rung, params={"nonesuch": 1})
    assert met


F4, TWO_ENDS = np.ones((8, 64), "f4"), np.array([2, 8], "i4")
EXPERTS = np.ones((2, 64, 5), "f4")
SIXTEENS = gm.quantize(F4 + np.eye(8, 64, dtype="f4"), bits=4, group_size=16)


def important(value: float) -> Any:
    return np.where(np.arange(64) == 63, value, 1.0)


TOLD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "element": (lambda: SIXTEENS[0], TypeError, "cut by rows"),
    "stepped rows": (lambda: SIXTEENS[::2], TypeError, "cut by rows"),
    "two axes": (lambda: SIXTEENS[1:2, 3], TypeError, "cut by rows"),
    "rows of a transpose": (lambda: SIXTEENS.T[:2], ValueError, "slice first"),
    "less than no": (lambda: gm.quantize(F4, importance=important(-1)), ValueError, "negative"),
    "infinite": (lambda: gm.quantize(F4, importance=important(np.inf)), ValueError, "finite"),
    "NaN": (lambda: gm.quantize(F4, importance=important(np.nan)), ValueError, "finite"),
    "short": (lambda: gm.quantize(F4, importance=np.ones(63)), ValueError, r"must be \(64,\)"),
    "no device": (lambda: gm.matvec(F4, F4[0], device="gpu"), ValueError, "device is 'gpu'"),
    "integers": (
        lambda: gm.grouped_matmul(F4.astype("i4"), EXPERTS.astype("i4"), TWO_ENDS),
        TypeError,
        "one dtype of float64",
    ),
    "another dtype": (
        lambda: gm.grouped_matmul(F4, EXPERTS.astype("f8"), TWO_ENDS),
        TypeError,
        "one dtype of float64",
    ),
    "long offsets": (
        lambda: gm.grouped_matmul(F4, EXPERTS, TWO_ENDS.astype("i8")),
        TypeError,
        "must be int32",
    ),
    "float scalar": (
        lambda: gm.gemv(F4.astype("i1"), np.ones(64, "i1"), np.ones(8, "i4"), alpha=1.5, beta=0),
        TypeError,
        "must be int",
    ),
}


@pytest.mark.parametrize("what", TOLD)
def test_mistakes_are_told(what: str) -> None:
    call, kind, words = TOLD[what]
    with pytest.raises(kind, match=words):
        call()


def test_what_lies_beside_them_is_taken() -> None:
    assert SIXTEENS[2:5].shape == (3, 64)
    assert SIXTEENS[:0].shape == (0, 64)
    assert gm.quantize(F4, importance=important(0)).error is not None
    assert gm.grouped_matmul(F4, EXPERTS, TWO_ENDS).shape == (8, 5)
    assert gm.matvec(F4, F4[0], device="cpu").shape == (8,)
