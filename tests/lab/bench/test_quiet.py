"""Patience: it waits, it runs out, and it keeps the least disturbed attempt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gemmule.core.problem import Problem
from gemmule_lab.bench.quiet import Patience, disturbed_share
from gemmule_lab.harness.neighbours import processors_in_use
from gemmule_lab.records.rows import Row, Times

HIT = "the CPU was taken away during 9 of 9 blocks"


def row(*flags: str) -> Row:
    return Row(
        "e",
        Problem("matvec", 2, 2),
        "blas",
        "rung",
        "cold",
        Times(2, 1, 3, 1, 9),
        1.0,
        1.0,
        flags=flags,
    )


class Machine:
    """A machine whose load over half a second is told beforehand."""

    def __init__(self, *loads: float | None) -> None:
        self.loads = iter(loads)
        self.time_s = 0.0

    def busy(self) -> float | None:
        self.time_s += 0.5
        return next(self.loads)

    def patience(self, seconds: float) -> Patience:
        return Patience(seconds, self.busy, lambda: self.time_s)


def test_it_waits_until_the_processors_are_idle() -> None:
    machine = Machine(0.9, 0.5, 0.02)
    patience = machine.patience(10)
    assert patience.wait()
    assert patience.left_s == 8.5


def test_it_runs_out() -> None:
    patience = Machine(*[0.9] * 5).patience(1.8)
    assert not patience.wait()
    assert not patience.wait(), "no more is asked"


def test_it_does_not_wait_where_nobody_tells() -> None:
    assert Machine(None).patience(10).wait()


def test_a_disturbed_product_is_measured_again() -> None:
    machine = Machine(*[0.0] * 9)
    attempts: Iterator[list[Row]] = iter([[row(HIT), row(HIT)], [row(HIT), row()], [row(), row()]])
    found = machine.patience(60).measure(lambda: next(attempts), lambda rows: rows)
    assert disturbed_share(found) == 0
    assert next(attempts, None) is None


def test_the_least_disturbed_attempt_is_kept_when_patience_runs_out() -> None:
    machine = Machine(0.0, 0.0, 0.9, 0.9, 0.9)
    attempts = iter([[row(HIT), row(HIT)], [row(HIT), row()], [row(HIT), row(HIT)]])
    found = machine.patience(2.2).measure(lambda: next(attempts), lambda rows: rows)
    assert disturbed_share(found) == 0.5


def test_without_patience_one_attempt_is_made() -> None:
    attempts = iter([[row(HIT)]])
    found = Machine().patience(0).measure(lambda: next(attempts), lambda rows: rows)
    assert disturbed_share(found) == 1


def test_the_load_is_read_from_the_system(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 100 0 50 800 50 0 0 0 0 0\nctxt 1\n")

    def later(seconds: float) -> None:
        stat.write_text("cpu 160 0 65 820 55 0 0 0 0 0\nctxt 1\n")

    assert processors_in_use(stat, later) == 0.75
    assert processors_in_use(tmp_path / "nowhere", later) is None
    stat.write_text("nothing of use\n")
    assert processors_in_use(stat, lambda seconds: None) is None
