"""The shipped time models beside what was measured: their worth, and how they are written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import refit
from gemmule.core.device_model import DeviceModel
from gemmule.storage import models
from gemmule.tuning import fit

MODELS = {model.device: model for model, _ in models.shipped()}
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
MODEL = MODELS[H100]
MACHINE = refit.machine_of(MODEL)


@pytest.fixture(scope="module")
def samples() -> dict[str, refit.Sample]:
    folders = {device: refit.ROOT / "evidence" / refit.slug(device) for device in MODELS}
    return {device: refit.sample(folder) for device, folder in folders.items()}


def of_op(rows: refit.Sample, op: str) -> refit.Sample:
    return refit.Sample([row for row in rows.drawn if row.problem.op == op], [])


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.device)
def test_a_file_with_nothing_changed_is_the_same(model: DeviceModel) -> None:
    file = models.SHIPPED / f"{refit.slug(model.device)}.json"
    before = file.read_text(encoding="utf-8")
    assert refit.text_of(model, before) == before


def test_only_the_named_rungs_are_fitted_again(samples: dict[str, refit.Sample]) -> None:
    rows = of_op(samples[H100], "matvec").drawn[::4]
    made = refit.refitted(MACHINE, rows, [], ["matvec/split_rows"])
    changed = {name for name, own in made.numbers.items() if own != MODEL.numbers[name]}
    assert changed == {"matvec/split_rows"}


def test_rungs_that_share_coefficients_are_fitted_together(
    samples: dict[str, refit.Sample],
) -> None:
    rung = next(r for r in refit.all_rungs("cuda") if r.name == "any_columns")
    assert rung.counts_with != f"{rung.folder}/{rung.name}"
    rows = [row for row in samples[H100].drawn if row.rung.counts_with == rung.counts_with]
    by_name, whole = (refit.refitted(MACHINE, rows, [], names) for names in ([rung.name], []))
    one = refit.refitted(MACHINE, rows, [], [f"{rung.folder}/{rung.name}"])
    assert by_name.numbers == MODEL.numbers
    assert one.numbers == whole.numbers != MODEL.numbers


@pytest.mark.parametrize(("device", "most"), [(H100, 0.02), (H200, 0.04)])
def test_products_that_a_model_was_not_fitted_to_lose_little_by_it(
    samples: dict[str, refit.Sample], device: str, most: float
) -> None:
    model, rows = MODELS[device], of_op(samples[device], "matvec")
    machine = refit.machine_of(model)
    for price in refit.priced(machine, rows, ["matvec/"]):
        found = list(refit.taken(machine, rows.drawn, price))
        assert len(found) > 250
        assert sum(one.lost for one in found) / len(found) < most
    assert len(list(refit.told(found, price))) == 4 + refit.WORST  # three classes, all; the worst
    # A model that is wrong about one rung is found out.
    odd = {name: n / 5 for name, n in model.numbers["matvec/streamed_rows"].items()}
    wrong = replace(model, numbers={**model.numbers, "matvec/streamed_rows": odd})
    price = {row: fit.modelled(machine, wrong, row) for row in fit.compared(machine, rows.drawn)}
    some = list(refit.taken(machine, rows.drawn, price))
    assert sum(one.lost for one in some) / len(some) > most


def test_products_of_bars_are_taken_as_they_were_measured_best(
    samples: dict[str, refit.Sample],
) -> None:
    """By the shipped coefficients, as plans choose: what a refit spoils there shows here."""
    rows, machine = samples[H200].named, refit.machine_of(MODELS[H200])
    price = {row: fit.modelled(machine, MODELS[H200], row) for row in fit.compared(machine, rows)}
    lost = [one.lost for one in refit.taken(machine, rows, price)]
    assert len(lost) > 150
    assert sum(lost) / len(lost) < 0.025
    assert max(lost) < 0.45


@pytest.mark.parametrize("device", [H100, H200])
def test_each_rung_is_off_by_what_its_model_says(
    samples: dict[str, refit.Sample], device: str
) -> None:
    """By its formulas of today: what is counted otherwise than it was fitted shows here."""
    model = MODELS[device]
    machine = refit.machine_of(model)
    price = {
        row: fit.modelled(machine, model, row)
        for row in fit.compared(machine, samples[device].drawn)
    }
    found = fit.errors(price, price.__getitem__)
    known = {name: error for name, error in found.items() if name in model.errors}
    assert len(known) > 30
    assert {n: e for n, e in known.items() if e > 1.1 * model.errors[n] + 0.04} == {}
    assert json.loads(json.dumps(dict(model.errors))) == dict(model.errors)
