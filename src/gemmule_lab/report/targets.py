"""Bars: what a suite's rows have to reach, stated as data and read off the measured rows.

A bar names the problems it is about, the figure that counts there and the least value of it.
Against a peer a bar is reached when the 95 % interval of the ratio reaches it; against the read
ceiling the median counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gemmule.core.problem import HALVES, Problem
from gemmule.timing.sampler import CONFIDENCE
from gemmule_lab.records.rows import Row
from gemmule_lab.report.tables import TableData

READ = "read ceiling"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. against: a peer's name, or `READ`; wanted: times as fast, or share of the ceiling.

    longest: the bar is about time, at most so many times that of `against` (its `wanted` is then
    the inverse, and figures are shown the user's way round).
    """

    text: str
    applies: Callable[[Problem], bool]
    against: str
    wanted: float
    longest: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """How a bar stands: the row furthest below it, and whether it is reached on every row.

    worst and best are figures as the bar states them; None where nothing was measured. `unsure`
    tells that a ratio decided by fewer blocks than an interval of 95 % needs.
    """

    bar: Bar
    worst: float | None
    median: float | None
    where: str
    rows: int
    passed: bool
    unsure: bool = False

    @property
    def verdict(self) -> str:
        """``reached``, ``MISSED`` or ``not measured``."""
        if self.worst is None:
            return "not measured"
        return ("reached" if self.passed else "MISSED") + (" (few blocks)" if self.unsure else "")


def _reach(row: Row, bar: Bar) -> tuple[float, float, bool] | None:
    """Return a row's figure, the most that the measurement allows for it, and if that is sure."""
    if bar.against == READ:
        share = row.percent_of_ceiling
        return None if share is None else (share / 100, share / 100, True)
    speedup = row.speedups.get(bar.against)
    if speedup is None:
        return None
    return speedup.value, speedup.high, speedup.confidence >= CONFIDENCE


def standing(bar: Bar, rows: Iterable[Row]) -> Standing:
    """Return how a bar stands on the cold rows of ours that it is about.

    Matmul of small operands stays in the cache whatever is done, so its warm rows count too.
    """
    found = [
        (reach, row)
        for row in rows
        if row.kind == "rung"
        and (row.temperature == "cold" or row.problem.op == "matmul")
        and bar.applies(row.problem)
        and (reach := _reach(row, bar)) is not None
    ]
    if not found:
        return Standing(bar, None, None, "", 0, passed=False)
    found.sort(key=lambda item: item[0][0])
    (worst, _, _), row = found[0]
    middle = found[len(found) // 2][0][0]
    passed = all(most >= bar.wanted for (_, most, _), _ in found)
    unsure = not all(sure for (_, _, sure), _ in found)
    shown = (1 / worst, 1 / middle) if bar.longest else (worst, middle)
    return Standing(bar, *shown, f"{row.group} ({row.name})", len(found), passed, unsure)


def standings(bars: Sequence[Bar], rows: Sequence[Row]) -> list[Standing]:
    """Return how every bar stands, in order."""
    return [standing(bar, rows) for bar in bars]


def bars_table(found: Sequence[Standing]) -> TableData:
    """Return one line per bar: what it wants, the worst figure and where, the verdict."""
    body = []
    for one in found:
        sign, wanted = ("<=", 1 / one.bar.wanted) if one.bar.longest else (">=", one.bar.wanted)
        figures = [f"{value:.2f}" if value is not None else "" for value in (one.worst, one.median)]
        body.append(
            (
                one.bar.text,
                one.bar.against,
                f"{sign} {wanted:.2f}",
                *figures,
                str(one.rows),
                one.where,
                one.verdict,
            )
        )
    header = ("bar", "against", "wanted", "worst", "median", "rows", "worst on", "verdict")
    numeric = (False, False, True, True, True, True, False, False)
    reached = frozenset(i for i, one in enumerate(found) if one.passed)
    return TableData("Bars", header, tuple(body), numeric, reached)


def _vectors(*dtypes: str) -> Callable[[Problem], bool]:
    """Return whether a problem is a large matvec or vecmat of one of these dtypes."""
    return lambda p: p.quant is None and p.a in dtypes and _large_vector(p)


def _large_vector(problem: Problem) -> bool:
    return problem.op == "matvec" and min(problem.m, problem.n) >= 4096


def _codes(bits: int, activations: str, columns: int = 1) -> Callable[[Problem], bool]:
    """Return whether a problem multiplies such codes: a large matvec along rows, or by columns."""

    def applies(problem: Problem) -> bool:
        spec = problem.quant
        if spec is None or (spec.bits, spec.activations) != (bits, activations):
            return False
        if columns > 1:
            return (problem.op, problem.n) == ("matmul", columns)
        return _large_vector(problem) and not spec.transposed

    return applies


def _plain_matmul(*dtypes: str) -> Callable[[Problem], bool]:
    def applies(problem: Problem) -> bool:
        plain = problem.op == "matmul" and problem.quant is None
        return plain and problem.a in dtypes and min(problem.m, problem.n, problem.k) >= 256

    return applies


_PLAIN_FLOAT32 = "numpy on float32"
_ONE_COLUMN = "gemmule on one column"

CPU_BARS = (
    Bar("float32, float64 matvec and vecmat", _vectors("float32", "float64"), "numpy", 0.95),
    Bar("float16, bfloat16 matvec and vecmat", _vectors(*HALVES), READ, 0.85),
    Bar("int8 g128, float activations", _codes(8, "float"), READ, 0.80),
    Bar("int8 g128, float activations", _codes(8, "float"), _PLAIN_FLOAT32, 3.0),
    Bar("int4 g128, float activations", _codes(4, "float"), READ, 0.50),
    Bar("int4 g128, float activations", _codes(4, "float"), _PLAIN_FLOAT32, 3.5),
    Bar("int4 g128, int8 activations", _codes(4, "int8"), READ, 0.85),
    Bar("int4 g128, int8 activations", _codes(4, "int8"), _PLAIN_FLOAT32, 6.0),
    Bar("int4 g128, int8 activations", _codes(4, "int8"), "onnxruntime level 4", 1.0),
    *(
        Bar(f"16 columns, int{bits}, {kind} activations", _codes(bits, kind, 16), _ONE_COLUMN,
            1 / 2.5, longest=True)
        for bits in (8, 4) for kind in ("float", "int8")
    ),
    Bar("float16 matmul", _plain_matmul("float16"), "numpy", 10.0),
    Bar("int8, int32 matmul", _plain_matmul("int8", "int32"), "numpy on int64", 10.0),
    Bar("int64 matmul", _plain_matmul("int64"), "numpy", 10.0),
)  # fmt: skip
