"""Rules that several verdicts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemmule_lab.records.results import geomean
from gemmule_lab.studies.records import Finding, Rows, decided, pairs, unmeasured

NO_GPU = "no figures of a GPU are on file"
NO_HEIGHTS = "no heights of blocks are on file"
NO_PAIR = "no size is on file for both the CPU and the GPU"
SAME = 0.02


def speedups(rows: Rows, ours: str, other: str) -> dict[str, float]:
    """Return, case by case, how many times as fast `ours` is as `other`."""
    return pairs(rows, other, ours)


def uncounted(counted: Rows) -> Finding:
    """Return the finding of a claim that counters decide, where these rows have none."""
    return unmeasured(next((row.note for row in counted if row.note), NO_GPU))


def of_ratios(
    ratios: Mapping[str, float], holds: bool, words: str, missing: str = NO_GPU
) -> Finding:
    """Return the finding of a rule over ratios: their geometric mean and range in words."""
    if not ratios:
        return unmeasured(missing)
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
    ratios = speedups(rows, tried, plain)
    mean = geomean(ratios.values()) if ratios else 0.0
    return of_ratios(ratios, mean <= 1 + SAME, f"{tried} against {plain}, times as fast:")


def gain(rows: Rows, better: str, plain: str) -> Finding:
    """Judge "it is faster": confirmed if `better` is faster by more than 2 % on average."""
    ratios = speedups(rows, better, plain)
    mean = geomean(ratios.values()) if ratios else 0.0
    return of_ratios(ratios, mean > 1 + SAME, f"{better} against {plain}, times as fast:")


def always(rows: Rows, better: str, plain: str) -> Finding:
    """Judge "it is faster every time": confirmed if no case has it slower."""
    ratios = speedups(rows, better, plain)
    wins = sum(r > 1 for r in ratios.values())
    return of_ratios(
        ratios,
        bool(ratios) and wins == len(ratios),
        f"{better} is faster than {plain} in {wins} of {len(ratios)} cases, times as fast:",
    )


def at_sizes(rows: Rows, least: int) -> Rows:
    """Return the rows of cases whose n is at least `least`."""
    kept = [row for row in rows if int(row.case.get("n", 0)) >= least]
    return Rows(kept, rows.environments)
