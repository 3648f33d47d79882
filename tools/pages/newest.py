"""The newest figures below the evidence folder: times and counters of the CUDA ladders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from counters.counters import FILE as COUNTERS
from counters.counters import SCHEMA, Counted
from counters.ladder_times import FILE as LADDER
from gemmule.storage import lines
from gemmule_lab.records import results
from gemmule_lab.records.rows import Environment, Row

MAX_FILE_BYTES = 4 << 20


def ladder_rows(evidence: Path) -> tuple[Mapping[str, Environment], tuple[Row, ...]]:
    """Return environments and rows of the newest file below a folder; none where there is none."""
    best: results.Results | None = None
    for path in sorted(evidence.glob(f"*/{LADDER}")):
        found = results.read(path)
        if best is None or _when(found) > _when(best):
            best = found
    return ({}, ()) if best is None else (best.environments, best.rows)


def _when(found: results.Results) -> str:
    return max((e.timestamp for e in found.environments.values()), default="")


def counters(evidence: Path) -> list[Counted]:
    """Return the counters of the newest file below an evidence folder, malformed lines left out."""
    newest: list[Counted] = []
    for path in sorted(evidence.glob(f"*/{COUNTERS}")):
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES:,} bytes; count anew.")
        found = list(lines.read_records(path, SCHEMA, Counted))
        if max((o.date for o in found), default="") > max((o.date for o in newest), default=""):
            newest = found
    return newest
