"""A sample of the sweep of sizes, steps and scalars that netlib's BLAS testers make."""

from __future__ import annotations

from collections.abc import Callable
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
    fault: Callable[..., Any], forgotten: str
) -> None:
    def forgetful(sound: Any, *operands: Any, **scalars: Any) -> Any:
        scalars[forgotten] = 1.0
        return sound(*operands, **scalars)

    fault(gm, "gemm", forgetful)
    _, wrong = sweep(EVERY)
    assert wrong
    assert {case.op for case in wrong} == {"gemm"}
    assert all(getattr(case, forgotten) != 1.0 for case in wrong)
