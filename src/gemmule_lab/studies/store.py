"""Study rows on disk: a log that a study goes on with where it was stopped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gemmule.storage import evidence
from gemmule_lab.records import log
from gemmule_lab.records.rows import Environment
from gemmule_lab.studies.records import TEMPERATURES, Rows, StudyRow


def append(path: Path, items: Iterable[Environment | StudyRow]) -> None:
    """Append environments and rows; a line that a crash cut off is removed first."""
    log.append(path, "study", items)


def add(path: Path, newer: Rows, number: str) -> int:
    """Add rows to a study's file; return how many.

    No row on file is lost, and a row that only says why nothing was measured replaces none that
    was. Environments of rows that are replaced go.
    """
    here = read(path, number)
    both = Rows((*here, *newer), {**here.environments, **newer.environments})
    first = {row.environment: index for index, row in reversed(list(enumerate(both)))}
    ordered: list[Environment | StudyRow] = []
    for name in sorted(first, key=lambda name: first[name]):
        ordered += [both.environments[name], *(row for row in both if row.environment == name)]
    log.replace(path, "study", ordered)
    return len(newer)


def on_record(number: str) -> list[Path]:
    """Return the files of a study in the package's own evidence, a device each, largest first.

    They may be there packed, under longer names.
    """
    known = evidence.folder().glob(f"*/study-{number}.jsonl*")
    largest = sorted(known, key=lambda path: (-path.stat().st_size, path))
    return [path.with_name(f"study-{number}.jsonl") for path in largest]


def read(path: Path, number: str) -> Rows:
    """Return the rows of one study in a file; none where there is no file.

    ValueError as `gemmule_lab.records.log.read` raises it, and for a row of another.
    """

    def check(row: StudyRow) -> None:
        if row.seed != number:
            raise ValueError(f"the row is of document {row.seed!r}; the file is of {number}.")
        if row.temperature not in TEMPERATURES:
            known = ", ".join(TEMPERATURES)
            raise ValueError(f"temperature is {row.temperature!r}; one of {known}.")
        if row.times_us is not None:
            log.check_times(row.times_us)

    try:
        held = log.read(path, "study", StudyRow, check)
    except FileNotFoundError:
        return Rows(())
    return Rows(held.rows, held.environments)
