"""Waiting for a machine that is quiet enough to be measured, and measuring again where it was not.

Blocks are marked, never dropped; but a product of whose blocks most were disturbed says more about
the neighbours than about the code, and may be measured once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gemmule_lab.records.rows import Row

STAT = Path("/proc/stat")
STEP_S = 0.5
BUSY_SHARE = 0.1
T = TypeVar("T")


@dataclass(slots=True)
class Patience:
    """Seconds that may still be spent on waiting and on measuring again.

    busy(): the share of all processors that is in use now, measured over a moment, or None where
    the system does not tell.
    """

    left_s: float
    busy: Callable[[], float | None]
    now: Callable[[], float] = time.monotonic

    def wait(self) -> bool:
        """Wait until the processors are idle; return False when patience ran out before."""
        while self.left_s > 0:
            start = self.now()
            share = self.busy()
            self.left_s -= self.now() - start
            if share is None or share <= BUSY_SHARE:
                return True
        return False

    def measure(self, attempt: Callable[[], T], rows: Callable[[T], Sequence[Row]]) -> T:
        """Return an undisturbed attempt; when patience runs out the least disturbed one."""
        best: T | None = None
        least = float("inf")
        while True:
            calm = self.wait()
            start = self.now()
            found = attempt()
            share = disturbed_share(rows(found))
            if best is None or share < least:
                best, least = found, share
            if least == 0 or not calm:
                return best
            self.left_s -= self.now() - start


def disturbed_share(rows: Sequence[Row]) -> float:
    """Return the share of rows more than half of whose blocks lost the CPU."""
    hit = sum(any(flag.startswith("the CPU was taken away") for flag in row.flags) for row in rows)
    return hit / len(rows) if rows else 0.0


def processors_in_use(
    stat: Path = STAT, wait: Callable[[float], None] = time.sleep
) -> float | None:
    """Return the share of processor time used by anybody over half a second; None if unknown."""
    try:
        first = _ticks(stat)
        wait(STEP_S)
        second = _ticks(stat)
    except (OSError, ValueError, IndexError):
        return None
    total = sum(second) - sum(first)
    idle = sum(second[3:5]) - sum(first[3:5])  # idle, and waiting for disks
    return None if total <= 0 else 1 - idle / total


def _ticks(stat: Path) -> list[int]:
    return [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
