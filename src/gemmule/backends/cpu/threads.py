"""How many threads a product may use: affinity, control groups, and what Numba was told."""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path

from gemmule.backends.cpu.atomics import SUPPORTED
from gemmule.settings import numba_threads

MOST = 1024
# What a share reads at least: a microsecond of work or two, against a fraction of one to claim it,
# as long as no thread has two; else more, as many threads at one counter are in each other's way.
SMALL_SHARE_BYTES, SHARE_BYTES = 16 << 10, 256 << 10


class _Lent(threading.local):
    """How many threads of another library the calling thread's products use; 0: none are lent."""

    count = 0


LENT = _Lent()


def thread_count() -> int:
    """Return how many threads a product may use now, the caller's counted.

    Those that are lent; else processors that the process may use, by affinity and the control
    group's quota; fewer where ``NUMBA_NUM_THREADS`` or ``numba.set_num_threads`` of the calling
    thread say so.
    """
    if LENT.count > 0:
        return LENT.count
    most, parallel = processors(), sys.modules.get("numba.np.ufunc.parallel")
    # Asking would start Numba's own threads, unless somebody else has.
    if parallel is None or not getattr(parallel, "_is_initialized", False):
        return most
    return min(most, int(parallel.get_num_threads()))


@functools.cache
def processors() -> int:
    """Return the most threads that products use in this process."""
    if not SUPPORTED:
        return 1
    told = numba_threads()
    return max(1, min(usable_processors(), MOST if told is None else told, MOST))


@functools.lru_cache(maxsize=4096)
def shares_for(nbytes: int, units: int, per_thread: int, threads: int) -> int:
    """Return in how many shares to cut a product that reads so many bytes, in `units` at finest."""
    small = min(nbytes // SMALL_SHARE_BYTES, threads)
    usual = min(nbytes // SHARE_BYTES, threads * per_thread)
    return max(1, min(units, max(small, usual)))


def usable_processors() -> int:
    """Return how many processors' time this process may use: affinity and control group."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        count = os.cpu_count() or 1
    quota = _group_quota()
    return count if quota is None else max(1, min(count, int(-(-quota // 1))))


_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def _group_quota() -> float | None:
    """Return the smallest quota of the process's control groups in processors, or None."""
    found = []
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        controllers, name = [*line.split(":", 2), "", ""][1:3]
        if controllers == "":
            places = [_GROUPS, *_path_down(_GROUPS, name)]
            found += [quota_of(place / "cpu.max", None) for place in places]
        elif "cpu" in controllers.split(","):
            top = _GROUPS / controllers
            for place in (_GROUPS / "cpu", top, *_path_down(top, name)):
                found.append(quota_of(place / "cpu.cfs_quota_us", place / "cpu.cfs_period_us"))
    known = [quota for quota in found if quota is not None]
    return min(known) if known else None


def _path_down(top: Path, name: str) -> list[Path]:
    places, place = [], top
    for part in Path(name.strip().lstrip("/")).parts:
        place = place / part
        places.append(place)
    return places


def quota_of(quota: Path, period: Path | None) -> float | None:
    """Return how many processors a control group may keep busy; None: no limit is told."""
    try:
        text = quota.read_text().split()
        whole = text[1] if period is None else period.read_text()
        share = float(text[0]) / float(whole)
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return None  # "max", -1 below, or no such file
    return share if share > 0 else None
