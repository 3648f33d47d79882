"""Plans that are tuned, real rungs under the tuner, and the operands it makes and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from fake_driver import FakeDriver, driver_of
from gemmule.choose import choose
from gemmule.core import registry
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.rung import Rung
from gemmule.tuning import space, tuner
from made_rungs import (
    DEFAULT,
    FASTER,
    PROBLEM,
    FakeClock,
    FakePlace,
    Plant,
    cpu_machine,
    entries,
    made_rung,
    tuned,
)

# --- plans ----------------------------------------------------------------------------------------


def test_tuning_turned_off_is_a_no_op(setting: Callable[..., None]) -> None:
    plan = gm.plan("matvec", np.ones((3, 4)), np.ones(4))
    setting(GEMMULE_TUNE="0")
    assert plan.tune() is plan
    assert entries() == []


def test_an_empty_product_has_nothing_to_tune() -> None:
    for shape in ((0, 4), (3, 0)):
        plan = gm.plan("matvec", np.ones(shape), np.ones(shape[1]))
        assert plan.tune() is plan
        with pytest.raises(ValueError, match="is empty"):
            tuner.tune_problem(plan.problem)
    with pytest.raises(ValueError, match="must be positive"):
        tuner.tune_problem(PROBLEM, tuner.Request(max_seconds=0))


def _with_clock(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    monkeypatch.setattr(tuner, "place_of", lambda device, cache_bytes: FakePlace(clock))


def test_a_tuned_plan_computes_the_same(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, only_proved: Callable[..., None]
) -> None:
    plant(made_rung("usual"), made_rung("other"))
    _with_clock(monkeypatch, FakeClock({"matvec/other(block=4)": 5e-5}))
    A = np.arange(70 * 96, dtype=np.float32).reshape(70, 96) % 7
    x = np.arange(96, dtype=np.float32) % 5
    plan = gm.plan("matvec", A, x)
    better = plan.tune(max_seconds=5)
    assert plan.rung.name == "usual"  # a plan is frozen
    assert (better.rung.name, better.params) == ("other", {"block": 4})
    assert better.choice.expected_s == pytest.approx(5e-5)
    assert f"runner-up  {DEFAULT}" in better.explain()
    np.testing.assert_array_equal(better(A, x), A @ x)
    out = np.empty(70, np.float32)
    assert better(A[:, ::-1][:, ::-1], x, out=out) is out
    np.testing.assert_array_equal(out, A @ x)
    assert better.tune(max_seconds=5) is better  # and beats whatever else there is
    assert gm.plan("matvec", A, x).rung.name == "other"
    only_proved("cpu", {"usual"})
    assert gm.plan("matvec", A, x).rung.name == "usual", "tuned, and proved no more"


def test_a_named_rung_tunes_its_parameters_and_stores_nothing(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(made_rung("usual"), made_rung("other"))
    _with_clock(monkeypatch, FakeClock({"matvec/other(block=2)": 5e-5, FASTER: 1e-6}))
    A, x = np.ones((70, 96), np.float32), np.ones(96, np.float32)
    better = gm.plan("matvec", A, x, rung="other").tune(max_seconds=5)
    assert (better.rung.name, better.params) == ("other", {"block": 2})
    assert entries() == []
    assert gm.plan("matvec", A, x).rung.name == "usual"
    worst = gm.plan("matvec", A, x, rung="other", params={"block": 4})
    assert worst.tune(max_seconds=5).params == {"block": 2}  # not only where the heuristic loses


def test_a_batch_invariant_plan_is_tuned_as_if_alone(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(made_rung("usual"))
    _with_clock(monkeypatch, FakeClock({FASTER: 5e-5}))
    A, x = np.ones((3, 70, 96), np.float32), np.ones((3, 96), np.float32)
    plan = gm.plan("matvec", A, x, batch_invariant=True)
    assert plan.tune(max_seconds=5).params == {"block": 4}
    one = gm.plan("matvec", A[0], x[0], batch_invariant=True)
    assert (one.params, plan.problem.batch) == ({"block": 4}, 3)
    assert gm.plan("matvec", A, x, batch_invariant=True).params == {"block": 4}


INT4 = QuantSpec(4, 32, True, "row", "float32", False)
REAL = {
    "row": Problem("matvec", 130, 260, alignment=4),
    "col": Problem("matvec", 130, 260, layout_a="col", alignment=4),
    "strided": Problem("matvec", 30, 26, layout_a="strided", alignment=4),
    "float16": Problem("matvec", 130, 260, a="float16", b="float16", out="float16", alignment=2),
    "bfloat16": Problem("matvec", 65, 33, a="bfloat16", b="float32", out="float32", alignment=2),
    "int8": Problem("matvec", 65, 130, a="int8", b="int8", out="int32", alignment=1),
    "int64": Problem("matvec", 9, 13, a="int64", b="int64", out="int64", alignment=8),
    "complex": Problem("matvec", 9, 13, a="complex64", b="complex64", out="complex64", alignment=8),
    "batch": Problem("matvec", 9, 13, batch=5, alignment=4),
    "shared": Problem("matvec", 9, 13, batch=5, shared_a=True, alignment=4),
    "matmul": Problem("matmul", 33, 17, 65, a="float16", b="float16", out="float16", alignment=2),
    "many": Problem("matmul", 9, 5, 7, batch=3, shared_b=True, layout_b="col", alignment=4),
    "int4": Problem("matvec", 64, 96, a="uint4", b="float32", out="float32", alignment=4,
                    quant=INT4),
    "int4 transposed": Problem("matvec", 64, 96, a="uint4", b="float32", out="float32", alignment=4,
                               quant=replace(INT4, transposed=True)),
    "int4 matmul": Problem("matmul", 64, 5, 96, a="uint4", b="float32", out="float32", alignment=4,
                           quant=replace(INT4, has_perm=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_rungs_on_every_kind_of_problem(name: str, limit: Callable[..., None]) -> None:
    """All that a run needs of operands, views and truths, for the default and two others."""
    limit(space, MOST_CANDIDATES=2)
    report = tuned(FakeClock({}), REAL[name], max_seconds=0.01)
    assert report.winner is not None, report.outcomes
    assert not report.failures, report.failures


def test_real_rungs_on_the_real_clock() -> None:
    A, x = np.ones((300, 200), np.float32), np.ones(200, np.float32)
    plan = gm.plan("matvec", A, x).tune(max_seconds=1.0)
    np.testing.assert_array_equal(plan(A, x), A @ x)


# --- the device's memory, on a stand-in for the driver --------------------------------------------


@pytest.fixture
def _fake_device() -> Iterator[None]:
    with driver_of(FakeDriver()):
        yield


@pytest.mark.usefixtures("_fake_device")
def test_device_memory_is_filled_and_fetched_as_the_host_laid_it_out() -> None:
    import ctypes

    from gemmule.oracle.inputs import make_inputs
    from gemmule.tuning.operands import DeviceMemory, of_inputs, put_all

    place = DeviceMemory(0)
    for problem, view in (
        (PROBLEM, "sliced"),
        (REAL["col"], "padded"),
        (REAL["batch"], "reversed"),
    ):
        inputs = make_inputs(problem, "integers", 3, view)
        host = of_inputs(inputs)
        operands = put_all(place, host, copy=True)
        for operand, frame in zip(operands, (host.a, host.b, host.out), strict=True):
            address = frame.array.__array_interface__["data"][0]
            assert (operand.pointer - address) % 256 == 0
            there = (ctypes.c_char * frame.array.itemsize).from_address(operand.pointer).raw
            assert there == frame.array.flat[0].tobytes()
            assert operand.form.strides == tuple(s // 4 for s in frame.array.strides)
        before = host.b.buffer.copy()
        host.b.buffer[:] = 0
        place.fetch(operands[1], host.b)
        assert (host.b.buffer == before).all()
        ctypes.memset(operands[2].pointer, 0, 4)
        place.fetch(operands[2], host.out)
        assert (host.out.array == 0).sum() == 1
        inputs.poison()
        place.send(host.out, operands[2])
        place.fetch(operands[2], host.out)
        assert np.isnan(host.out.array).all()


# --- samples of large results ---------------------------------------------------------------------


def test_a_sample_meets_every_tile(limit: Callable[..., None]) -> None:
    from gemmule.tuning import trials
    from gemmule.tuning.operands import canonical_call, random_operands

    k, tile = 8, 32
    problem = Problem("matmul", 1024, 768, k, batch=3, alignment=4)
    limit(trials, SAMPLED_ELEMENTS=k * 32)
    host = random_operands(problem, 1)
    sample = trials.sampled(problem, host, 1)
    assert len(sample.parts[0].rows) == 32
    rung = next(r for r in registry.all_rungs("cpu") if (r.folder, r.name) == ("matmul", "blas"))
    choice = plan_choice(canonical_call(problem, host), rung)
    right = host.a.array @ host.b.array  # type: ignore[union-attr]
    assert sample.complaint(choice, right) == ""
    for row in range(0, 1024, tile):
        wrong = right.copy()
        wrong[row // tile % 2 * 2, row : row + tile, 64 : 64 + tile] = np.nan  # first or last
        assert "at the full size" in sample.complaint(choice, wrong), row


@pytest.mark.parametrize("size", [33, 100, 1001])
def test_a_sample_has_the_first_row_and_the_last(size: int) -> None:
    from gemmule.tuning.trials import spread

    for seed in range(8):
        rows = spread(size, 32, np.random.default_rng(seed)).tolist()
        assert (len(rows), rows[0], rows[-1]) == (32, 0, size - 1)
        assert rows == sorted(set(rows)), "in order, each once"


def plan_choice(call: Any, rung: Rung) -> Any:
    return choose(call, cpu_machine(), rung.name)


@pytest.mark.parametrize(
    "problem",
    [
        Problem("matvec", 10**6, 4099),
        Problem("matvec", 5, 10**7),
        Problem("matvec", 3, 4),
        Problem("matmul", 5000, 4097, 10**5, batch=9),
        Problem("matvec", 0, 10**6),
    ],
)
def test_the_smaller_problem_keeps_remainders(problem: Problem) -> None:
    from gemmule.tuning.trials import smaller

    small = smaller(problem)
    for name in ("m", "n", "k"):
        size, kept = getattr(problem, name), getattr(small, name)
        assert kept <= size
        assert kept == size or (kept % 128 == size % 128 and kept >= 128)
    assert small.m * small.reduction <= 2**25
    assert small.batch <= 3
    assert smaller(small) == small or small.op == "matvec"
