"""Caches of the host, and how many operand sets rotate so that each read is a cold one."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.memory import available_bytes

CACHE_FOLDER = Path("/sys/devices/system/cpu")
MAX_SETS = 1 << 16


@dataclass(frozen=True, slots=True)
class Rotation:
    """How many operand sets to walk through, and whether that makes every read a cold one.

    When memory forbids enough sets, `cold` is False: such a row has to be reported as warm.
    """

    sets: int
    bytes: int
    cold: bool


def rotation(
    bytes_per_set: int,
    cache_bytes: int,
    *,
    factor: float = 2.0,
    memory_bytes: int | None = None,
    most_sets: int = MAX_SETS,
) -> Rotation:
    """Return the rotation in which `factor` caches' worth of other bytes pass between two uses.

    bytes_per_set: bytes that one call touches. cache_bytes: the last-level cache (all of it that
    the process can reach). memory_bytes: the most the sets may take together; by default half of
    the memory available now. A GPU's L2 wants ``factor=4``. At least two sets, so that a call never
    meets the tail of the matrix it has just read itself; at most `most_sets`.

    >>> rotation(16 << 20, 32 << 20, memory_bytes=1 << 30)
    Rotation(sets=5, bytes=83886080, cold=True)
    """
    if bytes_per_set < 1 or cache_bytes < 0:
        raise ValueError(
            f"bytes_per_set is {bytes_per_set} and cache_bytes {cache_bytes}; a set holds at least "
            "one byte and a cache no negative number of them."
        )
    room = available_bytes() // 2 if memory_bytes is None else memory_bytes
    wanted = 1 + max(1, math.ceil(factor * cache_bytes / bytes_per_set))
    sets = max(1, min(wanted, most_sets, room // bytes_per_set))
    return Rotation(sets, sets * bytes_per_set, cold=sets == wanted)


def last_level_cache_bytes(folder: Path = CACHE_FOLDER) -> int | None:
    """Return the bytes of last-level cache that this process's CPUs reach, or None if unknown."""
    sizes = cache_bytes(folder)
    return sizes[max(sizes)] if sizes else None


def cache_bytes(folder: Path = CACHE_FOLDER) -> dict[int, int]:
    """Return the bytes of cache that this process's CPUs reach, by level; empty where unknown.

    Read from sysfs: caches that hold data, each counted once however many CPUs share it, over the
    CPUs the process may run on.
    """
    caches: dict[tuple[int, str], int] = {}
    for cpu in usable_cpus():
        for index in folder.glob(f"cpu{cpu}/cache/index*"):
            try:
                if (index / "type").read_text().strip() == "Instruction":
                    continue
                level = int((index / "level").read_text())
                shared_by = (index / "shared_cpu_list").read_text().strip()
                caches[level, shared_by] = _cache_size((index / "size").read_text().strip())
            except (OSError, ValueError):  # an entry the kernel leaves out or empty
                continue
    sizes: dict[int, int] = {}
    for (level, _), size in sorted(caches.items()):
        sizes[level] = sizes.get(level, 0) + size
    return sizes


def usable_cpus() -> list[int]:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cache_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)
