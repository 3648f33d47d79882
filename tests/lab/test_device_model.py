"""``gemmule tune --device-model``: what is measured, printed, kept, and told of later products."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gemmule as gm
from gemmule import backends
from gemmule.core.host_rates import HostRates
from gemmule.core.problem import Problem
from gemmule.errors import DeviceError
from gemmule.storage import rates
from gemmule.tuning import fit, models, sample
from gemmule_lab.bench import hunt
from gemmule_lab.cli import run
from gemmule_lab.harness.products import Product
from gemmule_lab.tune import device_model


@pytest.fixture(autouse=True)
def _little(own_cache: Path, limit: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products, quickly; rates of this machine are not measured, but the cautious ones."""
    limit(sample, SECONDS={"cpu": 0.01}, MOST_BYTES={"cpu": 1 << 16})
    monkeypatch.setattr(sample, "disturbed", lambda samples: 0.0)
    monkeypatch.setattr(models, "measure_rates", lambda fresh: HostRates.default(2))


def test_a_sample_is_measured_fitted_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    told = device_model.make("cpu", products=2, seed=1)
    assert 1 <= told["products"] <= 2
    assert told["rows"] >= told["products"]
    machine = backends.get("cpu").machine("cpu")
    kept = json.loads(told["file"].read_text())
    assert kept["machine"] == machine.name
    assert sample.path_of(machine).is_file()
    words = capsys.readouterr().out
    assert f"products measured: {told['products']}, ways: {told['rows']}" in words
    assert "too few to fit to or to judge by; --products N measures more" in words
    assert re.search(r"^read +[\d.]+ GB/s$", words, re.MULTILINE)
    again = device_model.make("cpu", products=0)
    assert again["rows"] == told["rows"]


def test_one_rung_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    device_model.make("cpu", products=6, seed=1, only="matvec/four_rows")
    rows = sample.Sampler("cpu", seed=1).rows
    assert {way.rung for way, _ in rows} <= {"four_rows"}
    with pytest.raises(ValueError, match="no cpu rung is called 'four_row'"):
        device_model.make("cpu", products=1, only="four_row")
    with pytest.raises(ValueError, match="several cpu rungs are called 'blas'"):
        device_model.make("cpu", products=1, only="blas")


def test_who_stops_it_is_told_that_it_goes_on(
    fault: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(sound: object, *args: object, **options: object) -> None:
        raise KeyboardInterrupt

    fault(models, "make", stopped)
    assert run(["tune", "--device-model"]) == 130
    told = capsys.readouterr()
    assert "what was measured so far is kept; the same command goes on" in told.out
    assert "stopped" in told.err


def test_a_lost_device_ends_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(sampler: sample.Sampler, *args: object) -> None:
        sampler.lost = "matvec/a lost the device"

    monkeypatch.setattr(sample.Sampler, "measure", lose)
    with pytest.raises(DeviceError, match="the sample ended early, and is kept"):
        device_model.make("cpu", products=1)


def test_explain_says_within_what_a_rung_was_found_to_be() -> None:
    machine = backends.get("cpu").machine("cpu")
    A, x = np.ones((300, 200), np.float16), np.ones(200, np.float16)
    plan = gm.plan("matvec", A, x)
    name = f"{plan.choice.rung.folder}/{plan.choice.rung.name}"
    assert "within" not in plan.explain()
    rates.save(machine.name, machine.arch, machine.units, machine.rates, {name: 0.09})
    assert ", within 9%" in plan.explain()
    rates.save(machine.name, machine.arch, machine.units, machine.rates, {"matvec/other": 0.09})
    assert "within" not in plan.explain()


def test_rates_are_fitted_to_products_and_stay_where_that_is_no_gain() -> None:
    machine = fit.with_rates(backends.get("cpu").machine("cpu"), HostRates.default(2))
    true = fit.with_rates(machine, HostRates(read=9e9, core_read=4e9, call=9e-6, convert=2e9))
    drawn, rows = sample.draw("cpu", 11), []
    while len(rows) < 120:
        problem = next(drawn)
        for rung in sample.all_rungs("cpu"):
            if rung.refusal(problem) is None and (made := rung.suggest(problem, machine)):
                seconds = rung.suggest(problem, true)
                params = rung.check_params(problem, made.params)
                assert seconds is not None
                rows.append(fit.Timed(problem, rung, params, seconds.expected_s))
    found = fit.judged_rates(machine, rows)
    assert found.after.mean <= found.before.mean
    if found.model != machine.rates:
        own = fit.errors(rows, lambda row: fit.suggested(machine, machine.rates, row))
        mine = fit.errors(rows, lambda row: fit.suggested(machine, found.model, row))
        assert sum(mine.values()) < sum(own.values())
    assert fit.judged_rates(machine, rows[:3]).model == machine.rates


def test_the_worst_products_of_a_hunt_are_those_to_fit_to() -> None:
    product = Product("matvec", "float32", (8, 8))
    problems = [Problem("matvec", m, 8) for m in range(1, 41)]
    finds = [
        hunt.Find(product, "a", 1.0 + i, 1.0 + i, 1.0, "a", 1.0, problem=problem)
        for i, problem in enumerate(problems)
    ]
    worst = hunt.Hunt("numpy", [*finds, hunt.Find(product, "a", 1.0, 0.1, None, "a", 1.0)]).worst()
    assert problems[0] in worst  # the slowest against the peer
    assert problems[-1] in worst  # the farthest from the floor
    assert problems[20] not in worst
    assert len(worst) == len(set(worst))
