"""Operands and options that few pass: each is taken as it is, or refused in words of ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.arrays.interop import unwrap

A, X = np.arange(12.0).reshape(3, 4), np.arange(4.0)


def foreign(size: int) -> Any:
    """Return a vector of foreign byte order."""
    return np.zeros(size, np.dtype(float).newbyteorder())


def at_odd_places(size: int) -> Any:
    """Return a vector whose elements are misaligned."""
    return np.zeros(size, [("a", "i1"), ("b", "f8")])["b"]


@pytest.mark.parametrize("make", [foreign, at_odd_places])
def test_an_operand_that_is_copied_to_be_read_is_not_overwritten(make: Any) -> None:
    x = make(4)
    out = x.view(np.dtype(float)) if make is foreign else np.ndarray(4, float, x.base.data, 0, [9])
    out = out[:3] if out.flags.aligned else np.ndarray(3, float, np.asarray(x.base).data, 0)
    with pytest.raises(ValueError, match="overlaps an input"):
        gm.matvec(A, x, out=out)
    assert not np.any(x)


def test_steps_that_nobody_takes_are_no_reason_to_copy_or_to_refuse() -> None:
    row = np.ndarray((1, 4), float, X.data, 0, [13, 8])
    assert np.shares_memory(unwrap(row, "A").array, row)
    room = np.zeros(8)
    out = np.ndarray((1, 3), float, room.data, 0, [5, 16])
    assert gm.matmul(X[None], A.T, out=out) is out
    assert room[:6:2].tolist() == (A @ X).tolist()
    scalar = np.ndarray((1,), float, room.data, 0, [3])
    assert gm.matvec(row, X, out=scalar).tolist() == [14.0]


def test_a_plan_takes_any_out_of_the_result_s_shape_and_dtype() -> None:
    batch = np.arange(24.0).reshape(2, 3, 4)[:, :, None] + np.zeros((2, 3, 5, 4))
    plan, true = gm.plan("matvec", batch, X), batch @ X
    out = np.zeros((3, 4, 5))[:2, :3]
    assert plan(batch, X, out=out) is out
    assert np.array_equal(out, true)
    with pytest.raises(TypeError, match="out has dtype float32; the result has dtype float64"):
        plan(batch, X, out=out.astype("f4"))
    with pytest.raises(ValueError, match=r"out has shape \(2, 3\)"):
        plan(batch, X, out=out[..., 0])


@pytest.mark.parametrize("op", ["matvec", "matmul"])
@pytest.mark.parametrize("size", [4, 96])
def test_a_plan_says_nothing_of_nan(op: str, size: int) -> None:
    matrix = np.full((size, size), np.inf)
    other = -matrix if op == "matmul" else np.where(np.arange(size) % 2, 1.0, -1.0)
    with np.errstate(all="raise"):
        result = gm.plan(op, matrix, other)(matrix, other)  # type: ignore[call-overload]
    assert np.all(np.isnan(result) if op == "matvec" else result == -np.inf)


class Interface:
    """An object that claims memory on a GPU in these words."""

    def __init__(self, face: Any) -> None:
        self.__cuda_array_interface__ = face


class Capsule:
    """An object that says of DLPack what it was told to."""

    def __init__(self, device: Any, capsule: Any = None) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        return self.device

    def __dlpack__(self, **given: Any) -> Any:
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule


FACE = {"shape": (4,), "typestr": "<f8", "data": (0, False), "version": 3}
LIARS = [
    (Interface({}), TypeError, "gives no array"),
    (Interface(None), TypeError, "gives no array"),
    (Interface(FACE | {"shape": ("a",)}), TypeError, "gives no array"),
    (Interface(FACE | {"typestr": "zz"}), TypeError, "gives no array"),
    (Interface(FACE | {"shape": (-1,)}), ValueError, "sizes are 0 or more"),
    (Interface(FACE | {"strides": (8, 8)}), ValueError, "one stride for each"),
    (Interface(FACE | {"mask": np.ones(4)}), TypeError, "with mask"),
    (Interface(FACE), ValueError, "address 0"),
    (Capsule((1, 0)), TypeError, "gives no array"),
    (Capsule((1, 0), BufferError("held")), TypeError, "held"),
    (Capsule((1, 0), ZeroDivisionError("by you")), TypeError, "by you"),
    (Capsule(()), TypeError, "gives no array"),
    (Capsule(None), TypeError, "gives no array"),
    (np.ndarray, TypeError, "x is a type"),
]


@pytest.mark.parametrize(("liar", "error", "words"), LIARS)
def test_what_claims_to_be_an_array_is_refused_by_its_name(
    liar: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        gm.matvec(A, liar)
    assert str(raised.value).startswith("x ")


KINDS = [
    ({"rung": 3}, "rung is 3"),
    ({"rung": ["blas"]}, r"rung is \['blas'\]"),
    ({"precision": []}, r"precision is \[\]"),
    ({"precision": None}, "precision is None"),
    ({"activations": {}}, "activations is {}"),
    ({"accumulate": 16}, "accumulate is 16"),
    ({"batch_invariant": "no"}, "batch_invariant is 'no'"),
    ({"out_dtype": 3}, "out_dtype is 3"),
    ({"device": 0}, "device is 0"),
]


@pytest.mark.parametrize(("options", "words"), KINDS)
def test_an_option_of_the_wrong_kind_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        gm.matvec(A, X, **options)


def test_names_and_scalars_of_the_wrong_kind_are_named() -> None:
    with pytest.raises(ValueError, match=r"op is \[\]"):
        gm.plan([], A, X)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="beta is array"):
        gm.gemv(A, X, beta=np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device is 1"):
        gm.quantize(A).to(1)  # type: ignore[arg-type]


class Stubborn(np.ndarray):  # type: ignore[type-arg]
    """An array that answers no function of NumPy's."""

    def __array_function__(self, *given: Any) -> Any:
        raise ZeroDivisionError

    def __array_ufunc__(self, *given: Any, **options: Any) -> Any:
        raise ZeroDivisionError


def test_what_a_subclass_makes_of_numpy_is_not_asked() -> None:
    out = np.zeros(3).view(Stubborn)
    assert gm.matvec(A.view(Stubborn), X.view(Stubborn), out=out) is out
    assert out.tolist() == (A @ X).tolist()
    Q, plain = gm.quantize(A.view(Stubborn)), gm.quantize(A)
    assert np.array_equal(Q.codes, plain.codes)
