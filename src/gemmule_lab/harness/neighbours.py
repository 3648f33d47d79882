"""Other programs on the processors: how much they use, and the flag of rows timed beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gemmule_lab.records.rows import OTHERS, TAKEN_AWAY

STAT = Path("/proc/stat")
STEP_S = 0.5
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
BUSY_SHARE = 0.1
ALONE_SHARE = 0.03  # what a system at rest uses; its threads alone take turns on a processor then


class Neighbours:
    """Counts, from when it is made, what others use of the processors that are this process's.

    Others are programs, and a host.
    cpu_s: processor time that this process has used.
    """

    def __init__(self, stat: Path = STAT, cpu_s: Callable[[], float] = time.process_time) -> None:
        self._stat, self._cpu_s = stat, cpu_s
        self._first, self._own = _ticks(stat), cpu_s()

    def share(self) -> float | None:
        """Return the share of the processors' time since then; None where none is told."""
        last, own = _ticks(self._stat), self._cpu_s() - self._own
        if self._first is None or last is None or sum(last) <= sum(self._first):
            return None
        total = sum(last) - sum(self._first)
        idle = sum(last[3:5]) - sum(self._first[3:5])  # idle, and waiting for disks
        return max(0.0, 1 - (idle + own * TICKS_A_SECOND) / total)


def flags_beside(share: float | None, noticed: Sequence[str]) -> tuple[str, ...]:
    """Return a row's flags: what its blocks noticed, and what others used of the processors.

    Where they used hardly anything, a thread that lost its processor lost it to another one of this
    process, which every library with threads of its own brings about: that disturbs nothing.
    """
    if share is not None and share <= ALONE_SHARE:
        return tuple(flag for flag in noticed if not flag.startswith(TAKEN_AWAY))
    if share is None or share <= BUSY_SHARE:
        return tuple(noticed)
    return (*noticed, f"{OTHERS} {share:.0%} of the processors")


def processors_in_use(
    stat: Path = STAT, wait: Callable[[float], None] = time.sleep
) -> float | None:
    """Return the share of processor time used by anybody over half a second; None if unknown."""
    everybody = Neighbours(stat, lambda: 0.0)
    wait(STEP_S)
    return everybody.share()


def _ticks(stat: Path) -> list[int] | None:
    """Return the ticks of the processors that this process may use; of all, where none is told."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines() if line.startswith("cpu")]
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        own = [line for line in lines if line[0] in allowed] or lines[:1]
        each = [[int(word) for word in line[1:9]] for line in own]
    except (OSError, ValueError, AttributeError):
        return None
    return [sum(ticks) for ticks in zip(*each, strict=True)] or None
