"""The shipped time models beside what an H100 measured: their worth, and how they are written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import refit
from gemmule.storage import models
from gemmule.tuning import fit

MODEL = models.shipped()[0][0]
FILE = models.SHIPPED / f"{refit.slug(MODEL.device)}.json"
MACHINE = refit.machine_of(MODEL)


@pytest.fixture(scope="module")
def every_row() -> list[fit.Timed]:
    path = Path(refit.ROOT, "evidence", refit.slug(MODEL.device), "measured_ways.jsonl.xz")
    return refit.sample(path)


@pytest.fixture(scope="module")
def rows(every_row: list[fit.Timed]) -> list[fit.Timed]:
    return [row for row in every_row if row.problem.op == "matvec"]


def test_a_file_with_nothing_changed_is_the_same() -> None:
    before = FILE.read_text(encoding="utf-8")
    assert refit.text_of(MODEL, before) == before


def test_only_the_named_rungs_are_fitted_again(rows: list[fit.Timed]) -> None:
    made = refit.refitted(MACHINE, rows[::4], ["matvec/split_rows"])
    changed = {name for name, own in made.numbers.items() if own != MODEL.numbers[name]}
    assert changed == {"matvec/split_rows"}


def test_rungs_that_share_coefficients_are_fitted_together(every_row: list[fit.Timed]) -> None:
    rung = next(r for r in refit.all_rungs("cuda") if r.name == "any_columns")
    assert rung.counts_with != f"{rung.folder}/{rung.name}"
    rows = [row for row in every_row if row.rung.counts_with == rung.counts_with]
    by_name, whole = (refit.refitted(MACHINE, rows, names) for names in ([rung.name], []))
    one = refit.refitted(MACHINE, rows, [f"{rung.folder}/{rung.name}"])
    assert by_name.numbers == MODEL.numbers
    assert one.numbers == whole.numbers != MODEL.numbers


def test_a_row_is_modelled_on_the_device_where_it_was_measured() -> None:
    _, names = models.shipped()[0]
    found = refit.samples(MODEL, names)
    assert set(found) == set(refit.READ) == {"nvidia-h100-80gb-hbm3", "nvidia-h200"}
    for folder, rows in found.items():
        assert {row.on.read_bytes_per_s for row in rows if row.on} == {refit.READ[folder]}
    large = max(found["nvidia-h200"], key=lambda row: row.problem.compulsory_bytes)
    there, here = (fit.modelled(MACHINE, MODEL, row) for row in (large, replace(large, on=None)))
    assert 0 < there < here  # its memory is quicker
    rows = [row for row in found["nvidia-h200"] if row.rung.counts_with == large.rung.counts_with]
    owner = large.rung.counts_with
    fitted, elsewhere = (
        refit.refitted(MACHINE, some, []).numbers[owner]
        for some in (rows, [replace(row, on=None) for row in rows])
    )
    assert fitted != elsewhere


def test_products_that_a_model_was_not_fitted_to_lose_little_by_it(rows: list[fit.Timed]) -> None:
    shipped, fresh = refit.priced(MACHINE, rows, ["matvec/"])
    for some in (shipped, fresh):
        assert len(some) == len(rows)
        found = fit.loss((row for row, _ in some), dict(some).__getitem__)
        assert found.products > 500
        assert found.mean < 0.02
    lines = list(refit.told(fresh))
    assert len(lines) == 4 + refit.WORST  # by rows, by columns, of codes, all; then the worst
    # A model that is wrong about one rung is found out.
    odd = {**MODEL.numbers["matvec/streamed_rows"], "start_s": 1e-9}
    wrong = replace(MODEL, numbers={**MODEL.numbers, "matvec/streamed_rows": odd})
    priced = {row: fit.modelled(MACHINE, wrong, row) for row in rows}
    assert fit.loss(rows, priced.__getitem__).mean > 0.02


def test_each_rung_is_off_by_what_its_model_says(every_row: list[fit.Timed]) -> None:
    """By its formulas of today: what is counted otherwise than it was fitted shows here."""
    price = {row: fit.modelled(MACHINE, MODEL, row) for row in every_row}
    found = fit.errors(every_row, price.__getitem__)
    known = {name: error for name, error in found.items() if name in MODEL.errors}
    assert len(known) > 30
    assert {n: e for n, e in known.items() if e > 1.1 * MODEL.errors[n] + 0.04} == {}
