"""Fitting device models: on devices made up for it, whose true coefficients are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmule.core import device_model
from gemmule.core.device_model import DeviceModel
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.registry import all_rungs
from gemmule.core.rung import Machine
from gemmule.storage import lines, models
from gemmule.storage.tuned import problem_of
from gemmule.tuning import fit, sample
from gemmule.tuning.fit import Timed
from gemmule.tuning.outcomes import LaunchFailed
from gemmule.tuning.session import Session

MACHINE = Machine("cuda", "NVIDIA H200", "sm_90a", 132, 4.5e12, 50 << 20, 227 << 10, 1.8e-6)
SHIPPED = models.of(MACHINE)
RUNGS = [r for r in all_rungs("cuda", ("matvec", "vecmat")) if r.seconds is not None]


def shaken(seed: int) -> DeviceModel:
    """Return the shipped model with its times and rates scaled at random, by up to half."""
    rng = np.random.default_rng(seed)

    def change(name: str, value: float) -> float:
        spread = 0.4 if device_model.is_time(name) else 0.15
        return float(value * math.exp(rng.uniform(-spread, spread)))

    trees = {
        rung: {name: change(name, value) for name, value in own.items()}
        for rung, own in SHIPPED.numbers.items()
    }
    return replace(SHIPPED, numbers=trees)


def rows_on(truth: DeviceModel, products: int, seed: int, noise: float) -> list[Timed]:
    """Return what is measured of products by a vector on such a device."""
    rng, rows = np.random.default_rng(seed), []
    here = replace(MACHINE, model=truth)
    drawn = (p for p in sample.draw("cuda", seed) if p.op == "matvec" and p.quant is None)
    for _ in range(products):
        problem = next(drawn)
        for rung in RUNGS:
            made = None if rung.mismatch(problem) else rung.suggest(problem, MACHINE)
            if made is not None and rung.seconds is not None:
                seconds = rung.seconds(problem, made.params, here)
                blurred = seconds * math.exp(noise * rng.standard_normal())
                rows.append(Timed(problem, rung, made.params, blurred))
    return rows


def by(model: DeviceModel) -> fit.Model:
    return lambda row: fit.modelled(MACHINE, model, row)


@pytest.mark.parametrize("seed", [1, 4])
def test_a_fit_recovers_the_choices_of_a_made_up_device(seed: int) -> None:
    truth = shaken(seed)
    found = fit.judged(MACHINE, rows_on(truth, 160, seed, noise=0.03))
    fresh = rows_on(truth, 250, seed + 50, noise=0.0)
    lost, before = fit.loss(fresh, by(found.model)), fit.loss(fresh, by(SHIPPED))
    assert lost.products > 150
    assert lost.mean <= 0.02
    assert lost.worst <= 0.12
    assert lost.mean < before.mean / 2
    assert found.errors
    assert all(0 <= error < 0.6 for error in found.errors.values())  # of a few not fitted
    assert np.median(list(found.errors.values())) < 0.1
    assert models.fault(found.model) == ""


def test_known_coefficients_stay_where_a_fit_chooses_no_better() -> None:
    truth = shaken(1)
    known = replace(MACHINE, model=truth)
    found = fit.judged(known, rows_on(truth, 60, 1, noise=0.4))
    assert found.model.numbers == truth.numbers
    assert found.after == found.before
    assert found.errors


def test_coefficients_that_the_sample_does_not_move_stay() -> None:
    truth = shaken(3)
    rows = [row for row in rows_on(truth, 80, 3, 0.0) if row.problem.alignment == 16]
    found = fit.fitted(MACHINE, SHIPPED, rows)
    known, own = (m.numbers["matvec/clustered_rows"] for m in (SHIPPED, found))
    assert own["read aligned 2"] != known["read aligned 2"]
    assert own["read unaligned 2"] == known["read unaligned 2"]
    assert found.numbers["matmul/wgmma_split"] == SHIPPED.numbers["matmul/wgmma_split"]


def test_one_rung_is_fitted_alone_where_it_is_asked_for() -> None:
    rows = rows_on(shaken(4), 80, 4, 0.0)
    found = fit.fitted(MACHINE, SHIPPED, rows, only="vecmat/split_columns")
    changed = [name for name, tree in found.numbers.items() if tree != SHIPPED.numbers[name]]
    assert changed == ["vecmat/split_columns"]


def test_a_disturbed_time_does_not_bend_the_fit() -> None:
    def predict(at: fit.Floats) -> tuple[fit.Floats, fit.Floats]:
        slopes = np.stack([np.ones(20), np.arange(1.0, 21.0)], axis=1)
        return np.asarray(slopes @ at), slopes

    measured, _ = predict(np.array([3.0, 2.0]))
    measured[7] *= 40
    found = fit.least_squares(predict, np.array([1.0, 1.0]), measured, pull=1e-4)
    assert found == pytest.approx([3.0, 2.0], rel=0.05)


def test_what_counts_with_another_is_fitted_to_its_coefficients() -> None:
    rung = next(r for r in all_rungs("cuda") if r.name == "any_columns")
    spec = QuantSpec(4, 128, False, "row", "float16", True)
    sizes = [(256 * (1 + i), 8 * (1 + i % 3), 512) for i in range(12)]
    problems = [
        Problem("matmul", m, n, k, a="uint4", b="float16", out="float16", quant=spec)
        for m, n, k in sizes
    ]
    assert rung.seconds is not None
    slower = replace(MACHINE, model=models.scaled(SHIPPED, 0.5))
    rows = [Timed(p, rung, {}, rung.seconds(p, {}, slower)) for p in problems]
    found = fit.fitted(MACHINE, SHIPPED, rows).numbers["quantized/any_codes"]
    assert found["weight_s"] == pytest.approx(
        2 * SHIPPED.numbers["quantized/any_codes"]["weight_s"], rel=0.05
    )


def test_no_product_is_both_fitted_to_and_judged_by() -> None:
    rows = rows_on(SHIPPED, 40, 5, 0.0)
    seen, judge = ({row.problem for row in part} for part in fit.held_out(rows))
    assert not seen & judge
    assert len(judge) == len({row.problem for row in rows}) // 4


def test_loss_is_what_the_choice_takes_over_the_best() -> None:
    problem = Problem("matvec", 8, 8)
    rows = [Timed(problem, RUNGS[0], {}, 1.0), Timed(problem, RUNGS[1], {}, 1.5)]
    wrong = {rows[0].name: 9.0, rows[1].name: 2.0}
    lost = fit.loss(rows, lambda row: wrong[row.name])
    assert (lost.products, lost.mean) == (1, pytest.approx(0.5))
    never = fit.loss(rows, {rows[0]: math.nan, rows[1]: 2.0}.__getitem__)
    assert never.mean == pytest.approx(0.5)  # the best counts, whether or not it may be chosen


def test_what_plans_never_compare_bends_no_coefficient() -> None:
    rung = next(r for r in all_rungs("cuda") if r.name == "even_rows")
    problems = [Problem("matvec", 1 << (5 + i), 4096) for i in range(14)]
    rows = [
        Timed(p, rung, params, 1e-5 * (100 if p.m > 1 << 11 else 1))
        for p in problems
        for params in rung.space(p)
    ]
    near = fit.compared(MACHINE, rows)
    assert {row.problem.m <= 1 << 11 for row in near} == {True}
    assert 0 < len(near) < len(rows)
    assert fit.fitted(MACHINE, SHIPPED, rows).numbers == fit.fitted(MACHINE, SHIPPED, near).numbers
    both = [replace(r.rung, choices=None) for r in near[:1]]
    assert fit.compared(MACHINE, [replace(row, rung=both[0]) for row in rows[-1:]])


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_products_of_a_seed_are_the_same_each_time(backend: str) -> None:
    first, second = sample.draw(backend, 7), sample.draw(backend, 7)
    some = [next(first) for _ in range(400)]
    assert some == [next(second) for _ in range(400)]
    experts = {"grouped"} if backend == "cuda" else set()
    assert {problem.op for problem in some} == {"matvec", "matmul"} | experts
    specs = [problem.quant for problem in some if problem.quant is not None]
    formats = {"int4", "int8", *(("mxfp4", "nvfp4") if backend == "cuda" else ())}
    assert {spec.format for spec in specs} == formats
    assert {spec.transposed for spec in specs} == {False, True}
    assert [problem_of(asdict(problem)) for problem in some] == some  # as rows are read again


@pytest.fixture
def small_products(
    own_cache: Path, limit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "disturbed", lambda samples: 0.0)  # busy as this machine may be
    limit(sample, SECONDS={"cpu": 0.01}, MOST_BYTES={"cpu": 1 << 16})


def quiet(what: str, done: int, total: int) -> None:
    return None


@pytest.mark.usefixtures("small_products")
def test_a_sample_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sample.Sampler("cpu", seed=2)
    problems = [p for p in sampler.drawn(12) if p.quant is None and p.op == "matvec"][:2]
    sampler.measure(problems, quiet, longest_s=0.0)
    assert sampler.rows == []
    sampler.measure(problems, quiet)
    assert sampler.timed()
    again = sample.Sampler("cpu", seed=2)
    assert [way for way, _ in again.rows] == [way for way, _ in sampler.rows]

    def never(*args: Any) -> None:
        raise AssertionError("measured twice")

    monkeypatch.setattr(sample.Sampler, "_keep", never)
    again.measure(problems, quiet)
    with pytest.raises(AssertionError, match="measured twice"):
        again.measure([replace(problems[0], m=problems[0].m + 16)], quiet)


@pytest.mark.usefixtures("small_products")
def test_rungs_without_a_proof_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sample.Sampler("cpu", seed=2)
    monkeypatch.setattr(type(sampler.backend), "proved", lambda *args, **how: False)
    sampler.measure([Problem("matvec", 64, 64)], quiet)
    assert sampler.rows == []


@pytest.mark.usefixtures("small_products")
def test_rows_of_an_edited_rung_or_with_foreign_values_do_not_count() -> None:
    sampler = sample.Sampler("cpu", seed=2)
    sampler.measure([Problem("matvec", 64, 64)], quiet)
    ways = [way for way, row in sampler.rows if row is not None]
    spoilt = [
        replace(ways[0], digest="0" * 64),
        replace(ways[0], rung="another"),
        replace(ways[0], seconds=-1.0),
        replace(ways[0], params={"block": 1e9}),
    ]
    lines.write_records(sampler.path, sample.SCHEMA, spoilt)
    assert not sample.Sampler("cpu", seed=2).timed()


@pytest.mark.usefixtures("small_products")
def test_what_loses_the_device_is_the_last_that_is_tried_on_it(fault: Callable[..., Any]) -> None:
    tried: list[Any] = []

    def lose(sound: Any, session: Session, way: Any) -> Any:
        tried.append(way)
        if len(tried) == 1:
            return sound(session, way)
        session.lost = "lost"
        return LaunchFailed(way, "an illegal address")

    fault(Session, "admit", lose)
    sampler = sample.Sampler("cpu", seed=2)
    sampler.measure([Problem("matvec", 64, 64), Problem("matvec", 96, 64)], quiet)
    assert len(tried) == 2
    assert sampler.lost == "lost"
    assert [way.rung for way, _ in sampler.rows] == [tried[1].rung.name]
    assert sampler.timed() == [], "what was admitted before is not timed either"
