"""What a study writes down, what it claims, and how a claim is judged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gemmule_lab.records.rows import Environment, Times

Value = str | int | float | bool
Outcome = Literal["confirmed", "refuted", "differs on this device", "not measurable here"]
CONFIRMED: Outcome = "confirmed"
REFUTED: Outcome = "refuted"
DIFFERS: Outcome = "differs on this device"
NOT_MEASURABLE: Outcome = "not measurable here"
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


class Judged(NamedTuple):
    """Whether a claim holds by its rule, our figure in words, and the number that it turns on."""

    holds: bool
    figure: str
    value: float = math.nan


class Finding(NamedTuple):
    """The outcome of a claim, our figure in words, why it is so, and the figure's number."""

    outcome: Outcome
    figure: str
    cause: str = ""
    value: float = math.nan


class UnmeasuredError(Exception):
    """These rows cannot decide a claim; the words say why."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that a document says.

    rule: how it is decided, in words: "refuted unless ...", or "differs unless ..." of what a
    document says of its own devices. ``decide(rows)`` is that rule; it raises `UnmeasuredError`
    where rows lack what it needs. causes: by an outcome's first word, why it is so.
    """

    id: str
    text: str
    rule: str
    decide: Callable[[Rows], Judged]
    causes: Mapping[str, str]

    def judge(self, rows: Rows) -> Finding:
        """Return what these rows say of the claim."""
        try:
            holds, figure, value = self.decide(rows)
        except UnmeasuredError as why:
            return Finding(NOT_MEASURABLE, str(why))
        failed = DIFFERS if self.rule.startswith("differs") else REFUTED
        outcome = CONFIRMED if holds else failed
        return Finding(outcome, figure, self.causes.get(outcome.split()[0], ""), value)
