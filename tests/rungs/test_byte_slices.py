"""Wide integers as slices of bytes, under the emulator: exact modulo 2^64."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from cuemu.toolchain import missing_tools
from emulated_driver import emulated
from gemmule.backends.cuda import byte_slices
from gemmule.core.registry import device_rungs
from gemmule.oracle.problems import make_problem
from proofs import device as verify_device
from proofs import proofs
from proofs.device_runner import DeviceRunner

pytestmark = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
RUNG = next(rung for rung in device_rungs() if rung.name == "byte_slices")


@pytest.fixture
def device(only_proved: Any) -> Iterator[None]:
    with emulated(seed=1):
        only_proved("cuda", {RUNG.name})
        yield
        gc.collect()


@pytest.mark.parametrize("signature", RUNG.signatures[1::2], ids=",".join)
def test_right_under_the_emulator(signature: tuple[str, str, str]) -> None:
    with emulated(seed=3):
        runner = DeviceRunner(0, arena_bytes=1 << 28)
        count = 0
        for trial in list(verify_device.trials(RUNG, signature, few=True))[::2]:
            verdict = verify_device.judge_trial(RUNG, trial, runner.run)
            assert verdict.ok, f"{trial}: {verdict.text}"
            count += 1
        assert count > 5
        runner.close()
        gc.collect()


@pytest.mark.parametrize("dtype", [one[0] for one in RUNG.signatures])
def test_the_largest_and_least_numbers(device: None, dtype: str) -> None:
    """Digits carry into the next ones, and beyond the last."""
    info = np.iinfo(dtype)
    edges = [info.min, info.max, info.max - 127, info.max // 2, 0, 1, 127, 128, 255, 256]
    every = np.array([*edges, *(n for n in (-1, -128, -129) if n >= info.min)], dtype)
    A, B = np.resize(every, (len(every), 35)), np.resize(every[::-1], (35, 9))
    with np.errstate(over="ignore"):
        wanted = A.astype(RUNG_OUT[dtype]) @ B.astype(RUNG_OUT[dtype])
    for alpha, beta in ((1, 0), (3, -2 if dtype[0] == "i" else 2), (2**61 + 3, 2**60 + 1)):
        C = np.arange(A.shape[0] * 9, dtype=RUNG_OUT[dtype]).reshape(-1, 9)
        given = gm.asarray(C, device="cuda")
        gm.gemm(*(gm.asarray(one, device="cuda") for one in (A, B)), given, alpha=alpha, beta=beta)
        scaled = [np.uint64(scalar % 2**64) for scalar in (alpha, beta)]
        with np.errstate(over="ignore"):
            truth = scaled[0] * wanted.astype("u8") + scaled[1] * C.astype("u8")
        assert np.array_equal(given.to_host().astype("u8"), truth)


RUNG_OUT = {one[0]: one[2] for one in RUNG.signatures}


def test_what_sums_of_digits_hold() -> None:
    problem = make_problem("matmul", 8, 8, 26_214, ("int32", "int32", "int64"))
    assert RUNG.refusal(problem) is None
    assert "sums of at most" in str(RUNG.refusal(replace(problem, k=26_215)))
    assert RUNG.refusal(replace(problem, batch=2)) is not None
    assert RUNG.runs_on("sm_90a")
    assert not RUNG.runs_on("sm_100a")


def test_lines_that_count_the_same_are_neighbours() -> None:
    for signature in RUNG.signatures:
        problem = make_problem("matmul", 8, 8, 64, signature)
        of_a, of_b = byte_slices.digits(problem.a), byte_slices.digits(problem.b)
        met = set()
        for number, power in enumerate(byte_slices.powers(problem)):
            for i in range(power.lines):
                a, b = power.of_a + i, of_b - 1 - (power.of_b + i)
                assert a + b == number
                met.add((a, b))
        assert met == {(a, b) for a in range(of_a) for b in range(of_b) if a + b < 8}


def test_what_slices_ask_for_tells_products_apart() -> None:
    problem = make_problem("matmul", 64, 64, 64, ("int32", "int32", "int64"))
    others = (replace(problem, layout_b="col"), replace(problem, k=65), replace(problem, a="int64"))
    seen = {RUNG.spec(one, proofs.packed_call(one)) for one in (problem, *others)}
    assert len(seen) == 4
