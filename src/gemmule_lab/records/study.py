"""Rows of the studies of published experiments: on disk a log, read with what selects among them.

A study goes on with its log where it was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemmule.storage import evidence
from gemmule_lab.records import log
from gemmule_lab.records.rows import Environment, Times

Value = str | int | float | bool
TEMPERATURES = ("warm", "cold", "once")
FIELDS = ("experiment", "backend", "name", "temperature")  # of a row, that are asked for


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One figure of a study: an implementation on one case, timed or counted.

    case: what was computed (sizes, which of several matrices); temperature: ``warm`` (one set of
    operands again and again), ``cold`` (sets rotate past the cache) or ``once`` (host times of
    single runs, counters). times_us is None where nothing was timed; then `note` says why, or
    `figures` holds what was counted. seed: the document's number, as files call it.
    """

    seed: str
    experiment: str
    environment: str
    device: str
    backend: str
    case: Mapping[str, str | int | float | bool]
    name: str
    kind: str
    temperature: str
    params: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    times_us: Times | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def key(self) -> str:
        """What makes two rows the same measurement, whenever it was made."""
        where = (self.backend, self.device, self.experiment, dict(self.case))
        return key_of(*where, self.name, self.temperature)

    @property
    def measured(self) -> bool:
        """Whether the row holds a time or a figure, not only a note that says why not."""
        return self.times_us is not None or bool(self.figures)

    @property
    def us(self) -> float:
        """Median microseconds; ValueError where nothing was timed."""
        if self.times_us is None:
            raise ValueError(f"{self.name} on {dict(self.case)} was not timed: {self.note}")
        return self.times_us.median


def key_of(*fields: Any) -> str:
    """Return the key of a row: of back end, device, experiment, case, name and temperature."""
    return json.dumps(fields, sort_keys=True)


class Rows(tuple[StudyRow, ...]):
    """The rows of one study, with the selections that verdicts are made of.

    Of rows with one key the last one counts, but one that only says why nothing was measured never
    takes the place of one that was.
    """

    environments: Mapping[str, Environment]

    def __new__(
        cls, rows: Iterable[StudyRow], environments: Mapping[str, Environment] | None = None
    ) -> Rows:
        """Keep the rows that count."""
        kept: dict[str, StudyRow] = {}
        for row in rows:
            key = row.key
            if row.measured or key not in kept or not kept[key].measured:
                kept[key] = row
        made = super().__new__(cls, kept.values())
        made.environments = dict(environments or {})
        return made

    def only(self, some: Iterable[StudyRow]) -> Rows:
        """Return some of these rows, whose keys differ and need not be made again."""
        made = tuple.__new__(Rows, some)
        made.environments = self.environments
        return made

    def where(self, experiment: str | None = None, **asked: Value | None) -> Rows:
        """Return the rows with all of these values, of their fields or of their case."""
        found: Iterable[StudyRow] = self
        for name, value in {"experiment": experiment, **asked}.items():
            if value is None:
                continue
            if name in FIELDS:
                found = [row for row in found if getattr(row, name) == value]
            else:
                found = [row for row in found if row.case.get(name) == value]
        return self.only(found)

    def timed(self) -> Rows:
        """Return the rows with times."""
        return self.only(row for row in self if row.times_us is not None)

    def names(self) -> tuple[str, ...]:
        """Return the implementations, in the order of the file."""
        return tuple(dict.fromkeys(row.name for row in self))

    def us(self, part: str = "") -> dict[str, float]:
        """Return case -> median microseconds, or a part of them, the case as JSON."""
        if part:
            return {case_key(row.case): row.figures[part] for row in self if part in row.figures}
        return {case_key(row.case): row.us for row in self.timed()}

    def faster(self, ours: str, other: str, part: str = "") -> dict[str, float]:
        """Return, case by case, how many times as fast `ours` is as `other`."""
        mine, theirs = (self.where(name=name).us(part) for name in (ours, other))
        return {case: theirs[case] / mine[case] for case in theirs if case in mine}

    def figure(self, name: str) -> float | None:
        """Return the first row's figure of this name, or None."""
        return next((row.figures[name] for row in self if name in row.figures), None)

    def ceiling(self, name: str, backend: str) -> float | None:
        """Return the largest ceiling of this name among the environments of a back end."""
        known = [e.ceilings for e in self.environments.values() if e.backend == backend]
        return max((one[name].value for one in known if name in one), default=None)


def case_key(case: Mapping[str, Value]) -> str:
    """Return a case as text that sorts and compares."""
    return json.dumps(dict(case), sort_keys=True)


def of_last_devices(rows: Rows) -> Rows:
    """Return the rows of the last CPU and the last GPU on file, which verdicts are made of."""
    last = {row.backend: row.device for row in rows}
    kept = [row for row in rows if row.device == last[row.backend]]
    environments = {k: e for k, e in rows.environments.items() if e.device in last.values()}
    return Rows(kept, environments)


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
    """Return the files of a study in the package's own evidence, a device each.

    First those with the most experiments, then the larger ones. They may be there packed, under
    longer names.
    """
    found = evidence.folder().glob(f"*/study-{number}.jsonl*")
    known = {path.with_name(f"study-{number}.jsonl"): path.stat().st_size for path in found}
    if len(known) < 2:
        return [*known]

    def order(path: Path) -> tuple[int, int, Path]:
        experiments = {row.experiment for row in read(path, number)}
        return -len(experiments), -known[path], path

    return sorted(known, key=order)


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
