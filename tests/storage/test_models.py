"""Device models on disk: shipped ones, kept ones that are never trusted, and the nearest."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemmule.core import device_model
from gemmule.core.caches import forget_plans
from gemmule.core.device_model import DeviceModel
from gemmule.core.rung import Machine
from gemmule.storage import models

SHIPPED = models.shipped()[0][0]
CARD = Machine("cuda", "A card", "sm_80", 108, 1.5e12, 40 << 20, clock_hz=1.41e9)


def own(machine: Machine = CARD) -> DeviceModel:
    """Return a model of a device, half as quick in all."""
    slower = models.scaled(SHIPPED, 0.5, 1.0)
    names = {"device": machine.name, "arch": machine.arch, "units": machine.units}
    return replace(slower, errors={"matvec/split_rows": 0.09}, measured="2026-11-27", **names)


@pytest.fixture(autouse=True)
def _own_cache(own_cache: Path) -> None:
    forget_plans()


def test_a_kept_model_is_what_was_kept_and_comes_first() -> None:
    made = own()
    path = models.save(made)
    assert path is not None
    forget_plans()
    found = models.of(CARD)
    assert found.numbers == made.numbers
    assert (found.device, found.measured) == ("A card", "2026-11-27")
    assert models.error(CARD, "matvec/split_rows") == 0.09
    assert models.error(CARD, "matvec/even_rows") is None


def test_what_is_stored_is_ignored_where_tuning_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    models.save(own())
    monkeypatch.setenv("GEMMULE_TUNE", "0")
    forget_plans()
    assert models.of(CARD).measured == ""


def _rename(record: dict[str, Any]) -> None:
    tree = record["numbers"]["matvec/split_rows"]
    tree["other_s"] = tree.pop("beyond_s")


def _unknown_rung(record: dict[str, Any]) -> None:
    record["numbers"]["matvec/another"] = {}


def _number(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        record["numbers"]["matvec/split_rows"]["beyond_s"] = value

    return change


def _device(record: dict[str, Any]) -> None:
    record["device"] = "Another card"


def _error(record: dict[str, Any]) -> None:
    record["errors"] = {"matvec/split_rows": -1.0}


@pytest.mark.parametrize(
    "spoil",
    [_rename, _unknown_rung, _device, _error, *map(_number, (-1e-6, 0.0, 2.0, "x", None, {}))],
)
def test_a_spoilt_file_is_as_good_as_absent(spoil: Callable[[dict[str, Any]], None]) -> None:
    path = models.save(own())
    assert path is not None
    record = json.loads(path.read_text())
    spoil(record)
    path.write_text(json.dumps(record))
    assert models.read(CARD.name, CARD.arch, CARD.units) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"schema": 1}', '{"schema": 2}'])
def test_no_model_is_as_good_as_absent(text: str) -> None:
    path = models.save(own())
    assert path is not None
    path.write_text(text)
    assert models.read(CARD.name, CARD.arch, CARD.units) is None


def test_a_model_that_plans_would_not_accept_is_not_kept() -> None:
    tree = {**SHIPPED.numbers["matvec/split_rows"], "beyond_s": -1.0}
    spoilt = replace(own(), numbers={**SHIPPED.numbers, "matvec/split_rows": tree})
    with pytest.raises(ValueError, match="beyond_s is -1"):
        models.save(spoilt)


def test_an_unknown_device_begins_with_the_nearest_scaled_by_its_clocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "gemmule"):
        found = models.of(CARD)
        assert models.of(CARD) is found
    assert [record.message for record in caplog.records if "A card" in record.message]
    assert len([record for record in caplog.records if "no time model" in record.message]) == 1
    clocks = CARD.clock_hz / SHIPPED.clock_hz
    split, known = found.numbers["matmul/wgmma_split"], SHIPPED.numbers["matmul/wgmma_split"]
    assert split["meeting_s"] == pytest.approx(known["meeting_s"] / clocks)
    units = CARD.units / SHIPPED.units
    assert split["l2_bytes_per_s"] == pytest.approx(known["l2_bytes_per_s"] * clocks * units)
    assert split["rate"] == known["rate"]
    flops = found.numbers["matmul/cublas"]["unit_flops_per_s"]["halves"]
    of_shipped = SHIPPED.numbers["matmul/cublas"]["unit_flops_per_s"]["halves"]
    assert flops == pytest.approx(of_shipped * clocks)
    assert found.errors == {}


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_devices_that_a_model_names_count_with_it_as_it_is(name: str) -> None:
    assert models.of(replace(CARD, name=name, clock_hz=1.0e9)) is SHIPPED


def test_units_of_numbers_follow_from_their_names() -> None:
    assert device_model.unit(("stage_s", "64x16")) == "_s"
    assert device_model.unit(("unit_flops_per_s", "halves")) == "_per_s"
    assert device_model.unit(("rate", "aligned")) == ""
