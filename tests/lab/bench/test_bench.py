"""The CPU's bench: suites make what they say, bars are read off rows, ratios are paired."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import gemmule as gm
from fake_clock import FakeClock, entries_on
from gemmule.core.problem import Problem, QuantSpec
from gemmule.timing.sampler import Budget
from gemmule_lab.bench import suites
from gemmule_lab.bench.suites import SUITES
from gemmule_lab.cli import run
from gemmule_lab.harness import host as host_bench
from gemmule_lab.harness.bench import race
from gemmule_lab.harness.host import ONE_COLUMN, HostBench
from gemmule_lab.harness.products import Product
from gemmule_lab.records.rows import Ceiling, Environment, Facts, Row, Speedup, Times
from gemmule_lab.report import targets
from gemmule_lab.report.tables import in_words
from gemmule_lab.report.targets import READ, Bar

ENVIRONMENT = Environment("cpu", "cpu", "cpu", (), "Linux", "3", {}, None, 1, {}, {})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few copies, and ceilings that cost nothing."""
    monkeypatch.setattr(host_bench, "MOST_SETS", 2)
    ceilings = {"read": Ceiling("read", 40.0, "GB/s", "made", 1)}
    monkeypatch.setattr(host_bench, "measure_ceilings", lambda **options: ceilings)
    monkeypatch.setenv("GEMMULE_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)


def made(problem: Problem, *, share: float | None = None, **over: tuple[float, float]) -> Row:
    """Return a row of ours: a share of the ceiling, and speed-ups with their upper ends."""
    speedups = {
        name.replace("_", " "): Speedup(value, value / 2, high, 9, 0.95, "slower")
        for name, (value, high) in over.items()
    }
    return Row(
        "e",
        problem,
        "blas",
        "rung",
        "cold",
        Times(2, 1, 3, 1, 9),
        1.0,
        1.0,
        percent_of_ceiling=share and 100 * share,
        speedups=speedups,
        group=f"{problem.m} x {problem.n}",
    )


def quantised(op: str, bits: int, activations: str = "float", **sizes: int) -> Problem:
    spec = QuantSpec(bits, 128, False, "row", "float32", False, activations=activations)
    a = "uint8" if bits == 8 else "uint4"
    return Problem(op, **{"m": 4096, "n": 4096, **sizes}, a=a, quant=spec)


def standing(text: str, against: str, rows: list[Row]) -> targets.Standing:
    (bar,) = (b for b in targets.CPU_BARS if (b.text, b.against) == (text, against))
    return targets.standing(bar, rows)


def test_a_bar_is_missed_by_its_worst_row_and_says_where() -> None:
    fine = made(Problem("matvec", 8192, 8192), numpy=(1.2, 1.3))
    reaches = made(Problem("matvec", 16384, 16384), numpy=(0.93, 0.96))
    below = made(Problem("matvec", 4096, 4096), numpy=(0.8, 0.9))
    text = "float32, float64 matvec and vecmat"
    reached = standing(text, "numpy", [fine, reaches])
    assert reached.passed, "the interval reaches the bar"
    assert (reached.worst, reached.rows) == (0.93, 2)
    missed = standing(text, "numpy", [fine, below, reaches])
    assert not missed.passed
    assert missed.worst == 0.8
    assert "4096 x 4096" in missed.where
    assert missed.verdict == "MISSED"


def test_rows_that_a_bar_is_not_about_do_not_count() -> None:
    text = "float16, bfloat16 matvec and vecmat"
    half = Problem("matvec", 4096, 4096, a="float16", b="float16", out="float16")
    good = made(half, share=0.9)
    others = [
        made(dataclasses.replace(half, m=64, n=64), share=0.1),  # too small to be bandwidth
        made(dataclasses.replace(half, op="matmul", k=4096), share=0.1),
        dataclasses.replace(made(half, share=0.1), kind="peer"),
        dataclasses.replace(made(half, share=0.1), temperature="warm"),
        made(Problem("matvec", 4096, 4096), share=0.1),
    ]
    assert standing(text, READ, [good, *others]).passed
    assert standing(text, READ, [good, *others]).rows == 1
    assert not standing(text, READ, [good, made(half, share=0.84)]).passed


def test_a_bar_on_time_reads_the_other_way_round() -> None:
    problem = quantised("matmul", 4, n=16, k=4096)
    text = "16 columns, int4, float activations"
    for times, passed in ((2.4, True), (2.6, False)):
        row = made(problem, **{ONE_COLUMN.replace(" ", "_"): (1 / times, 1 / times)})
        found = standing(text, ONE_COLUMN, [row])
        assert found.passed is passed
        assert found.worst == pytest.approx(times)
    assert standing(text, ONE_COLUMN, []).verdict == "not measured"
    assert targets.bars_table([found]).rows[0][2] == "<= 2.50"


def test_activations_tell_bars_apart() -> None:
    rounded = made(quantised("matvec", 4, "int8"), share=0.6)
    assert standing("int4 g128, int8 activations", READ, [rounded]).verdict == "MISSED"
    assert standing("int4 g128, float activations", READ, [rounded]).verdict == "not measured"


def test_every_bar_is_about_some_product_of_its_suite() -> None:
    """No bar can stand unmeasured for want of a product, whatever peers are installed."""
    suite = SUITES["cpu"]
    small = [dataclasses.replace(p, shape=_shrunk(p.shape)) for p in suite.products]
    problems = []
    for product in dict.fromkeys(small):
        problem = HostBench().prepared(product).sets.plan().problem
        scale = 1 if product.columns is None else 512
        k = problem.k if problem.k == 1 else problem.k * scale
        n = problem.n * scale if problem.op == "matvec" else problem.n
        problems.append(dataclasses.replace(problem, m=problem.m * scale, n=n, k=k))
    for bar in suite.bars:
        assert any(bar.applies(problem) for problem in problems), bar.text


def _shrunk(shape: tuple[int, int]) -> tuple[int, int]:
    return shape if shape[0] <= 384 else (shape[0] // 512, shape[1] // 512)


@pytest.mark.parametrize(
    ("product", "dtypes"),
    [
        (Product("vecmat", "float16", (5, 7), column_major=True), ("float16", "float16")),
        (Product("matvec", "plain int32", (5, 7)), ("int32", "int32")),
        (Product("matmul", "plain int8", (5, 5), columns=None), ("int8", "int8")),
        (Product("matmul", "int4 x int8", (8, 256), columns=16), ("uint4", "float32")),
    ],
)
def test_benches_make_what_the_product_says(product: Product, dtypes: tuple[str, str]) -> None:
    one = HostBench().prepared(product)
    problem = one.sets.plan().problem
    assert (problem.a, problem.b) == dtypes
    assert one.group == product.title
    sets = one.sets.items
    for other in sets[1:]:
        for copied, first in zip((other.a, other.b), (sets[0].a, sets[0].b), strict=True):
            np.testing.assert_array_equal(_values(copied), _values(first))
    addresses = {id(operand) for other in sets for operand in (other.a, other.b, other.out)}
    assert len(addresses) == 3 * len(sets)
    if product.column_major:  # x A of a column-major A runs along its memory
        assert problem.layout_a == "row"
    if product.format.startswith("int"):
        assert problem.quant is not None
        assert problem.quant.activations == "int8"
        assert list(one.beside) == [ONE_COLUMN]


def _values(operand: object) -> np.ndarray:
    if isinstance(operand, gm.QuantizedMatrix):
        return np.asarray(operand.dequantize("float64"))
    return np.asarray(operand)


def test_narrowing_replaces_shapes_and_refuses_to_leave_nothing() -> None:
    suite = suites.narrowed(SUITES["cpu"], ["matmul"], ["int4"], [64, 128])
    assert [(p.shape, p.columns) for p in suite.products] == [((64, 64), 16), ((128, 128), 16)]
    assert suite.bars == SUITES["cpu"].bars
    with pytest.raises(ValueError, match="no product"):
        suites.narrowed(SUITES["cpu"], ["vecmat"], ["plain int8"], [])


def test_ratios_to_peers_on_plain_numbers_and_to_one_column_stand_in_the_row() -> None:
    product = Product("matmul", "int4 x int8", (64, 128), columns=16)
    rows, _ = HostBench(0.2).attempt(product, ENVIRONMENT)()
    (ours,) = (row for row in rows if row.kind == "rung")
    assert {ONE_COLUMN, "numpy on float32"} <= set(ours.speedups)
    assert "torch on float32" not in ours.speedups
    assert ours.problem.quant is not None
    assert ours.problem.quant.activations == "int8"
    assert ONE_COLUMN not in {row.name for row in rows}


def test_a_wrong_product_beside_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    product = Product("matmul", "int8", (64, 128), columns=16)
    attempt = HostBench(0.05, peers=()).attempt(product, ENVIRONMENT)
    monkeypatch.setattr(gm, "matvec", lambda A, x, **o: np.zeros(A.shape[0], np.float32))
    with pytest.raises(ArithmeticError, match="matvec"):
        attempt()


def test_the_command_prints_every_bar(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--suite", "cpu", "--size", "40", "--op", "matvec", "--seconds", "0.05"]
    assert run([*arguments, "--format", "float16"]) == 0
    printed = capsys.readouterr().out
    assert "Bars" in printed
    assert printed.count("measured") >= len(targets.CPU_BARS), "40 x 40 is too small for any bar"


def test_the_log_tells_no_share_of_a_ceiling_that_may_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It said 159 % where the table, after the ceiling was measured again, said 77."""
    words = in_words([made(Problem("matvec", 64, 64), share=1.59)])
    assert "blas 2 us" in words
    assert "%" not in words
    assert run(["bench", "--size", "64", "--op", "matvec", "--seconds", "0.05"]) == 0
    shown = capsys.readouterr()
    assert "measuring this machine's ceilings, about 8 s" in shown.err
    assert "% of the read ceiling" not in shown.err


def test_bars_are_stated_as_the_user_reads_them() -> None:
    table = targets.bars_table([targets.standing(Bar("b", lambda p: True, "peer", 2.0), [])])
    assert table.rows == (("b", "peer", ">= 2.00", "", "", "0", "", "not measured"),)


def test_rungs_are_held_against_what_is_no_rung_or_what_they_name() -> None:
    clock = FakeClock({"rung": 1e-3, "second": 2e-3, "peer": 3e-3, "on other numbers": 4e-3})
    problem, entries = Problem("matvec", 8, 8), []
    for one in entries_on(clock):
        kind = "peer" if one.name in ("peer", "on other numbers") else "rung"
        against = ("rung",) if one.name == "second" else None
        shown = one.name != "on other numbers"
        facts = Facts(problem, kind, "cold", group="g", against=against, shown=shown)
        entries.append(dataclasses.replace(one, about=facts))
    rows = race(entries, clock, ENVIRONMENT, Budget(max_seconds=60, max_blocks=10))
    assert [(row.name, row.kind, row.group) for row in rows] == [
        ("rung", "rung", "g"),
        ("second", "rung", "g"),
        ("peer", "peer", "g"),
    ]
    found = [{name: s.value for name, s in row.speedups.items()} for row in rows]
    assert found[0] == pytest.approx({"peer": 3.0, "on other numbers": 4.0})
    assert found[1] == pytest.approx({"rung": 0.5})
    assert found[2] == {}


def test_the_suite_of_several_processes_wants_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("RANK", raising=False)
    assert run(["bench", "--suite", "distributed"]) == 2
    assert "start it as torchrun" in capsys.readouterr().err
