"""Measured read ceilings on disk: one small JSON file a device, which plans prefer to a datasheet.

Written by the lab (`gemmule bench --device cuda`). A file that is corrupt, too large, of another
schema or device, or claims what no memory does, is as good as absent.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gemmule.core.rung import Machine
from gemmule.settings import cache_folder, tuning_enabled
from gemmule.storage.atomic import small_file, write_atomically

SCHEMA = 1
# What one device's memory may deliver, bytes a second: slower or faster is a broken measurement.
PLAUSIBLE = (1e10, 1e14)


def _path(backend: str, name: str, arch: str, units: int) -> Path:
    text = json.dumps([SCHEMA, backend, name, arch, units])
    return cache_folder() / "ceilings" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def read(backend: str, name: str, arch: str, units: int) -> float | None:
    """Return the stored read rate of a device in bytes a second, or None.

    ``GEMMULE_TUNE=0`` ignores what is stored, here as for tuning results.
    """
    if not tuning_enabled():
        return None
    try:
        record = json.loads(small_file(_path(backend, name, arch, units)))
        rate = record["read_bytes_per_s"]
        known = (record["schema"], record["device"]) == (SCHEMA, name)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    if not known or type(rate) is not float or not PLAUSIBLE[0] <= rate <= PLAUSIBLE[1]:
        return None
    return rate


def save(machine: Machine, read_bytes_per_s: float) -> Path | None:
    """Store a device's read rate; return the file, or None when the cache cannot be written.

    ValueError for a rate that no memory has.
    """
    if not PLAUSIBLE[0] <= read_bytes_per_s <= PLAUSIBLE[1]:
        raise ValueError(f"{read_bytes_per_s:.3g} bytes a second is no read rate of a memory.")
    path = _path(machine.backend, machine.name, machine.arch, machine.units)
    record = {"schema": SCHEMA, "device": machine.name, "read_bytes_per_s": float(read_bytes_per_s)}
    return path if write_atomically(path, json.dumps(record).encode()) else None
