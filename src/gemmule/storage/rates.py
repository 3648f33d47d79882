"""Measured host rates on disk: one small file a machine, which plans prefer to the defaults.

A file of another machine, or that claims what no machine does, is as good as absent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gemmule.core.host_rates import HostRates, plausible
from gemmule.storage import measured
from gemmule.storage.atomic import check_private


def path_of(name: str, arch: str, units: int) -> Path:
    """Return the file of a machine: its processor's name, architecture and number of threads."""
    return measured.path_of("rates", name, arch, units)


def read(name: str, arch: str, units: int) -> HostRates | None:
    """Return the stored rates of a machine, or None; ``GEMMULE_TUNE=0`` ignores what is stored."""
    record = measured.read(path_of(name, arch, units)) or {}
    if (record.get("machine"), record.get("units")) != (name, units):
        return None
    try:
        rates = HostRates(**record["rates"])
    except (KeyError, TypeError):
        return None
    return rates if not plausible(rates) and isinstance(rates.measured, str) else None


def errors(name: str, arch: str, units: int) -> dict[str, float]:
    """Return by rung, ``folder/name``, how far its estimates were from times measured there."""
    record = measured.read(path_of(name, arch, units)) or {}
    known = record.get("errors")
    is_of_it = (record.get("machine"), record.get("units")) == (name, units)
    if not is_of_it or not isinstance(known, dict):
        return {}
    return {rung: one for rung, one in known.items() if type(one) is float and 0 <= one < 100}


def save(
    name: str, arch: str, units: int, rates: HostRates, errors: Mapping[str, float] | None = None
) -> Path | None:
    """Store a machine's rates; return the file, or None when the cache cannot be written.

    errors: of rungs, where they were judged. ValueError for rates that no machine has.
    """
    fault = plausible(rates)
    if fault:
        raise ValueError(f"these are no rates of a machine: {fault}.")
    record: dict[str, Any] = {"machine": name, "units": units, "rates": asdict(rates)}
    record |= {"errors": dict(errors)} if errors else {}
    return measured.save(path_of(name, arch, units), record)


@contextlib.contextmanager
def one_at_a_time(name: str, arch: str, units: int) -> Iterator[None]:
    """Wait while another process measures this machine; where no lock can be had, go on."""
    path = path_of(name, arch, units).with_suffix(".lock")
    try:
        import fcntl

        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(path.parent)
        # Nothing that lies there is cut, nor is a link followed: it may be another's, or a trap.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
