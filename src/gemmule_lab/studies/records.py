"""What a study writes down, what it claims, and how a claim is judged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        return key_of(
            self.backend, self.device, self.experiment, self.case, self.name, self.temperature
        )

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


def key_of(
    backend: str,
    device: str,
    experiment: str,
    case: Mapping[str, Value],
    name: str,
    temperature: str,
) -> str:
    """Return the key of a row with these fields."""
    return json.dumps([backend, device, experiment, dict(case), name, temperature], sort_keys=True)


class Rows(Sequence[StudyRow]):
    """The rows of one study, with the selections that verdicts are made of.

    Of rows with one key the last one counts, but one that only says why nothing was measured never
    takes the place of one that was.
    """

    def __init__(
        self, rows: Iterable[StudyRow], environments: Mapping[str, Environment] | None = None
    ) -> None:
        kept: dict[str, StudyRow] = {}
        for row in rows:
            key = row.key
            if row.measured or key not in kept or not kept[key].measured:
                kept[key] = row
        self._rows = tuple(kept.values())
        self.environments = dict(environments or {})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[StudyRow]:
        return iter(self._rows)

    def where(
        self,
        experiment: str | None = None,
        *,
        backend: str | None = None,
        name: str | None = None,
        temperature: str | None = None,
        **case: Value,
    ) -> Rows:
        """Return the rows that have all of the given values."""
        asked = {"experiment": experiment, "name": name, "backend": backend}
        found = list(self._rows)
        for field_name, value in {**asked, "temperature": temperature}.items():
            if value is not None:
                found = [row for row in found if getattr(row, field_name) == value]
        for key, size in case.items():
            found = [row for row in found if row.case.get(key) == size]
        return self._only(found)

    def timed(self) -> Rows:
        """Return the rows with times."""
        return self._only([row for row in self._rows if row.times_us is not None])

    def _only(self, some: list[StudyRow]) -> Rows:
        """Return some of these rows, whose keys differ and need not be made again."""
        rows = Rows((), self.environments)
        rows._rows = tuple(some)
        return rows

    def names(self) -> tuple[str, ...]:
        """Return the implementations, in the order of the file."""
        return tuple(dict.fromkeys(row.name for row in self._rows))

    def us(self) -> dict[str, float]:
        """Return case -> median microseconds, the case as JSON; of equal cases the last one."""
        return {case_key(row.case): row.us for row in self.timed()}

    def figure(self, name: str) -> float | None:
        """Return the first row's figure of this name, or None."""
        return next((row.figures[name] for row in self._rows if name in row.figures), None)

    def ceiling(self, name: str, backend: str) -> float | None:
        """Return the largest ceiling of this name among the environments of a back end."""
        values = [
            environment.ceilings[name].value
            for environment in self.environments.values()
            if environment.backend == backend and name in environment.ceilings
        ]
        return max(values, default=None)


def case_key(case: Mapping[str, Value]) -> str:
    """Return a case as text that sorts and compares."""
    return json.dumps(dict(case), sort_keys=True)


def pairs(rows: Rows, over: str, under: str) -> dict[str, float]:
    """Return, case by case, the time of `over` divided by the time of `under`."""
    above, below = rows.where(name=over).us(), rows.where(name=under).us()
    return {case: above[case] / below[case] for case in above if case in below}


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
    where rows lack what it needs. causes: by outcome, why it is so.
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
        return Finding(outcome, figure, self.causes.get(outcome, ""), value)
