"""What documents say: claims from their files, shared rules, and the figures they printed."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gemmule_lab.records.results import geomean
from gemmule_lab.studies.records import Claim, Finding, Rows, UnmeasuredError, decided, pairs

CLAIMS, PUBLISHED = (Path(__file__).parent / name for name in ("claims", "published"))
NO_GPU = "no figures of a GPU are on file"
NO_HEIGHTS = "no heights of blocks are on file"
NO_PAIR = "no size is on file for both the CPU and the GPU"
SAME = 0.02

Judge = Callable[[Rows], Finding]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Finding])


class Claims:
    """What a document says, in the order of its file, each claim with the rule that decides it.

    Rules of single claims are functions marked by `rule`. Of the others the file names the shared
    rule, and the experiment and the two implementations that it is about.
    """

    def __init__(self, number: str) -> None:
        path = CLAIMS / f"{number}.toml"
        self._listed: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        self._judges = {name: _shared(one) for name, one in self._listed.items() if "shared" in one}

    def rule(self, name: str, *given: Any) -> Callable[[F], F]:
        """Mark what decides a claim; it is called with the rows and with what is given here."""

        def mark(judge: F) -> F:
            self._judges[name] = lambda rows: judge(rows, *given)
            return judge

        return mark

    def all(self) -> tuple[Claim, ...]:
        """Return every claim; KeyError for one that nothing decides."""
        return tuple(
            Claim(name, one["text"], one["rule"], self._judges[name])
            for name, one in self._listed.items()
        )


def _shared(one: Mapping[str, Any]) -> Judge:
    def judge(rows: Rows) -> Finding:
        warm = rows.where(one["experiment"], backend="cuda", temperature="warm")
        kept = [row for row in warm if int(row.case.get("n", 0)) >= one.get("least", 0)]
        return RULES[one["shared"]](Rows(kept, rows.environments), one["ours"], one["plain"])

    return judge


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


def of_ratios(ratios: Mapping[str, float], holds: bool, words: str) -> Finding:
    """Return the finding of a rule over ratios: their geometric mean and range in words."""
    return decided(holds, f"{words} {spread(list(ratios.values()))}")


def spread(ratios: Sequence[float]) -> str:
    """Return geometric mean, range and count in words.

    >>> spread([1.0, 4.0])
    '2.00 (1.00 to 4.00 over 2 cases)'
    """
    cases = "case" if len(ratios) == 1 else "cases"
    return (
        f"{geomean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} {cases})"
    )


def no_gain(rows: Rows, tried: str, plain: str) -> Finding:
    """Judge "it brings no gain": confirmed unless `tried` is faster by more than 2 % on average."""
    return _by_mean(rows, tried, plain, faster=False)


def gain(rows: Rows, better: str, plain: str) -> Finding:
    """Judge "it is faster": confirmed if `better` is faster by more than 2 % on average."""
    return _by_mean(rows, better, plain, faster=True)


def _by_mean(rows: Rows, ours: str, plain: str, *, faster: bool) -> Finding:
    ratios = needed(speedups(rows, ours, plain))
    holds = (geomean(ratios.values()) > 1 + SAME) == faster
    return of_ratios(ratios, holds, f"{ours} against {plain}, times as fast:")


def always(rows: Rows, better: str, plain: str) -> Finding:
    """Judge "it is faster every time": confirmed if no case has it slower."""
    ratios = needed(speedups(rows, better, plain))
    wins = sum(r > 1 for r in ratios.values())
    words = f"{better} is faster than {plain} in {wins} of {len(ratios)} cases, times as fast:"
    return of_ratios(ratios, wins == len(ratios), words)


RULES: Mapping[str, Callable[[Rows, str, str], Finding]] = {
    "no gain": no_gain,
    "gain": gain,
    "always": always,
}

BITS = {"torch": 16, "fp16": 16, "int8": 8, "int4": 4}


@functools.cache
def published(number: str) -> Any:
    """Return a document's printed figures."""
    return json.loads((PUBLISHED / f"{number}.json").read_text(encoding="utf-8"))


def formula_bytes(n: int, bits: int) -> float:
    """Return the bytes that document 003's bandwidth counts: matrix, float16 vector and result.

    >>> formula_bytes(512, 16)
    526336.0
    """
    return n * n * bits / 8 + 2 * 2 * n


def formula_gbs(n: int, bits: int, ns: float) -> float:
    """Return document 003's bandwidth: those bytes over nanoseconds, in GB/s."""
    return formula_bytes(n, bits) / ns
