"""What documents say: their files, how a claim is judged, and the rules that most claims share.

``documents/<number>.toml`` has what a document asks and printed, and its claims: each with its
``text``, its ``rule`` in words, and the cause of an outcome under the outcome's first word
(``confirmed``, ``refuted``, ``differs``). Where times of pairs of implementations decide it,
``times`` has the pairs and ``is`` the condition, such as ``geomean > 1.02``, on how many times as
fast the first of each is, case by case; ``rows``, of the claim or else of the study, says which
rows, with ``least`` and ``most`` of n and ``part`` of a time; a pair may ask for others. What is
only told: times of the rows ``shown``, and pairs of ``told`` behind their words, where on file. Of
what follows from the document alone the file says whether it ``holds``, and the ``figure``.
"""

from __future__ import annotations

import functools
import math
import operator
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from gemmule_lab.records.results import geomean
from gemmule_lab.records.study import Rows

Outcome = Literal["confirmed", "refuted", "differs on this device", "not measurable here"]
CONFIRMED: Outcome = "confirmed"
REFUTED: Outcome = "refuted"
DIFFERS: Outcome = "differs on this device"
NOT_MEASURABLE: Outcome = "not measurable here"
NO_GPU = "no figures of a GPU are on file"
NO_PAIR = "no size is on file for both the CPU and the GPU"
STATISTICS: Mapping[str, Callable[[Collection[float]], float]] = {
    "geomean": geomean,
    "least": min,
    "most": max,
}
EVERY: Mapping[str, Any] = {}
OPERATORS = {"<": operator.lt, ">": operator.gt, ">=": operator.ge, "<=": operator.le}

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Judged]")


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


@functools.cache
def document(number: str) -> Mapping[str, Any]:
    """Return a document's file: ``study``, ``claim`` by name, ``printed``."""
    path = Path(__file__).parent / "documents" / f"{number}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


class Claims:
    """What a document says, in the order of its file, each claim with what decides it.

    Rules of single claims are functions marked by `rule`; of the others the file has the times.
    """

    def __init__(self, number: str) -> None:
        self._listed, rows = document(number)["claim"], document(number)["study"].get("rows")
        self._judges: dict[str, Callable[[Rows], Judged]] = {
            name: functools.partial(by_times if "times" in one else settled, {"rows": rows, **one})
            for name, one in self._listed.items()
            if {"times", "holds"} & {*one}
        }

    def rule(self, name: str, *given: Any) -> Callable[[F], F]:
        """Mark what decides a claim; it is called with the rows and with what is given here."""

        def mark(judge: F) -> F:
            self._judges[name] = lambda rows: judge(rows, *given)
            return judge

        return mark

    def all(self) -> tuple[Claim, ...]:
        """Return every claim; KeyError for one that nothing decides."""
        return tuple(
            Claim(name, one["text"], one["rule"], self._judges[name], one)
            for name, one in self._listed.items()
        )


def settled(claim: Mapping[str, Any], rows: Rows) -> Judged:
    """Return what no measurement can change."""
    return Judged(claim["holds"], claim["figure"])


def by_times(claim: Mapping[str, Any], rows: Rows) -> Judged:
    """Judge by how many times as fast one implementation of each pair is as the other.

    Every pair fulfils the condition; those of rows of their own need not be on file.
    """
    words, statistics, means = [], [], []
    statistic, *condition = claim["is"].split()
    for ours, plain, *more in claim["times"]:
        ratios = _ratios(claim["rows"], rows, ours, plain, *more)
        if more and not ratios:
            continue
        statistics.append(STATISTICS[statistic](needed(ratios)))
        means.append(geomean(ratios))
        kept = f", {' '.join(map(str, more[0].values()))}" if more else ""
        words.append(f"{spread(ratios)} times as fast: {ours} against {plain}{kept}")
        if statistic == "least":
            words[-1] += f"; faster in {sum(r > 1 for r in ratios)} of {len(ratios)}"
        if "shown" in claim:
            here = rows.where(**{**claim["rows"], **claim["shown"]})
            us = [f"{one.us:,.0f}" for name in (plain, ours) for one in here.where(name=name)]
            words[-1] += f"; us at {claim['shown']['n']}: {' to '.join(us)}"
    for what, *pair in claim.get("told", ()):
        if ratios := _ratios(claim["rows"], rows, *pair):
            words.append(f"{what} {spread(ratios)}")
    holds = all(
        OPERATORS[compared](value, float(limit))
        for value in statistics
        for compared, limit in zip(condition[::2], condition[1::2], strict=True)
    )
    return Judged(holds, "; ".join(words), min(needed(means)))


def _ratios(
    asked: Mapping[str, Any], rows: Rows, ours: str, plain: str, more: Mapping[str, Any] = EVERY
) -> list[float]:
    asked = {"backend": "cuda", "temperature": "warm", **asked, **more}
    least, most, part = (asked.pop(key, None) for key in ("least", "most", "part"))
    chosen = rows.where(**asked)
    kept = (r for r in chosen if (least or 0) <= int(r.case.get("n", 0)) <= (most or 1 << 62))
    return list(chosen.only(kept).faster(ours, plain, part or "").values())


def needed(found: T | None, why: str = NO_GPU) -> T:
    """Return what a rule needs; UnmeasuredError where it is None or empty."""
    if found is None or (isinstance(found, Collection) and not found):
        raise UnmeasuredError(why)
    return found


def counted(rows: Rows, *names: str) -> list[float]:
    """Return figures of a profiler; UnmeasuredError, with the reason that rows give, for none."""
    why = next((row.note for row in rows if row.note), NO_GPU)
    return [needed(rows.figure(name), why) for name in names]


def text(value: float | None, form: str, scale: float = 1.0) -> str:
    """Return a figure as a table has it; empty for none."""
    return "" if value is None else format(scale * value, form)


def share(value: float | None, whole: float | None, decimals: int = 0) -> str:
    """Return a figure as percent of another; empty where there is none."""
    return f"{100 * value / whole:.{decimals}f} %" if value is not None and whole else ""


def spread(ratios: Collection[float]) -> str:
    """Return geometric mean, range and count in words.

    >>> spread([1.0, 4.0])
    '2.00 (1.00 to 4.00 over 2 cases)'
    """
    cases = "case" if len(ratios) == 1 else "cases"
    ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{geomean(ratios):.2f} ({ends} over {len(ratios)} {cases})"
