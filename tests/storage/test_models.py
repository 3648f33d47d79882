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
    slower = models.scaled(SHIPPED, 0.5)
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
    assert models.borrowed(CARD) == ""


def test_what_is_stored_is_ignored_where_tuning_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    models.save(own())
    monkeypatch.setenv("GEMMULE_TUNE", "0")
    forget_plans()
    assert models.of(CARD).measured == ""
    assert models.borrowed(CARD) == f"{SHIPPED.device}, scaled by the clocks"


def _rename(record: dict[str, Any]) -> None:
    tree = record["numbers"]["matvec/split_rows"]
    tree["other_s"] = tree.pop("start_s")


def _unknown_rung(record: dict[str, Any]) -> None:
    record["numbers"]["matvec/another"] = {}


def _number(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        record["numbers"]["matvec/split_rows"]["start_s"] = value

    return change


def _device(record: dict[str, Any]) -> None:
    record["device"] = "Another card"


def _error(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        record["errors"] = {"matvec/split_rows": value}

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        *(_rename, _unknown_rung, _device, _error(-1.0), _error("x")),
        *map(_number, (-1e-6, 0.0, 2.0, "x", None, {})),
    ],
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
    tree = {**SHIPPED.numbers["matvec/split_rows"], "start_s": -1.0}
    spoilt = replace(own(), numbers={**SHIPPED.numbers, "matvec/split_rows": tree})
    with pytest.raises(ValueError, match="start_s is -1"):
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
    assert split["start_s"] == pytest.approx(known["start_s"] / clocks)
    assert split["turn_s 64x16"] == pytest.approx(known["turn_s 64x16"] / clocks)
    assert split["read"] == known["read"]
    assert found.errors == {}


def test_a_device_counts_with_its_own_model_as_it_is() -> None:
    assert SHIPPED.errors
    assert models.of(replace(CARD, name=SHIPPED.device, clock_hz=1.0e9)) is SHIPPED


def test_a_device_like_that_of_a_model_has_its_numbers_and_no_errors() -> None:
    found = models.of(replace(CARD, name="NVIDIA H100 PCIe", clock_hz=1.0e9))
    assert found.numbers is SHIPPED.numbers
    assert found.errors == {}
    assert models.borrowed(replace(CARD, name="NVIDIA H100 PCIe")) == SHIPPED.device


def test_every_card_that_was_measured_has_a_model_of_its_own() -> None:
    for model, names in models.shipped():
        assert set(model.numbers) == set(SHIPPED.numbers)
        assert model.errors
        assert models.of(replace(CARD, name=model.device)) is model
        assert [one for _, one in models.shipped() if model.device.startswith(one)] == [names]


def test_times_add_up_what_waits_alone_and_the_longest_of_what_overlaps() -> None:
    own = {"start_s": 1e-6, "read": 2.0, "turn_s": 1e-6}
    terms = {"start_s": 3.0}, {"read": 4e-6}, {"turn_s": 8.0}
    assert device_model.seconds(own, terms) == pytest.approx(3e-6 + 8e-6 * 2**0.25)
    assert device_model.seconds(own, terms[:2]) == pytest.approx(11e-6)


def test_units_of_numbers_follow_from_their_names() -> None:
    assert device_model.is_time("turn_s 64x16")
    assert device_model.is_time("start_s")
    assert not device_model.is_time("read unaligned halves 32")
