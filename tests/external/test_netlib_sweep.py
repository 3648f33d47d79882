"""A sample of the sweep of sizes, steps and scalars that netlib's BLAS testers make."""

from __future__ import annotations

from typing import Any

import pytest

import gemmule as gm
from external_campaign import cases, sweep

EVERY = 97  # a prime, so that every value of each parameter is met


def test_gemv_and_gemm_stay_below_the_testers_threshold() -> None:
    ran, wrong = sweep(EVERY)
    assert ran == -(-sum(1 for _ in cases()) // EVERY)
    assert not wrong


@pytest.mark.parametrize("forgotten", ["alpha", "beta"])
def test_the_sweep_finds_a_scalar_that_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    plain = gm.gemm

    def planted(*operands: Any, **scalars: Any) -> Any:
        scalars[forgotten] = 1.0
        return plain(*operands, **scalars)

    monkeypatch.setattr(gm, "gemm", planted)
    _, wrong = sweep(EVERY)
    assert wrong
    assert {case.op for case in wrong} == {"gemm"}
    assert all(getattr(case, forgotten) != 1.0 for case in wrong)
