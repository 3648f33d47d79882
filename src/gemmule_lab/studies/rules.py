"""What documents say: their files, the rules that most claims share, and the figures they printed.

``documents/<number>.toml`` has a document's claims and charts. A claim is ``text``, its ``rule`` in
words, and the cause of an outcome under the outcome's first word (``confirmed``, ``refuted``,
``differs``). Where two times decide it, ``times`` names both, ``is`` the condition, such as
``geomean > 1.02`` of how many times as fast the first is, case by case; ``rows`` says which.
"""

from __future__ import annotations

import functools
import json
import operator
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gemmule_lab.records.results import geomean
from gemmule_lab.studies.records import (
    CONFIRMED,
    DIFFERS,
    REFUTED,
    Claim,
    Judged,
    Rows,
    UnmeasuredError,
    pairs,
)

FOLDER = Path(__file__).parent
NO_GPU = "no figures of a GPU are on file"
NO_HEIGHTS = "no heights of blocks are on file"
NO_PAIR = "no size is on file for both the CPU and the GPU"
OUTCOMES = {outcome.split()[0]: outcome for outcome in (CONFIRMED, REFUTED, DIFFERS)}
STATISTICS: Mapping[str, Callable[[Collection[float]], float]] = {
    "geomean": geomean,
    "least": min,
    "most": max,
}
OPERATORS = {">": operator.gt, ">=": operator.ge, "<=": operator.le}

Judge = Callable[[Rows], Judged]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Judged])


@functools.cache
def document(number: str) -> Mapping[str, Any]:
    """Return a document's file: ``study``, ``claim`` by name, ``chart``."""
    text = (FOLDER / "documents" / f"{number}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@functools.cache
def published(number: str) -> Any:
    """Return a document's printed figures."""
    return json.loads((FOLDER / "published" / f"{number}.json").read_text(encoding="utf-8"))


class Claims:
    """What a document says, in the order of its file, each claim with what decides it.

    Rules of single claims are functions marked by `rule`; of the others the file has the times.
    """

    def __init__(self, number: str) -> None:
        self._listed = document(number)["claim"]
        self._judges: dict[str, Judge] = {
            name: functools.partial(by_times, one)
            for name, one in self._listed.items()
            if "times" in one
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
            Claim(
                name,
                one["text"],
                one["rule"],
                self._judges[name],
                {outcome: one[word] for word, outcome in OUTCOMES.items() if word in one},
            )
            for name, one in self._listed.items()
        )


def by_times(claim: Mapping[str, Any], rows: Rows) -> Judged:
    """Judge by how many times as fast one implementation is as another, case by case."""
    asked = {"backend": "cuda", "temperature": "warm", **claim["rows"]}
    least = asked.pop("least", 0)
    chosen = [row for row in rows.where(**asked) if int(row.case.get("n", 0)) >= least]
    ours, plain = claim["times"]
    ratios = list(needed(speedups(Rows(chosen), ours, plain)).values())
    statistic, compared, limit = claim["is"].split()
    value = STATISTICS[statistic](ratios)
    words = f"{spread(ratios)} times as fast: {ours} against {plain}"
    if statistic == "least":
        words += f"; faster in {sum(r > 1 for r in ratios)} of {len(ratios)}"
    return Judged(OPERATORS[compared](value, float(limit)), words, geomean(ratios))


def needed(found: T | None, why: str = NO_GPU) -> T:
    """Return what a rule needs; UnmeasuredError where it is None or empty."""
    if found is None or (isinstance(found, Collection) and not found):
        raise UnmeasuredError(why)
    return found


def counted(rows: Rows, *names: str) -> list[float]:
    """Return figures of a profiler; UnmeasuredError, with the reason that rows give, for none."""
    why = next((row.note for row in rows if row.note), NO_GPU)
    return [needed(rows.figure(name), why) for name in names]


def speedups(rows: Rows, ours: str, other: str) -> dict[str, float]:
    """Return, case by case, how many times as fast `ours` is as `other`."""
    return pairs(rows, other, ours)


def spread(ratios: Sequence[float]) -> str:
    """Return geometric mean, range and count in words.

    >>> spread([1.0, 4.0])
    '2.00 (1.00 to 4.00 over 2 cases)'
    """
    cases = "case" if len(ratios) == 1 else "cases"
    return (
        f"{geomean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} {cases})"
    )
