"""How far the heuristics' choices are from the fastest configuration that tuning finds.

For each problem the default and the best challenger are timed in one interleaved run, on samples
that the search for the challenger has not seen; nothing is stored, and nothing stored is used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gemmule.core.caches import forget_plans
from gemmule.core.problem import Problem
from gemmule.settings import without_tuning
from gemmule.tuning.outcomes import TuneReport
from gemmule.tuning.tuner import Request, decisive, tune_problem
from gemmule_lab.records.results import geomean
from gemmule_lab.report.tables import TableData, significant
from gemmule_lab.tune.requests import Matrix, problem_of, sizes_of

# op, sizes, dtype, and for quantised matrices the bits: what users multiply, of all kinds.
REPRESENTATIVE: tuple[tuple[str, str, str, int | None], ...] = (
    ("matvec", "384x384", "float32", None),
    ("matvec", "1024x4096", "float32", None),
    ("matvec", "4096x4096", "float32", None),
    ("matvec", "2048x2048", "float64", None),
    ("matvec", "4096x4096", "float16", None),
    ("matvec", "11008x4096", "bfloat16", None),
    ("matvec", "4096x4096", "int8", None),
    ("vecmat", "384x384", "float32", None),
    ("vecmat", "4096x4096", "float32", None),
    ("vecmat", "2048x8192", "float64", None),
    ("vecmat", "4096x4096", "float16", None),
    ("vecmat", "4096x11008", "bfloat16", None),
    ("matmul", "512x512x512", "float32", None),
    ("matmul", "4096x4096x8", "float64", None),
    ("matmul", "512x512x512", "float16", None),
    ("matmul", "512x512x512", "int8", None),
    ("matvec", "4096x4096", "float32", 8),
    ("matvec", "4096x4096", "float32", 4),
    ("matvec", "11008x4096", "float32", 4),
    ("vecmat", "4096x4096", "float32", 4),
    ("matmul", "4096x4096x16", "float32", 8),
    ("matmul", "4096x4096x16", "float32", 4),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One problem. off: time of the default over the tuned one's; 1 where the default stays."""

    problem: Problem
    default: str
    tuned: str
    default_s: float | None
    tuned_s: float | None
    off: float
    disturbed: float = 0.0


def representative(device: str = "cpu") -> list[Problem]:
    """Return the problems that are compared where none are named."""
    return [
        problem_of(op, sizes_of(sizes, op), dtype, Matrix(device, bits=bits))
        for op, sizes, dtype, bits in REPRESENTATIVE
    ]


def comparison(report: TuneReport) -> Comparison:
    """Return what a tuning run says of the default: only a gain beyond the noise counts."""
    gain = report.gain
    won = gain is not None and report.changed and decisive(gain.inverse())
    return Comparison(
        report.problem,
        report.default.name,
        report.winner.name if won and report.winner is not None else "the default",
        report.default_s,
        report.winner_s,
        gain.value if won and gain is not None else 1.0,
        report.disturbed,
    )


def compare(
    problems: Sequence[Problem],
    device: str,
    seconds: float,
    done: Callable[[Comparison], None] = lambda found: None,
) -> list[Comparison]:
    """Tune every problem for so many seconds, storing nothing; `done` is told of each."""
    found = []
    with _nothing_stored(), tempfile.TemporaryDirectory() as folder:
        for problem in problems:
            report = tune_problem(problem, Request(device, seconds, root=Path(folder)))
            found.append(comparison(report))
            done(found[-1])
    return found


@contextmanager
def _nothing_stored() -> Iterator[None]:
    """Have plans ignore what earlier tuning stored."""
    with without_tuning():
        forget_plans()
        try:
            yield
        finally:
            forget_plans()


def table(found: Sequence[Comparison]) -> TableData:
    """Return one line per problem and the geometric mean of what the defaults lose."""
    body = []
    for one in found:
        times = [f"{significant(s * 1e6)}" if s else "" for s in (one.default_s, one.tuned_s)]
        busy = f"busy in {one.disturbed:.0%} of the blocks" if one.disturbed > 0.5 else ""
        body.append(
            (
                one.problem.describe(),
                one.default,
                times[0],
                one.tuned,
                times[1],
                f"{one.off:.3f}",
                busy,
            )
        )
    body.append(("geometric mean", "", "", "", "", f"{mean(found):.3f}", ""))
    header = ("product", "default", "us", "tuned", "us", "default / tuned", "remarks")
    numeric = (False, False, True, False, True, True, False)
    return TableData("heuristics against tuning", header, tuple(body), numeric)


def mean(found: Sequence[Comparison]) -> float:
    """Return the geometric mean of the defaults' times over the tuned ones'."""
    return geomean(one.off for one in found)
