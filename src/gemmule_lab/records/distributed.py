"""What ``gemmule bench --suite distributed`` wrote: a row for each way of a product."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gemmule_lab.records import log
from gemmule_lab.records.rows import Times

KIND = "distributed"


@dataclass(frozen=True, slots=True)
class DistributedRow:
    """One way of one product, timed.

    over_alone: its time over that of the process's own rows alone. sent_bytes, messages: of one
    process, for one product, on paper. topology: how GPUs are linked.
    """

    environment: str
    way: str
    n: int
    dtype: str
    world: int
    transport: str
    topology: str
    times_us: Times
    over_alone: float
    sent_bytes: int
    messages: int


def read(path: Path) -> log.Log[DistributedRow]:
    """Read and check what a run wrote; ValueError as `gemmule_lab.records.log.read` raises it."""
    return log.read(path, KIND, DistributedRow, lambda row: log.check_times(row.times_us))
