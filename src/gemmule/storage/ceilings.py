"""Measured read ceilings on disk: one small file a device, which plans prefer to a datasheet.

Written by the lab (`gemmule bench --device cuda`). A file of another device, or that claims what no
memory does, is as good as absent.
"""

from __future__ import annotations

from pathlib import Path

from gemmule.core.rung import Machine
from gemmule.storage import measured

FOLDER = "ceilings"
# What one device's memory may deliver, bytes a second: slower or faster is a broken measurement.
PLAUSIBLE = (1e10, 1e14)


def read(backend: str, name: str, arch: str, units: int) -> float | None:
    """Return the stored read rate of a device in bytes a second, or None."""
    record = measured.read(measured.path_of(FOLDER, backend, name, arch, units)) or {}
    rate = record.get("read_bytes_per_s")
    if record.get("device") != name or type(rate) is not float:
        return None
    return rate if PLAUSIBLE[0] <= rate <= PLAUSIBLE[1] else None


def save(machine: Machine, read_bytes_per_s: float) -> Path | None:
    """Store a device's read rate; return the file, or None when the cache cannot be written.

    ValueError for a rate that no memory has.
    """
    if not PLAUSIBLE[0] <= read_bytes_per_s <= PLAUSIBLE[1]:
        raise ValueError(f"{read_bytes_per_s:.3g} bytes a second is no read rate of a memory.")
    names = machine.backend, machine.name, machine.arch, machine.units
    record = {"device": machine.name, "read_bytes_per_s": float(read_bytes_per_s)}
    return measured.save(measured.path_of(FOLDER, *names), record)
