"""Quantised matrices, and the CPU's rungs for them run and checked beside float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.backends.cpu import pool as cpu_pool
from gemmule.core.problem import UNIT_ROUNDOFF, Problem, QuantSpec, numpy_dtype
from gemmule.core.registry import all_rungs
from gemmule.core.rung import Rung
from gemmule.quant.matrix import QuantizedMatrix
from gemmule.rungs.quantized.cpu import _across, _operands
from gemmule.rungs.quantized.cpu.vector import panels
from gemmule.rungs.quantized.cpu.vector.integers import ACTIVATION_GROUP

SCALE_DTYPES = ("float32", "float16", "bfloat16")
RUNGS = [r for r in all_rungs("cpu") if r.folder == "quantized"]
NAMES = [r.name for r in RUNGS if r.available() is None]  # by this processor's instructions

KINDS = [  # code width, scale dtype, zero points
    (4, "float32", "integer"),
    (4, "float16", "none"),
    (4, "float32", "fraction"),
    (8, "float32", "integer"),
    (8, "bfloat16", "none"),
    (8, "float32", "fraction"),
]


def normal(m: int, n: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((m, n)).astype(dtype)


def rung_called(name: str) -> Rung:
    return next(r for r in RUNGS if r.name == name)


def make_matrix(
    m: int,
    n: int,
    bits: int,
    group: int | None,
    scale_dtype: str,
    zeros: str,
    seed: int = 0,
    *,
    exact: bool = False,
    perm: bool = False,
) -> QuantizedMatrix:
    """Codes of every value; exact: scales are powers of two, so that small sums are exact."""
    rng = np.random.default_rng((seed, m, n, bits))
    codes = rng.integers(0, 2**bits, (m, n)).astype(np.uint8)
    codes.flat[: min(2, codes.size)] = [0, 2**bits - 1][: min(2, codes.size)]
    if bits == 4:
        padded = np.pad(codes, ((0, 0), (0, n % 2)))
        codes = (padded[:, ::2] | (padded[:, 1::2] << 4)).astype(np.uint8)
    groups = (1, 1) if group is None else (m, 1 if group == -1 else -(-n // group))
    scales = 2.0 ** rng.integers(-2, 3, groups) if exact else rng.uniform(0.01, 2.0, groups)
    points = None
    if zeros != "none":
        points = rng.integers(0, 2**bits, groups).astype(np.float32)
        edges = [0, 2**bits - 1, 2 ** (bits - 1)][: points.size]
        points.flat[: len(edges)] = edges
    if zeros == "fraction" and points is not None:
        points = points + np.float32(0.25)
    order = rng.permutation(n).astype(np.int32) if perm else None
    scales = np.asarray(scales, np.float32).astype(numpy_dtype(scale_dtype))
    return QuantizedMatrix.from_parts(
        codes, scales, points, shape=(m, n), bits=bits, group_size=group, perm=order
    )


def problem_of(
    Q: QuantizedMatrix, columns: int | None, b: str, out: str, activations: str
) -> Problem:
    spec = QuantSpec(
        Q.bits,
        Q.group_size,
        Q.zeros is not None,
        "row",
        Q.scale_dtype,
        Q.transposed,
        Q.perm is not None,
        activations,
    )
    name = "uint8" if Q.bits == 8 else "uint4"
    rows, inner = Q.shape
    if columns is None:
        return Problem("matvec", rows, inner, a=name, b=b, out=out, quant=spec)
    return Problem("matmul", rows, columns, inner, a=name, b=b, out=out, quant=spec)


def run(
    rung: Rung, Q: QuantizedMatrix, x: np.ndarray, out: str = "float32", **params: Any
) -> np.ndarray:
    """Run a rung on a poisoned result between canaries; x and the parts must stay as they are."""
    columns = x.shape[1] if x.ndim == 2 else None
    rounded = rung.arithmetic(problem_of(Q, columns, x.dtype.name, out, "float")).activations_bits
    problem = problem_of(Q, columns, x.dtype.name, out, "int8" if rounded else "float")
    assert rung.refusal(problem) is None
    chosen = rung.check_params(problem, params)
    shape = (Q.shape[0],) if columns is None else (Q.shape[0], columns)
    guarded = np.full(int(np.prod(shape)) + 32, np.nan, numpy_dtype(out))
    y = guarded[16:-16].reshape(shape)
    before = x.copy(), Q.codes.copy(), Q.scales.copy()
    rung.bind(problem, chosen)(Q, x, y)
    assert np.isnan(guarded[:16].astype(float)).all()
    assert np.isnan(guarded[-16:].astype(float)).all()
    for old, new in zip(before, (x, Q.codes, Q.scales), strict=True):
        assert old.tobytes() == new.tobytes()
    return y


def bound_of(rung: Rung, Q: QuantizedMatrix, x: np.ndarray, out: str) -> np.ndarray:
    """The error that the rung's declared arithmetic allows, for each element of the result."""
    problem = problem_of(Q, x.shape[1] if x.ndim == 2 else None, x.dtype.name, out, "float")
    arithmetic = rung.arithmetic(problem)
    steps = arithmetic.chain(problem, rung.defaults()) + 1
    u = arithmetic.accumulator_u
    W, wide = np.abs(Q.dequantize("float64")), np.abs(x.astype(np.float64))
    limit = W @ wide * (steps * u / (1 - steps * u))
    if arithmetic.activations_bits is not None:
        limit = limit + W @ (rounding_of(Q, wide) * 1.001)
    if arithmetic.inputs is not None:  # the difference, its scaling and the weight are rounded
        limit = limit + W @ wide * (3.1 * UNIT_ROUNDOFF[arithmetic.inputs])
    return limit


def rounding_of(Q: QuantizedMatrix, wide: np.ndarray) -> np.ndarray:
    """Half a step of the 8-bit activations, for each element of |x|."""
    stored = wide if Q.perm is None else wide[Q.perm]
    step = np.zeros_like(stored)
    for low in range(0, stored.shape[0], ACTIVATION_GROUP):
        part = slice(low, low + ACTIVATION_GROUP)
        step[part] = stored[part].max(axis=0) / 254
    if Q.perm is None:
        return step
    back = np.empty_like(step)
    back[Q.perm] = step
    return back


def check(rung: Rung, Q: QuantizedMatrix, x: np.ndarray, out: str = "float32") -> None:
    """Compare with float64, element by element, within the declared arithmetic."""
    y = run(rung, Q, x, out).astype(np.float64)
    truth = Q.dequantize("float64") @ x.astype(np.float64)
    limit = bound_of(rung, Q, x, out) + UNIT_ROUNDOFF[out] * np.abs(truth) * 1.01
    worst = np.abs(y - truth) - limit
    assert (worst <= 0).all(), f"{rung.name} {Q!r} {x.shape} {x.dtype}: beyond by {worst.max()}"


def activations(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, *shape))
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def check_across_rows(
    bits: int, group: int, own_cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check products across rows, shared by columns where the cache holds them, else by rows."""
    monkeypatch.setattr(_across, "own_cache_bytes", lambda: own_cache)
    monkeypatch.setattr(cpu_pool, "thread_count", lambda: 5)
    rung = rung_called("vector_panels")
    for m, n in [(203, 1000), (1000, 203), (150, 768), (400, 40)]:
        Q = make_matrix(m, n, bits, group, "float32", "fraction")
        by_columns, *_ = panels.across(_operands.stored(Q)).split()
        assert by_columns == (own_cache > 0 and (n > 300 or n < 50 or bits == 8))
        check(rung, Q.T, activations((m,), "float32"))
        plan, x = gm.plan("vecmat", activations((m,), "float32"), Q), activations((m,), "float32")
        first = plan(x, Q)
        for _ in range(3):
            np.testing.assert_array_equal(plan(x, Q), first)


def dtype_for(rung: Rung) -> str:
    """The dtype of activations that tests give a rung: float32, where it takes them."""
    known = [b for _, b, _ in rung.signatures]
    return "float32" if "float32" in known else known[0]


def takes(rung: Rung, Q: QuantizedMatrix, columns: int | None, b: str, out: str) -> bool:
    return any(
        rung.refusal(problem_of(Q, columns, b, out, kind)) is None for kind in ("float", "int8")
    )
