"""Two runs of the same products: what became faster, slower, stayed the same, or is undecided.

What a rerun repeats is a ratio to a peer of the same run, for both sides of it saw the same clocks.
So where both runs timed one release of a peer, how far ahead of it ours is decides; otherwise the
time itself does, which differs by more. A verdict rests on both runs' intervals, widened by what
quiet reruns differ by, and never on rows that other programs disturbed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmule.timing.sampler import CONFIDENCE, FEWEST_PAIRS
from gemmule_lab.records import distributed, log, results, study
from gemmule_lab.records.rows import Speedup, Times
from gemmule_lab.report.claims import REPEATS_WITHIN, races, verdict
from gemmule_lab.report.tables import TableData, counted, markdown, significant

TIMES_WITHIN = 0.03
NOTCH = 1.57  # half a median's 95 % interval, in quartile distances over the root of the count
VERDICTS = ("slower", "faster", "same", "undecided")


@dataclass(frozen=True, slots=True)
class Timed:
    """One row of a run. versions: of the packages that its peers are of."""

    what: str
    times: Times
    speedups: Mapping[str, Speedup] = field(default_factory=dict)
    sound: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """One product of both runs: its figures, how many times as fast it is now, and how surely.

    unit: ``us``, or ``x`` a peer. low, high: the ends of the change's interval; None without one.
    """

    what: str
    unit: str
    old: float
    new: float
    ends: tuple[float, float] | None

    @property
    def faster(self) -> float:
        """How many times as fast as before."""
        return self.old / self.new if self.unit == "us" else self.new / self.old

    @property
    def apart(self) -> float:
        """How far the larger lies above the smaller, as a share: 0.03 for 3 %."""
        return max(self.faster, 1 / self.faster) - 1.0

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``same`` or ``undecided``."""
        margin = TIMES_WITHIN if self.unit == "us" else REPEATS_WITHIN
        return "undecided" if self.ends is None else verdict(*self.ends, margin)


def within(found: Sequence[Change], limit: float) -> float:
    """Return the share of changes of no more than `limit`."""
    return sum(one.apart <= limit for one in found) / len(found) if found else 0.0


def changes(old: Path, new: Path) -> list[Change]:
    """Compare two result files, or two files of one study, product by product.

    ValueError where they share none.
    """
    before, after = dict(_timed(old)), dict(_timed(new))
    found = [_change(before[key], one) for key, one in after.items() if key in before]
    if not found:
        raise ValueError(f"{old} and {new} share no product: they measured different things.")
    return found


def _change(old: Timed, new: Timed) -> Change:
    sound = old.sound and new.sound
    peers = [
        name
        for name, one in new.speedups.items()
        if name in old.speedups
        and min(one.confidence, old.speedups[name].confidence) >= CONFIDENCE
        and _package(name, old) == _package(name, new)
    ]
    if peers:
        name = min(peers, key=lambda name: sum(_halves(old.speedups[name], new.speedups[name])))
        a, b = old.speedups[name], new.speedups[name]
        low, high = _halves(a, b)
        ends = _around(b.value / a.value, low, high) if sound else None
        return Change(new.what, f"x {name}", a.value, b.value, ends)
    a_us, b_us, ends = old.times.median, new.times.median, None
    if sound and min(old.times.n, new.times.n) >= FEWEST_PAIRS:
        half = math.hypot(
            *(NOTCH * (t.q3 - t.q1) / t.median / t.n**0.5 for t in (old.times, new.times))
        )
        ends = _around(a_us / b_us, half, half)
    return Change(new.what, "us", a_us, b_us, ends)


def _halves(old: Speedup, new: Speedup) -> tuple[float, float]:
    """Return both halves of the interval of new over old, in the logarithm."""
    low = math.hypot(math.log(new.value / new.low), math.log(old.high / old.value))
    return low, math.hypot(math.log(new.high / new.value), math.log(old.value / old.low))


def _around(value: float, low: float, high: float) -> tuple[float, float]:
    return value * math.exp(-low), value * math.exp(high)


def _package(peer: str, one: Timed) -> str | None:
    """Return the release of the package that a peer is of, None where the run does not tell."""
    found = re.match(r"\w+", peer)
    return one.versions.get(found[0]) if found else None


def _timed(path: Path) -> Iterator[tuple[str, Timed]]:
    """Yield our rows by what both runs call the same; of a default, whichever rung it chose."""
    first = log.first_row(path)
    if first.get("line") == distributed.KIND:
        raise ValueError(
            f"{path} holds products of several processes, which --against does not compare; "
            "without it `gemmule report` prints their tables."
        )
    if first.get("line") == "study":
        yield from _timed_study(path, str(first["seed"]))
        return
    held = results.read(path)
    for race in races(held.rows):
        ours = [row for row in race if row.kind == "rung"]
        disturbed = any(row.disturbed for row in race)
        for row in ours:
            chosen = len(ours) == 1 and not row.named
            what = f"{row.group or row.problem.describe()}, {row.temperature}"
            key = [what, "" if chosen else f"{row.name} {sorted(row.params.items())}"]
            what = what if chosen else f"{what}: {row.name}"
            versions = held.environments[row.environment].versions
            yield json.dumps(key), Timed(what, row.times_us, row.speedups, not disturbed, versions)


def _timed_study(path: Path, number: str) -> Iterator[tuple[str, Timed]]:
    for row in study.read(path, number).timed():
        if row.times_us is not None:
            case = ", ".join(f"{name}={value}" for name, value in row.case.items())
            what = f"{row.experiment}: {row.name}, {case}, {row.temperature}"
            # A choice that falls on another rung than before is another kernel: nothing repeats.
            yield json.dumps([str(row.params.get("rung", "")), row.key]), Timed(what, row.times_us)


def pull_request(found: Sequence[Change], old: Path, new: Path) -> str:
    """Return the outcome as Markdown: a sentence, then what changed, the largest changes first."""
    many = {name: sum(one.verdict == name for one in found) for name in VERDICTS}
    head = ", ".join(f"{number} {name}" for name, number in many.items())
    sentence = f"**{head}** of {counted(len(found), 'product', 'products')}: {new} against {old}."
    moved = [one for name in VERDICTS[:2] for one in _largest(found, name)]
    if not moved:
        return sentence
    figures = [(_figure(one, one.old), _figure(one, one.new)) for one in moved]
    body = tuple(
        (one.what, *both, f"{one.faster:.2f}x", one.verdict)
        for one, both in zip(moved, figures, strict=True)
    )
    header = ("product", "before", "now", "times as fast as before", "verdict")
    return (
        f"{sentence}\n\n{markdown(TableData('', header, body, (False, True, True, True, False)))}"
    )


def _largest(found: Sequence[Change], name: str) -> list[Change]:
    return sorted((one for one in found if one.verdict == name), key=lambda one: -one.apart)


def _figure(change: Change, value: float) -> str:
    return f"{significant(value)} us" if change.unit == "us" else f"{value:.2f}{change.unit}"
