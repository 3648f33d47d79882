"""Products of NaN, infinity and huge numbers are answers, not events: NumPy stays silent."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmule as gm
from gemmule.core.problem import ITEMSIZE, QuantSpec
from gemmule.core.registry import ladder
from gemmule.core.rung import Rung
from gemmule.oracle.weights import extreme_groups

# The rungs that multiply in NumPy; compiled kernels raise no flags that anybody reads.
RUNGS = {
    f"{op}/{rung.name}": (op, rung)
    for op in ("matvec", "vecmat", "matmul")
    for rung in ladder(op)
    if rung.name.startswith(("blas", "upcast"))
}
FLOATS = ("float64", "float32", "float16", "bfloat16", "complex64")


def hostile(shape: tuple[int, ...], dtype: str) -> Any:
    """Numbers whose products overflow, underflow, and are Inf - Inf and Inf * 0."""
    wide = np.resize(np.array([np.inf, -np.inf, np.nan, 6e4, -6e4, 1e-7, 0.0, 1.0]), shape)
    if dtype == "float32":
        wide = np.where(np.abs(wide) == 6e4, wide * 1e33, wide)
    return wide.astype(getattr(ml_dtypes, dtype, dtype))


def takes(rung: Rung, dtype: str) -> bool:
    return any(s[:2] == (dtype, dtype) for s in rung.signatures)


@pytest.mark.parametrize("name", RUNGS)
def test_no_rung_warns_or_raises_of_the_callers_numbers(name: str) -> None:
    op, rung = RUNGS[name]
    function = getattr(gm, op)
    for dtype in FLOATS:
        if not takes(rung, dtype):
            continue
        A = hostile((19, 19), dtype)
        shapes = [(A, hostile((19,), dtype)), (hostile((3, 19, 19), dtype), hostile((19,), dtype))]
        if op == "vecmat":
            shapes = [(x, M) for M, x in shapes]
        if op == "matmul":
            shapes = [(A, A), (hostile((3, 5, 5), dtype), hostile((3, 5, 5), dtype))]
        for left, right in shapes:
            with warnings.catch_warnings(), np.errstate(all="raise"):
                warnings.simplefilter("error")
                try:
                    result = function(left, right, rung=rung.name)
                except ValueError as refused:
                    assert "cannot compute" in str(refused)  # noqa: PT017
                    continue
            assert np.isnan(result.astype(np.complex64)).any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_blas_forms_and_conversions_stay_silent(dtype: str) -> None:
    A, x = hostile((19, 19), dtype), hostile((19,), dtype)
    Q = gm.quantize(np.ones((19, 19), np.float32), bits=8, group_size=-1)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        gm.matvec(A, x, out_dtype="complex128" if dtype == "complex64" else "float64")
        gm.gemv(A, x, x.copy(), alpha=3.0, beta=-2.0)
        gm.gemm(A, A, A.copy(), alpha=3.0, beta=-2.0)
        gm.matmul(A[:, ::2], A[::2])
        if dtype != "complex64":
            gm.matvec(Q, x)
            gm.matmul(Q, A)


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
def test_results_of_any_dtype_and_order_stay_silent(op: str) -> None:
    narrowed = 0
    for dtype, out_dtype in itertools.product(FLOATS, (*FLOATS, "complex128")):
        A = hostile((19, 19), dtype)
        A[:9] = 6e4  # whose sums no half holds
        x = A if op == "matmul" else A[0]
        pair = (x, A) if op == "vecmat" else (A, x)
        kind = getattr(ml_dtypes, out_dtype, out_dtype)
        room = np.empty((19, 38) if op == "matmul" else (38,), kind)
        with warnings.catch_warnings(), np.errstate(all="raise"):
            warnings.simplefilter("error")
            try:
                fresh = getattr(gm, op)(*pair, out_dtype=out_dtype)
            except TypeError as refused:
                assert "out_dtype" in str(refused)  # noqa: PT017
                continue
            narrowed += ITEMSIZE[out_dtype] < ITEMSIZE[dtype]
            getattr(gm, op)(*pair, out_dtype=out_dtype, out=room[..., ::2])
        found = room[..., ::2].astype(np.complex128)
        np.testing.assert_array_equal(found, fresh.astype(np.complex128))
    assert narrowed > 3


@pytest.mark.parametrize("method", ["rtn", "mse", "hqq", "gptq"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_quantising_stays_silent(method: Any, dtype: str) -> None:
    """Of groups that are huge, tiny, of one sign, or all alike; and products with them."""
    rng = np.random.default_rng(6)
    for group, scales in itertools.product((None, -1, 8), ("float32", "float16", "bfloat16")):
        if method == "gptq" and group is None:
            continue
        spec = QuantSpec(4, group, True, "row", scales, False)
        W = extreme_groups(rng, 24, 48, spec, dtype).astype(getattr(ml_dtypes, dtype, dtype))
        made: dict[str, Any] = {"hessian": np.eye(48)} if method == "gptq" else {}
        with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
            warnings.simplefilter("error")
            for symmetric in (False, True)[: 1 if method == "hqq" else 2]:
                try:
                    Q = gm.quantize(W, 4, group, symmetric, scales, method=method, **made)
                except ValueError as refused:
                    assert "scale" in str(refused)  # noqa: PT017
                    continue
                Q.dequantize("float64")
                Q @ np.ones(48, np.float32)


def test_the_callers_own_settings_come_back() -> None:
    A = hostile((4, 4), "float32")
    with np.errstate(all="raise"):
        gm.matmul(A, A)
        with pytest.raises(FloatingPointError):
            np.float32(1) / np.float32(0)
