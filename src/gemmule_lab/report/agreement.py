"""Two files of the same measurements: on how many rows do they agree?

What a rerun repeats is a ratio to a peer of the same run, for both sides of it saw the same clocks;
times of different runs differ by more. A file of results or of a study is taken, each with its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemmule_lab.records import distributed, log, results

RATIOS_WITHIN, TIMES_WITHIN = 0.02, 0.03
MOST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity of both files, `what` in words; times in microseconds, or ratios."""

    what: str
    old: float
    new: float

    @property
    def apart(self) -> float:
        """How far the larger lies above the smaller, as a share: 0.03 for 3 %."""
        return max(self.old, self.new) / min(self.old, self.new) - 1.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two files share: times and ratios, in the order of the new file."""

    times: tuple[Pair, ...]
    ratios: tuple[Pair, ...]

    def lines(self) -> list[str]:
        """Return the agreement in words, the farthest pairs last."""
        found = [_share("times", self.times, TIMES_WITHIN)]
        if self.ratios:
            found.append(_share("ratios to a peer of the same run", self.ratios, RATIOS_WITHIN))
        farthest = sorted(self.ratios or self.times, key=lambda pair: -pair.apart)[:MOST_SHOWN]
        found += [f"  {p.old:.4g} -> {p.new:.4g} ({p.apart:.1%}): {p.what}" for p in farthest]
        return found


def within(pairs: Iterable[Pair], limit: float) -> float:
    """Return the share of pairs that lie no farther apart than `limit`.

    >>> within([Pair("a", 100.0, 101.0), Pair("b", 100.0, 110.0)], 0.02)
    0.5
    """
    apart = [pair.apart for pair in pairs]
    return sum(a <= limit for a in apart) / len(apart) if apart else 0.0


def agreement(old: Path, new: Path) -> Agreement:
    """Compare two result files, or two files of one study, by their medians.

    ValueError where they share no row.
    """
    (before, earlier), (after, later) = _figures(old), _figures(new)
    times = _pairs(before, after)
    if not times:
        raise ValueError(f"{old} and {new} share no row: they measured different things.")
    return Agreement(times, _pairs(earlier, later))


def _pairs(old: Mapping[str, float], new: Mapping[str, float]) -> tuple[Pair, ...]:
    return tuple(Pair(_words(key), old[key], value) for key, value in new.items() if key in old)


def _share(what: str, pairs: tuple[Pair, ...], limit: float) -> str:
    share = within(pairs, limit)
    return f"{what} within {limit:.0%}: {share:.1%} of {len(pairs)} rows"


def _figures(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Return times by the keys of rows, and their ratios to peers; a study keeps times alone."""
    first = log.first_row(path)
    if first.get("line") == distributed.KIND:
        raise ValueError(
            f"{path} holds products of several processes, which --against does not compare; "
            "without it `gemmule report` prints their tables."
        )
    if first.get("line") == "study":
        from gemmule_lab.studies import store

        # A choice that falls on another rung than before is another kernel, and repeats nothing.
        return {
            json.dumps([str(row.params.get("rung", "")), json.loads(row.key)]): row.us
            for row in store.read(path, str(first["seed"])).timed()
        }, {}
    rows = results.read(path).rows
    return {row.key: row.times_us.median for row in rows}, {
        json.dumps([json.loads(row.key), peer]): speedup.value
        for row in rows
        for peer, speedup in row.speedups.items()
    }


def _words(key: str) -> str:
    """Return what of a row's key tells it apart, short enough for a line."""
    flat: list[str] = []

    def walk(value: object) -> None:
        if isinstance(value, dict):
            flat.extend(f"{k} {v}" for k, v in value.items() if isinstance(v, int | str))
        elif isinstance(value, list):
            for item in value:
                walk(item)
        else:
            flat.append(str(value))

    walk(json.loads(key))
    text = ", ".join(flat[-5:])
    return text if len(text) <= 120 else f"...{text[-117:]}"
