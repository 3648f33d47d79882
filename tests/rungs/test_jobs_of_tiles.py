"""Products of tiles by addresses, as layers on the host call them, against the oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmule as gm
from gemmule.backends.cpu import amx
from gemmule.backends.cpu.steps import by_address
from gemmule.core.rung import CpuRung
from gemmule_lab.verify import check
from quantized_products import activations, make_matrix

MISSING = amx.missing_tiles("bf16")
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def multiplied(Q: gm.QuantizedMatrix, x: np.ndarray, rung: str, into: str = "col") -> Any:
    """Return the plan and ``Q x^T`` by the rung's job, or None where it refuses x."""
    plan = gm.plan("matmul", Q, x.T, rung=rung)
    assert isinstance(plan.rung, CpuRung)
    assert plan.rung.job is not None
    problem = replace(plan.problem, layout_out=into)
    job = plan.rung.job(problem, plan.params, Q, x.T)
    assert job is not None
    room = np.full((Q.shape[0] + 2) * len(x), 77, x.dtype)  # what lies beside y stays
    y = room[len(x) : -len(x)]
    y = y.reshape(len(x), -1).T if into == "col" else y.reshape(-1, len(x))
    if not by_address(job)(x.ctypes.data, y.ctypes.data):
        return plan, None
    assert (room[: len(x)] == 77).all()
    assert (room[-len(x) :] == 77).all()
    return plan, y


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["none", "integer", "fraction"])
def test_few_columns_of_every_count(bits: int, zeros: str) -> None:
    """Rows that fill no block, terms that fill no chunk, and every count of columns."""
    for (m, k), group in itertools.product(((37, 333), (200, 512)), (128, -1, None)):
        Q = make_matrix(m, k, bits, group, "float32", zeros)
        for columns, into in ((2, "col"), (7, "row"), (15, "col"), (16, "col"), (16, "row")):
            x = np.ascontiguousarray(activations((k, columns), "bfloat16").T)
            plan, y = multiplied(Q, x, "tile_registers", into)
            verdict = check.judge("matmul", Q, x.T, y, check.Rounding.of(plan))
            assert verdict.ok, (m, k, group, columns, into, verdict.text)


@pytest.mark.parametrize("bits", [4, 8])
def test_exact_numbers_come_out_exact(bits: int) -> None:
    """Small whole numbers: whatever lies in another place, or is rounded once more, is wrong."""
    rng = np.random.default_rng(bits)
    Q = make_matrix(150, 700, bits, 128, "float16", "integer", exact=True)
    truth = Q.dequantize("float64")
    for rung, columns in (("tile_registers", 3), ("tile_registers", 16), ("rounded_tiles", 19)):
        x = rng.integers(-1, 2, (columns, 700)).astype(ml_dtypes.bfloat16)
        x[1] = 0  # a column whose products are nothing at all, whatever the others are scaled by
        _, y = multiplied(Q, x, rung)
        wanted = (truth @ x.T.astype(np.float64)).astype(np.float32).astype(ml_dtypes.bfloat16)
        assert np.array_equal(y, wanted), (rung, columns)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [np.inf, np.nan, 2.0**70, 2.0**-130])
def test_an_x_that_tiles_would_lose_something_of_is_refused(bits: int, size: float) -> None:
    Q = make_matrix(40, 300, bits, 128, "float32", "integer")
    x = np.ones((5, 300), ml_dtypes.bfloat16)
    assert multiplied(Q, x, "tile_registers")[1] is not None
    x[4, 299] = size
    assert multiplied(Q, x, "tile_registers")[1] is None


@pytest.mark.parametrize("bits", [4, 8])
def test_large_and_small_numbers_beside_each_other(bits: int) -> None:
    """The ends of what the power of two serves, at which nothing is subnormal or infinite."""
    Q = make_matrix(40, 256, bits, 128, "float32", "integer")
    x = activations((256, 6), "float32").T
    x[:, ::3] *= 2.0**20
    x[:, 1::3] *= 2.0**-60
    x = np.ascontiguousarray(x.astype(ml_dtypes.bfloat16))
    plan, y = multiplied(Q, x, "tile_registers")
    verdict = check.judge("matmul", Q, x.T, y, check.Rounding.of(plan))
    assert verdict.ok, verdict.text
