"""The CPU's bench: suites make what they say, ratios are paired."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from fake_clock import FakeClock, entries_on
from gemmule.core.problem import Problem
from gemmule.timing.sampler import Budget
from gemmule_lab.bench import suites
from gemmule_lab.bench.suites import SUITES
from gemmule_lab.cli import run
from gemmule_lab.harness import host
from gemmule_lab.harness.bench import race
from gemmule_lab.harness.host import ONE_COLUMN, HostBench
from gemmule_lab.harness.products import Product
from gemmule_lab.peers.gpu_float import unprepared
from gemmule_lab.peers.peer import Peer
from gemmule_lab.records.rows import Environment, Facts, Row, Speedup, Times
from gemmule_lab.report.tables import in_words
from gemmule_lab.verify import check

pytestmark = pytest.mark.usefixtures("quick_bench")
ENVIRONMENT = Environment("cpu", "cpu", "cpu", (), "Linux", "3", {}, None, 1, {}, {})


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


def test_no_first_product_of_a_quantised_matrix_is_timed(limit: Callable[..., None]) -> None:
    """It takes ten times as long as those after it, and there are hundreds of matrices."""
    limit(host, MOST_SETS=9)
    bench = HostBench(cold_bytes=1 << 30)
    sets = bench.sets(Product("matvec", "int4", (32, 256)))
    for one in sets.items:
        one.out.fill(np.nan)
    assert bench.ours(sets).sets == 9
    assert all(np.isfinite(one.out).all() for one in sets.items)


def _values(operand: object) -> np.ndarray:
    if isinstance(operand, gm.QuantizedMatrix):
        return np.asarray(operand.dequantize("float64"))
    return np.asarray(operand)


def test_narrowing_replaces_shapes_and_refuses_to_leave_nothing() -> None:
    suite = suites.narrowed(SUITES["cpu"], ["matmul"], ["int4"], [64, 128])
    assert [(p.shape, p.columns) for p in suite.products] == [((64, 64), 16), ((128, 128), 16)]
    with pytest.raises(ValueError, match="no product"):
        suites.narrowed(SUITES["cpu"], ["vecmat"], ["plain int8"], [])


def test_ratios_to_peers_on_plain_numbers_and_to_one_column_stand_in_the_row() -> None:
    product = Product("matmul", "int4 x int8", (64, 128), columns=16)
    gone = Peer(
        "gone", "cpu", lambda: "not installed", lambda _: None, unprepared, lambda: "no version"
    )
    bench = HostBench(0.2)
    bench.peers = (*bench.peers, gone)
    rows, absent = bench.attempt(product, ENVIRONMENT)()
    assert [(one.name, one.reason) for one in absent].count(("gone", "not installed")) == 1
    (ours,) = (row for row in rows if row.kind == "rung")
    assert {ONE_COLUMN, "numpy on float32"} <= set(ours.speedups)
    assert "torch on float32" not in ours.speedups
    assert ours.problem.quant is not None
    assert ours.problem.quant.activations == "int8"
    assert ONE_COLUMN not in {row.name for row in rows}


def test_a_wrong_product_beside_ours_is_refused(fault: Callable[..., Any]) -> None:
    product = Product("matmul", "int8", (64, 128), columns=16)
    attempt = HostBench(0.05, peers=()).attempt(product, ENVIRONMENT)
    fault(gm, "matvec", lambda sound, A, x, **o: np.zeros(A.shape[0], np.float32))
    with pytest.raises(ArithmeticError, match="matvec"):
        attempt()


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
    setting: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    setting(RANK=None)
    assert run(["bench", "--suite", "distributed"]) == 2
    assert "start it as torchrun" in capsys.readouterr().err


def test_the_truth_of_operands_is_computed_once_for_all_rungs_that_are_judged_on_them() -> None:
    bench = HostBench(seconds=0.01)
    sets = bench.sets(Product("matvec", "float32", (40, 30)), warm=True)
    assert not sets.truths
    bench.ours(sets, "scalar_loop")
    (kept,) = sets.truths.values()
    assert bench.ours(sets, "threads").about.error_ratio <= 1.0
    assert [*sets.truths.values()] == [kept]
    one = sets.items[0]
    rounding = check.Rounding.of(sets.plan("threads"))
    right = one.a @ one.b
    assert check.judge("matvec", one.a, one.b, right, rounding, sets.truths).ok
    right[7] += 1e-2
    wrong = check.judge("matvec", one.a, one.b, right, rounding, sets.truths)
    assert (wrong.ok, wrong.worst_index) == (False, (7,))
    kept.values[3] += 1.0  # which shows that it is what later rungs are held against
    with pytest.raises(ArithmeticError):
        bench.ours(sets, "threads")
