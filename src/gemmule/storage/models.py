"""Device models on disk: those that come with the package, and those fitted on this machine.

A file of the cache is never trusted: what it holds has to have exactly the names of the shipped
model, each number one that a device may have; else it is as good as absent. A device without a
model of its own begins with the nearest shipped one, its seconds scaled by the clocks.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemmule.core import device_model
from gemmule.core.caches import remembered
from gemmule.core.device_model import DeviceModel, Numbers
from gemmule.core.rung import Machine
from gemmule.storage import measured, rates
from gemmule.storage.lines import without_duplicates

log = logging.getLogger("gemmule")

SHIPPED = Path(__file__).parents[1] / "tuned" / "models"
FOLDER = "models"
SCALED = ", scaled"  # with what the origin of a model ends whose times were


def numbers(machine: Machine, rung: str) -> Numbers:
    """Return the coefficients of a rung, ``folder/name``, on a machine."""
    return of(machine).numbers[rung]


def of(machine: Machine) -> DeviceModel:
    """Return the model of a machine: its own, else one fitted there, else the nearest shipped."""
    if machine.model is not None:
        return machine.model
    ceiling = machine.read_bytes_per_s
    return _known(machine.name, machine.arch, machine.units, ceiling, machine.clock_hz)


@remembered(16)
def _known(name: str, arch: str, units: int, ceiling: float, clock_hz: float) -> DeviceModel:
    return read(name, arch, units) or _nearest(name, arch, units, ceiling, clock_hz)


def borrowed(machine: Machine) -> str:
    """Return whose times plans on a GPU begin with, or ``""`` where they are the device's own."""
    model = of(machine)
    how = ", scaled by the clocks" if model.origin.endswith(SCALED) else ""
    return "" if model.device == machine.name else f"{model.device}{how}"


def error(machine: Machine, rung: str) -> float | None:
    """Return by which share a rung's expected time is off at most, in nine of ten products there.

    Of those that were measured and not fitted to; None where none were.
    """
    if machine.backend == "cpu":
        return rates.errors(machine.name, machine.arch, machine.units).get(rung)
    return of(machine).errors.get(rung)


@functools.cache
def shipped() -> tuple[tuple[DeviceModel, tuple[str, ...]], ...]:
    """Return the models of the package, each with the beginnings of the names it is used for."""
    found = []
    for path in sorted(SHIPPED.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        record = json.loads(text, object_pairs_hook=without_duplicates)
        model = _decoded(record, origin=path.stem)
        found.append((model, tuple(record["devices"])))
    return tuple(found)


def read_ceiling(name: str) -> float | None:
    """Return the read rate that the model of a device of this name was fitted with, or None."""
    return next((one.read_bytes_per_s for one, _ in shipped() if one.device == name), None)


def _nearest(
    name: str, arch: str, units: int, read_bytes_per_s: float, clock_hz: float
) -> DeviceModel:
    """Return the shipped model of a device, or the nearest one, scaled.

    Terms count with the machine's own multiprocessors and read ceiling, so that what is left to
    scale is what clocks make slower.
    """
    for model, names in shipped():
        if name.startswith(names):
            return model if name == model.device else replace(model, errors={})

    def distance(model: DeviceModel) -> float:
        apart = abs(math.log(read_bytes_per_s / model.read_bytes_per_s))
        return apart + abs(math.log(units / model.units)) + (model.arch != arch)

    nearest = min((model for model, _ in shipped()), key=distance)
    if clock_hz <= 0:
        return nearest
    log.info(
        "%s has no time model of its own: plans begin with that of %s, scaled by the clocks; "
        "`gemmule tune --device-model --device cuda` measures one here.",
        name,
        nearest.device,
    )
    return scaled(nearest, clock_hz / nearest.clock_hz)


def scaled(model: DeviceModel, clocks: float) -> DeviceModel:
    """Return the model of a device whose clocks are `clocks` times as fast."""
    trees = {
        rung: {name: n / clocks if device_model.is_time(name) else n for name, n in own.items()}
        for rung, own in model.numbers.items()
    }
    return replace(model, numbers=trees, errors={}, origin=f"{model.origin}{SCALED}")


def path_of(name: str, arch: str, units: int) -> Path:
    """Return the file of a device's model in the cache."""
    return measured.path_of(FOLDER, name, arch, units)


def read(name: str, arch: str, units: int) -> DeviceModel | None:
    """Return the model that was fitted on a device, or None; ``GEMMULE_TUNE=0`` ignores it."""
    path = path_of(name, arch, units)
    record = measured.read(path)
    try:
        model = None if record is None else _decoded(record, origin="measured here")
    except (KeyError, TypeError, ValueError):
        return None
    if model is None or (model.device, model.arch, model.units) != (name, arch, units):
        return None
    return model if fault(model) == "" else None


def save(model: DeviceModel) -> Path | None:
    """Store a device's model; return the file, or None when the cache cannot be written.

    ValueError for one that plans would not accept.
    """
    wrong = fault(model)
    if wrong:
        raise ValueError(f"this is no model of a device: {wrong}.")
    record = {
        "device": model.device,
        "arch": model.arch,
        "units": model.units,
        "read_bytes_per_s": model.read_bytes_per_s,
        "clock_hz": model.clock_hz,
        "measured": model.measured,
        "errors": dict(model.errors),
        "numbers": model.numbers,
    }
    return measured.save(path_of(model.device, model.arch, model.units), record)


def fault(model: DeviceModel) -> str:
    """Return what is wrong with a model, or ``""``: names other than the shipped, odd numbers."""
    known = shipped()[0][0].numbers
    if set(model.numbers) != set(known):
        return f"it has not the rungs of {shipped()[0][0].origin}"
    for rung, own in model.numbers.items():
        if set(own) != set(known[rung]):
            return f"the coefficients of {rung} are not those that it counts with"
        for name, value in own.items():
            if not device_model.plausible(name, value):
                return f"{rung}: {name} is {value}"
    for rung, error in model.errors.items():
        if type(error) is not float or not 0 <= error < 100:
            return f"the error of {rung} is {error}"
    return ""


def _decoded(record: Mapping[str, Any], origin: str) -> DeviceModel:
    """Return the model of a record; KeyError, TypeError or ValueError where that has no such."""
    texts = {name: record[name] for name in ("device", "arch")}
    measured_on = record.get("measured", "")
    if not all(isinstance(text, str) for text in (*texts.values(), measured_on)):
        raise ValueError("a device is named in words.")
    return DeviceModel(
        units=int(record["units"]),
        read_bytes_per_s=float(record["read_bytes_per_s"]),
        clock_hz=float(record["clock_hz"]),
        numbers=dict(record["numbers"]),
        errors=dict(record.get("errors", {})),
        origin=origin,
        measured=measured_on,
        **texts,
    )
