"""How far the heuristics' choices are from the fastest configuration that tuning finds.

For each problem the default and the best challenger are timed in one interleaved run, on samples
that the search for the challenger has not seen; nothing is stored, and nothing stored is used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gemmule.core.caches import forget_plans
from gemmule.core.problem import Problem
from gemmule.settings import without_tuning
from gemmule.tuning.outcomes import TuneReport
from gemmule.tuning.tuner import Request, decisive, tune_problem
from gemmule_lab.progress import working
from gemmule_lab.records.results import geomean
from gemmule_lab.report.render import print_table
from gemmule_lab.report.tables import TableData, significant
from gemmule_lab.tune.requests import Matrix, plainly, problem_of, sizes_of

# Operation, dtype, and of quantised matrices the bits -> sizes: what users multiply, of all kinds.
REPRESENTATIVE: dict[tuple[str, str, int | None], str] = {
    ("matvec", "float32", None): "384x384 1024x4096 4096x4096",
    ("matvec", "float64", None): "2048x2048",
    ("matvec", "float16", None): "4096x4096",
    ("matvec", "bfloat16", None): "11008x4096",
    ("matvec", "int8", None): "4096x4096",
    ("vecmat", "float32", None): "384x384 4096x4096",
    ("vecmat", "float64", None): "2048x8192",
    ("vecmat", "float16", None): "4096x4096",
    ("vecmat", "bfloat16", None): "4096x11008",
    ("matmul", "float32", None): "512x512x512",
    ("matmul", "float64", None): "4096x4096x8",
    ("matmul", "float16", None): "512x512x512",
    ("matmul", "int8", None): "512x512x512",
    ("matvec", "float32", 8): "4096x4096",
    ("matvec", "float32", 4): "4096x4096 11008x4096",
    ("vecmat", "float32", 4): "4096x4096",
    ("matmul", "float32", 8): "4096x4096x16",
    ("matmul", "float32", 4): "4096x4096x16",
}


def representative(device: str = "cpu") -> list[Problem]:
    """Return the problems that are compared where none are named."""
    return [
        problem_of(op, sizes_of(sizes, op), dtype, Matrix(device, bits=bits))
        for (op, dtype, bits), known in REPRESENTATIVE.items()
        for sizes in known.split()
    ]


def off(report: TuneReport) -> float:
    """Return the default's time over the tuned one's: 1 but for a gain beyond the noise."""
    gain = report.gain
    return gain.value if gain is not None and report.changed and decisive(gain.inverse()) else 1.0


def tuned(report: TuneReport) -> str:
    """Return what is faster than the default, in words."""
    winner = report.winner
    return winner.name if winner is not None and off(report) != 1.0 else "the default"


def show(problems: Sequence[Problem], device: str, seconds: float) -> list[dict[str, Any]]:
    """Tune every problem for so many seconds, storing nothing; tell of each, then of all."""
    found = []
    with working("tuning") as tell, _nothing_stored(), tempfile.TemporaryDirectory() as folder:
        for problem in problems:
            tell(f"tuning {problem.describe()}")
            report = tune_problem(problem, Request(device, seconds, root=Path(folder)))
            click.echo(f"{problem.describe()}: {off(report):.3f}, {tuned(report)}", err=True)
            found.append(report)
    print_table(table(found))
    return [plainly(report) | {"default_over_tuned": off(report)} for report in found]


@contextmanager
def _nothing_stored() -> Iterator[None]:
    """Have plans ignore what earlier tuning stored."""
    with without_tuning():
        forget_plans()
        try:
            yield
        finally:
            forget_plans()


def table(found: Sequence[TuneReport]) -> TableData:
    """Return one line per problem and the geometric mean of what the defaults lose."""
    body = []
    for one in found:
        times = [f"{significant(s * 1e6)}" if s else "" for s in (one.default_s, one.winner_s)]
        busy = f"busy in {one.disturbed:.0%} of the blocks" if one.disturbed > 0.5 else ""
        names = (one.problem.describe(), one.default.name, times[0], tuned(one), times[1])
        body.append((*names, f"{off(one):.3f}", busy))
    mean = geomean(map(off, found))
    body.append(("geometric mean", "", "", "", "", f"{mean:.3f}", ""))
    header = ("product", "default", "us", "tuned", "us", "default / tuned", "remarks")
    numeric = (False, False, True, False, True, True, False)
    return TableData("heuristics against tuning", header, tuple(body), numeric)
