"""Waiting for a machine that is quiet enough to be measured, and measuring again where it was not.

Blocks are marked, never dropped; but a product of whose blocks most were disturbed says more about
the neighbours than about the code, and may be measured once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gemmule_lab.harness.neighbours import BUSY_SHARE
from gemmule_lab.records.rows import Row

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
    """Return the share of rows that other programs disturbed."""
    return sum(row.disturbed for row in rows) / len(rows) if rows else 0.0
