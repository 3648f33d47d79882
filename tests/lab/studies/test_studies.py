"""The studies: rows that survive crashes, rules that decide both ways, the documents' grids."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from click.testing import CliRunner

from checkout import ROOT
from fake_clock import FakeClock
from gemmule.errors import DeviceError
from gemmule.oracle.problems import make_problem
from gemmule.timing.clock import Entry
from gemmule_lab import studies
from gemmule_lab.commands.report import report
from gemmule_lab.commands.study import study as command
from gemmule_lab.profile import ncu
from gemmule_lab.profile.single_launch import METRICS
from gemmule_lab.records import study as store
from gemmule_lab.records.rows import Ceiling, Facts, Times
from gemmule_lab.records.study import Rows, StudyRow
from gemmule_lab.report.plots import draw
from gemmule_lab.studies import charted, runner, show
from gemmule_lab.studies.documents import (
    document_000,
    document_001,
    document_002,
    document_003,
    document_004,
)
from gemmule_lab.studies.documents.document_003 import formula_gbs
from gemmule_lab.studies.grid import Cell, Lane, Measured, Task
from gemmule_lab.studies.harness import CellBench, CpuBench
from gemmule_lab.studies.products import totals
from gemmule_lab.studies.products.passes import PARTS
from gemmule_lab.studies.products.totals import judge
from gemmule_lab.studies.rules import CONFIRMED, DIFFERS, NOT_MEASURABLE, REFUTED, document
from lab_rows import machine, recorded, study_row, times
from pages import study_pages

NUMBERS = ("000", "001", "002", "003", "004")
DRAWN_OF = ("001", "002")  # a chart is data, which is checked when it is made; these have all kinds

# What the documents claim; each has to have a verdict.
CLAIMS = {
    "000": {"tiling", "l2", "rows", "small-x", "result-size"},
    "001": {
        "break-even-library", "break-even-own", "loading", "cpu-slow", "exponential", "eigen-45",
        "cublas-10", "memory-end", "naive-scales", "shared-gain", "launch-gain", "shared-alone",
        "sums-in-c", "shared-init", "peak", "computing", "balanced", "banks", "barrier",
        "other-approach", "fmaf", "kernel-1024", "malloc-64", "order", "epsilon", "tile-1",
        "equal-small",
    },
    "002": {
        "tiles", "low-use", "tile-width", "tile-traffic", "rectangular", "compute-bound",
        "coalesced",
    },
    "003": {
        "fp16-over-torch", "printed-parameters", "fp16-tuned-over-torch", "int8-over-fp16",
        "int4-over-fp16", "int8-kernel", "int4-kernel", "vector-loads", "y-blocks", "shared-x",
        "table-int8", "table-int4", "int4-16-values", "printed-bandwidths",
    },
    "004": {
        "shared-memory", "coalescing", "any-dimension", "width-64", "height-1024", "own-optimum",
        "always-faster", "above-1-mb", "transposed-wins", "ratio-block", "ratio-transposed",
        "ratio-then", "zeroing", "twice-memory", "case-count", "whose-7.3", "eighty-percent",
    },
}  # fmt: skip
# Decided by arithmetic over what the document itself prints, with no row at all.
BY_ARITHMETIC = {
    ("000", "small-x"): CONFIRMED,
    ("000", "result-size"): REFUTED,
    ("001", "order"): REFUTED,
    ("001", "epsilon"): REFUTED,
    ("002", "coalesced"): REFUTED,
    ("003", "printed-bandwidths"): REFUTED,
    ("004", "any-dimension"): REFUTED,
    ("004", "own-optimum"): REFUTED,
    ("004", "twice-memory"): CONFIRMED,
    ("004", "case-count"): REFUTED,
    ("004", "whose-7.3"): REFUTED,
    ("004", "eighty-percent"): REFUTED,
}


class FakeBench:
    """Gives every lane a time, and remembers what it was asked for."""

    def __init__(self, backend: str = "cuda", stop_after: int | None = None) -> None:
        self.backend, self.device, self.ordinal = backend, "Test device", 0
        self.asked: list[tuple[str, ...]] = []
        self.stop_after = stop_after

    def measure(self, cell: Cell, lanes: tuple[Lane, ...]) -> Mapping[str, Measured]:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(tuple(lane.name for lane in lanes))
        return {lane.name: Measured(times(10.0), {"gbs": 1.0, "gflops": 2.0}) for lane in lanes}


FAILED = "failed"


def verdict(number: str, claim: str, rows: list[StudyRow], **ceilings: float) -> str:
    """Return a claim's outcome, FAILED for the one that its rule names for a claim that fails."""
    found = {n: Ceiling(n, v, "", "", 1) for n, v in ceilings.items()}
    if "fma" in found:
        found["fma float32"] = found.pop("fma")
    here = dataclasses.replace(machine(), backend="cuda", ceilings=found)
    one = next(c for c in studies.load(number).claims if c.id == claim)
    outcome = one.judge(Rows(rows, {here.id: here})).outcome
    if outcome in (REFUTED, DIFFERS):
        assert outcome.startswith(one.rule.split()[0]), (claim, outcome, one.rule)
        return FAILED
    return outcome


@pytest.mark.parametrize("number", NUMBERS)
def test_every_claim_has_a_verdict(number: str) -> None:
    claims = studies.load(number).claims
    assert {claim.id for claim in claims} == CLAIMS[number]
    assert len({claim.id for claim in claims}) == len(claims)
    for claim in claims:
        finding = claim.judge(Rows(()))
        assert finding.outcome == BY_ARITHMETIC.get((number, claim.id), NOT_MEASURABLE), claim.id
        assert finding.figure
        assert claim.rule.startswith(("refuted unless ", "differs unless "))
        assert claim.causes


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path) -> None:
    path, study = tmp_path / "rows.jsonl", studies.load("003")
    whole = 1 + sum(len(step.lanes) for step in study.steps("cuda", False))  # and its duration
    with pytest.raises(KeyboardInterrupt):
        runner.run(study, FakeBench(stop_after=3), machine, path, full=False)
    first = list(study.steps("cuda", False))[:3]
    assert len(store.read(path, "003")) == sum(len(step.lanes) for step in first)
    bench = FakeBench()
    rows = runner.run(study, bench, machine, path, full=False)
    assert len(rows) == whole
    assert len(bench.asked) == len(list(study.steps("cuda", False))) - 3
    bench = FakeBench()
    assert len(runner.run(study, bench, machine, path, full=False)) == whole
    assert not bench.asked


def test_a_line_that_a_crash_cut_off_is_measured_again(tmp_path: Path) -> None:
    path, study = tmp_path / "rows.jsonl", studies.load("003")
    before = runner.run(study, FakeBench(), machine, path, full=False)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1])[:-20])  # the last line says how long the run took
    assert len(store.read(path, "003")) == len(before) - 2
    bench = FakeBench()
    after = runner.run(study, bench, machine, path, full=False)
    assert bench.asked == [(before[-2].name,)]
    assert {r.key for r in before[:-1]} < {r.key for r in after}
    assert path.read_bytes().endswith(b"\n")
    assert len(path.read_bytes().split(b"\n")) - 1 == len(before) + 2  # two environments


def test_verdicts_are_of_the_last_device_and_ceilings_are_held_against_rows() -> None:
    here = machine()  # reads 40 GB/s
    fast = study_row(
        "000",
        "rows x columns",
        "a",
        9.0,
        backend="cpu",
        temperature="cold",
        figures={"gbs": 50.0},
        n=8,
    )
    rows = [dataclasses.replace(fast, device=name) for name in ("Old CPU", "Test CPU")]
    kept = store.of_last_devices(Rows(rows, {here.id: here}))
    assert [r.device for r in kept] == ["Test CPU"]
    assert runner.above_ceiling(kept, "cpu")
    slower = dataclasses.replace(fast, device="Test CPU", figures={"gbs": 43.0})
    assert not runner.above_ceiling(Rows([slower], {here.id: here}), "cpu")


def test_rows_of_another_device_do_not_count_as_done(tmp_path: Path) -> None:
    path, study = tmp_path / "rows.jsonl", studies.load("003")
    runner.run(study, FakeBench(), machine, path, full=False)
    other = FakeBench()
    other.device = "Another device"
    runner.run(study, other, machine, path, full=False)
    assert len(other.asked) == len(list(study.steps("cuda", False)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 9}, "schema 9"),
        ({"line": "row"}, "'environment' or 'study'"),
        ({"environment": "0123"}, "does not come before"),
        ({"seed": "004"}, "of document '004'; the file is of 003"),
        ({"temperature": "hot"}, "temperature"),
        ({"surprise": 1}, "unknown field"),
        ({"name": 7}, "must be str"),
    ],
)
def test_files_are_not_trusted(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "rows.jsonl"
    store.append(path, [machine(), study_row("003", "sizes", "torch", 3.0, n=512)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], json.dumps(json.loads(lines[1]) | change), ""]))
    with pytest.raises(ValueError, match=words) as error:
        store.read(path, "003")
    assert "rows.jsonl, line 2" in str(error.value)


def pair(number: str, experiment: str, a: str, b: str, ratio: float, **case: int) -> list[StudyRow]:
    """Return rows in which `a` is `ratio` times as fast as `b`."""
    return [
        study_row(number, experiment, a, 10.0, **case),
        study_row(number, experiment, b, 10.0 * ratio, **case),
    ]


FASTER_MEANS = [
    ("003", "printed-parameters", "sizes", "fp16 two_step", "torch", CONFIRMED),
    ("003", "int8-kernel", "sizes", "int8 codes", "fp16 two_step", CONFIRMED),
    ("003", "int4-kernel", "sizes", "int4 codes", "fp16 two_step", CONFIRMED),
    ("003", "vector-loads", "sizes", "fp16 16-byte loads", "fp16 scalar loads", CONFIRMED),
    ("003", "y-blocks", "sizes", "fp16 y blocks", "fp16 one block a row", FAILED),
    ("003", "shared-x", "sizes", "fp16 x in shared memory", "fp16 one block a row", FAILED),
    ("003", "table-int8", "sizes", "int8 product table", "int8 codes, 128 threads", FAILED),
    ("003", "table-int4", "sizes", "int4 product table", "int4 codes, 128 threads", CONFIRMED),
    ("003", "int4-16-values", "sizes", "int4 codes", "int4 codes, 8 values", CONFIRMED),
    ("001", "fmaf", "kernels", document_001.FMA_ON, document_001.FMA_OFF, FAILED),
    ("001", "sums-in-c", "kernels", "naive, fused", "naive, sums in C", CONFIRMED),
]


@pytest.mark.parametrize(("number", "claim", "experiment", "a", "b", "if_faster"), FASTER_MEANS)
def test_comparisons_decide_both_ways(
    number: str, claim: str, experiment: str, a: str, b: str, if_faster: str
) -> None:
    other = CONFIRMED if if_faster == FAILED else FAILED
    assert verdict(number, claim, pair(number, experiment, a, b, 1.2, n=4096)) == if_faster
    assert verdict(number, claim, pair(number, experiment, a, b, 0.9, n=4096)) == other
    cold = [
        study_row(number, experiment, a, 10.0, temperature="cold", n=4096),
        study_row(number, experiment, b, 99.0, temperature="cold", n=4096),
    ]
    assert verdict(number, claim, cold) == NOT_MEASURABLE


def test_the_tile_of_000_is_judged_cold_as_its_tool_measures() -> None:
    for ratio, expected in ((1.2, FAILED), (0.9, CONFIRMED)):
        rows = pair("000", "rows x columns", "shared_x", "thread_per_row", ratio, m=8, n=8)
        assert verdict("000", "tiling", rows) == NOT_MEASURABLE
        cold = [dataclasses.replace(row, temperature="cold") for row in rows]
        assert verdict("000", "tiling", cold) == expected


def test_codes_are_judged_by_what_is_chosen_for_the_device() -> None:
    for us, expected in ((60.0, CONFIRMED), (130.0, FAILED)):
        rows = [
            study_row("003", "chosen", f"{form}, chosen", t, temperature="cold", n=4096)
            for form, t in (("fp16", 120.0), ("int8", us), ("int4", us))
        ]
        for form in ("int8", "int4"):
            assert verdict("003", f"{form}-over-fp16", rows) == expected
    small = [dataclasses.replace(row, case={"n": 512}) for row in rows]
    assert verdict("003", "int8-over-fp16", small) == NOT_MEASURABLE


def test_the_launch_and_shared_memory_are_told_apart() -> None:
    def kernels(lone: float, naive: float, shared: float) -> list[StudyRow]:
        names = (document_001.LONE_NAIVE, document_001.FULL_NAIVE, document_001.FMA_ON)
        return [
            study_row("001", "kernels", name, us, n=1024)
            for name, us in zip(names, (lone, naive, shared), strict=True)
        ]

    for times_of_three, launch, shared in (
        ((19_000.0, 415.0, 288.0), CONFIRMED, FAILED),
        ((500.0, 415.0, 40.0), FAILED, CONFIRMED),
    ):
        rows = kernels(*times_of_three)
        assert verdict("001", "launch-gain", rows) == launch
        assert verdict("001", "shared-alone", rows) == shared


def test_parallelism_and_shared_memory_are_told_apart() -> None:
    for shared, expected in ((400.0, FAILED), (60.0, CONFIRMED)):
        rows = [
            dataclasses.replace(row, case={**row.case, "order": "columns"}, temperature="cold")
            for name, us in (
                ("thread_per_row", 500.0), ("shared_x", shared), ("block_multiply", 25.0),
                ("split_columns", 20.0),
            )
            for row in [study_row("004", "ladder", name, us, m=64, n=64)]
        ]  # fmt: skip
        assert verdict("004", "shared-memory", rows) == expected


def test_both_tiles_have_to_win() -> None:
    both = pair("002", "rows x columns", "shared_tile", "naive", 1.2, m=512, n=512)
    both += pair("002", "rows x columns", "rectangular_tile", "naive", 1.2, m=512, n=512)[:1]
    assert verdict("002", "tiles", both) == CONFIRMED
    slower = dataclasses.replace(both[2], times_us=times(13.0))
    assert verdict("002", "tiles", [*both[:2], slower]) == FAILED
    assert verdict("002", "tiles", both[:1]) == NOT_MEASURABLE


def total(name: str, times_us: Mapping[int, float], backend: str = "cuda") -> list[StudyRow]:
    parts = {**dict.fromkeys(PARTS, 10.0), "launch": 0.0}
    return [
        study_row(
            "001",
            document_001.TOTAL,
            name,
            us,
            backend=backend,
            temperature="once",
            figures={**parts, "kernel": us - 40.0, "gflops": 1.0},
            n=n,
        )
        for n, us in times_us.items()
    ]


def test_break_even_sizes() -> None:
    cpu = total("cpu loop", {11: 5.0, 61: 90.0, 101: 400.0, 1001: 4e5}, "cpu")
    gpu = total("shared tile", {11: 60.0, 61: 60.0, 101: 70.0, 1001: 900.0})
    assert verdict("001", "break-even-own", cpu + gpu) == CONFIRMED
    assert verdict("001", "cpu-slow", cpu + gpu) == CONFIRMED
    slow = total("shared tile", {11: 60.0, 61: 600.0, 101: 900.0, 1001: 3e5})
    assert verdict("001", "break-even-own", cpu + slow) == FAILED
    assert document_001.last_crossing({1: 0.5, 2: 4.0, 3: 0.5}) is None
    assert document_001.last_crossing({4: 2.0, 9: 3.0}) == 4.0
    eigen = total("eigen", {11: 5.0, 41: 90.0, 101: 400.0}, "cpu")
    numpy = total("numpy", {11: 5.0, 41: 90.0, 101: 400.0}, "cpu")
    cublas = total("cublas", {11: 60.0, 41: 60.0, 101: 70.0})
    assert verdict("001", "break-even-library", eigen + cublas) == CONFIRMED
    assert verdict("001", "break-even-library", numpy + cublas) == CONFIRMED
    assert verdict("001", "break-even-library", eigen) == NOT_MEASURABLE


def test_a_break_even_lies_between_sizes_and_has_an_interval() -> None:
    cpu = total("cpu loop", {32: 10.0, 64: 80.0, 128: 640.0}, "cpu")
    gpu = total("shared tile", {32: 40.0, 64: 40.0, 128: 40.0})
    wide = [dataclasses.replace(r, times_us=Times(r.us, r.us / 2, r.us * 2, 1.0, 9)) for r in cpu]
    found = document_001.crossing(Rows([*wide, *gpu]), "cpu loop", "shared tile")
    assert found is not None
    assert found.at == pytest.approx(32 * 2 ** (2 / 3), rel=1e-6)
    assert (found.low, found.high) == pytest.approx((32 * 2 ** (1 / 3), 64.0), rel=1e-6)


def test_small_products_and_tiles_of_one() -> None:
    loop = total("cpu loop", {16: 50.0, 64: 50.0}, "cpu")
    for us, expected in ((90.0, CONFIRMED), (400.0, FAILED)):  # the kernel takes 40 less
        both = [*total("naive", {16: us, 64: us}), *total("shared tile", {16: us, 64: us})]
        assert verdict("001", "equal-small", [*loop, *both]) == expected
    tile, naive = document_001.LONE_TILE, document_001.LONE_NAIVE
    for ratio, expected in ((1.05, CONFIRMED), (0.5, FAILED)):
        rows = pair("001", "kernels", tile, naive, ratio, n=1024)
        assert verdict("001", "tile-1", rows) == expected


def test_rows_and_heights_decide() -> None:
    def grid(rate: Mapping[tuple[int, int], float]) -> list[StudyRow]:
        name, where = document_000.BASIC, "rows x columns"
        return [
            study_row("000", where, name, 1.0, figures={"gbs": g}, m=m, n=n)
            for (m, n), g in rate.items()
        ]

    follows = {(m, n): float(m) for m in (256, 4096) for n in (256, 4096)}
    assert verdict("000", "rows", grid(follows)) == CONFIRMED
    assert verdict("000", "rows", grid({(m, n): float(n) for m, n in follows})) == FAILED
    assert verdict("000", "rows", grid({(256, 256): 1.0})) == NOT_MEASURABLE
    for best, expected in ((1024, CONFIRMED), (256, FAILED)):
        rows = [
            study_row(
                "004", "heights x widths", f"{a} {h} x {w}", 1.0 if h == best else 2.0, m=64, n=64
            )
            for a in document_004.ALGORITHMS
            for h in document_004.HEIGHTS
            for w in document_004.WIDTHS
            if w <= h
        ]
        assert verdict("004", "height-1024", rows) == expected


# What the evidence on file cannot decide, with the reason that the page gives.
UNDECIDED: dict[tuple[str, str], str] = {}


def test_a_claim_once_decided_stays_decided() -> None:
    for number in NUMBERS:
        rows = recorded(number)
        for claim in studies.load(number).claims:
            finding = claim.judge(rows)
            reason = UNDECIDED.get((number, claim.id))
            if reason is None:
                assert finding.outcome != NOT_MEASURABLE, (number, claim.id, finding.figure)
            else:
                assert (finding.outcome, finding.figure) == (NOT_MEASURABLE, reason)


def test_one_line_says_what_was_not_timed_and_why() -> None:
    notes = [
        "rung a cannot compute matmul A 4 x 4 row. matmul/a: it takes no float8.",
        "rung a cannot compute matmul A 8 x 8 row. matmul/a: it takes no float8.",
        "cold sets of 64 matrices would take too much memory",
    ]
    rows = [
        study_row("003", "sizes", name, note=note, n=n)
        for n, (name, note) in enumerate(zip("aab", notes, strict=True))
    ]
    assert show.absences(Rows(rows)) == (
        "on cuda a (2 rows: it takes no float8); "
        "on cuda b (1 rows: cold sets of N matrices would take too much memory)"
    )
    assert show.absences(Rows([study_row("003", "sizes", "a", 1.0, n=4)])) == ""


def test_rows_of_the_cpu_stand_beside_the_printed_ones() -> None:
    half = study_row("003", "sizes", "fp16", 90.0, backend="cpu", n=512)
    codes = study_row("003", "sizes", "int8", 45.0, backend="cpu", n=512)
    lines = {line[1]: line for line in document_003.comparison(Rows([half, codes]))}
    header = document_003.STUDY.table[0]
    found = dict(zip(header, lines["int8, on our CPU"], strict=True))
    assert (found["3090 us"], found["warm us"], found.get("warm x torch", "")) == (
        "3.34",
        "45.00",
        "",
    )
    loop = study_row("004", "cpu", "scalar loop", 700.0, backend="cpu", m=64, n=64)
    lines = {line[0]: line for line in document_004.comparison(Rows([loop]))}
    assert lines["scalar loop, on our CPU"][1:3] == ("822.1", "700.00")


def test_every_row_goes_out_as_csv(tmp_path: Path) -> None:
    path = tmp_path / "study-003.jsonl"
    rows = [
        study_row("003", "sizes", "torch", 3.0, n=512),
        study_row("003", "sizes", "a", note="none, here", n=7),
    ]
    store.append(path, [machine(), *rows])
    given = ["003", "--show", "--device", "cpu", "--csv", "--out", str(tmp_path)]
    result = CliRunner().invoke(command, given)
    assert result.exit_code == 0, result.output
    lines = list(csv.DictReader((tmp_path / "study-003.csv").open()))
    assert [line["name"] for line in lines] == ["torch", "a"]
    assert (lines[0]["n"], lines[0]["median_us"], lines[0]["runs"]) == ("512", "3.0", "8")
    assert (lines[1]["median_us"], lines[1]["note"]) == ("", "none, here")


def test_rows_that_are_taken_in_go_where_results_go_and_never_into_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, other, out = (tmp_path / name / "study-003.jsonl" for name in ("a", "b", "c"))
    store.append(record, [machine(), study_row("003", "sizes", "torch", 3.0, n=512)])
    store.append(other, [machine(), study_row("003", "sizes", "int8 codes", 5.0, n=512)])
    kept = record.read_bytes()
    monkeypatch.setattr(store, "on_record", lambda number: [record])
    given = ["003", "--show", "--device", "cpu", "--out", str(out.parent)]
    result = CliRunner().invoke(command, [*given, "--take", str(other)])
    assert result.exit_code == 0, result.output
    assert [row.name for row in store.read(out, "003")] == ["int8 codes"]
    assert record.read_bytes() == kept


def test_studies_make_a_page(tmp_path: Path) -> None:
    path, page = tmp_path / "study-003.jsonl", tmp_path / "page.html"
    here = study_row("003", "sizes", "torch", 3.0, n=512, figures={"gbs": 9.0})
    later = study_row("003", "sizes", "<b>", 5.0, n=1024, figures={"gbs": 7.0})
    store.append(path, [machine(), here, later])
    result = CliRunner().invoke(report, [str(path), "-o", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.count("data:image/svg+xml;base64,") >= 2
    assert "217.10 by formula" in text
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    printed = CliRunner().invoke(report, [str(path)], env={"COLUMNS": "200"})
    assert "torch" in printed.output


def test_recording_anew_loses_no_row_and_no_verdict(tmp_path: Path) -> None:
    here, later = machine(), dataclasses.replace(machine(), timestamp="2026-11-30T00:00:00+00:00")
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    kept = study_row("003", "sizes", "torch", 3.0, n=512)
    again = study_row("003", "sizes", "int8 codes", 5.0, n=512)
    store.append(old, [here, kept, again, study_row("003", "sizes", "int4 codes", 7.0, n=512)])
    fresh = dataclasses.replace(again, environment=later.id, times_us=times(4.0))
    unable = study_row("003", "sizes", "int4 codes", note="no room", n=512)
    unable = dataclasses.replace(unable, environment=later.id)
    added = dataclasses.replace(fresh, name="fp16 two_step")
    store.append(new, [later, fresh, unable, added])
    assert store.add(old, store.read(new, "003"), "003") == 3
    found = {r.name: r for r in store.read(old, "003")}
    assert {name: r.us for name, r in found.items()} == {
        "torch": 3.0, "int8 codes": 4.0, "int4 codes": 7.0, "fp16 two_step": 4.0,
    }  # fmt: skip
    assert found["int8 codes"].environment == later.id
    assert not list(tmp_path.glob("*.new"))
    store.append(old, [later, unable])
    assert store.read(old, "003").where(name="int4 codes")[0].us == 7.0


def test_limits_of_001() -> None:
    assert verdict("001", "loading", total("shared tile", {11: 60.0})) == FAILED
    heavy = [
        study_row(
            "001",
            document_001.TOTAL,
            "shared tile",
            300.0,
            temperature="once",
            n=11,
            figures=dict.fromkeys(PARTS, 60.0),
        )
    ]
    assert verdict("001", "loading", heavy) == CONFIRMED
    assert verdict("001", "eigen-45", total("eigen", {10000: 46e6}, "cpu")) == CONFIRMED
    assert verdict("001", "eigen-45", total("eigen", {5000: 5e6}, "cpu")) == FAILED
    assert verdict("001", "cublas-10", total("cublas", {26000: 3e6})) == CONFIRMED
    assert verdict("001", "cublas-10", total("cublas", {13000: 2e6})) == FAILED
    cubic = {n: 1e-3 * n**3 for n in (256, 512, 1024)}
    square = {n: 1e3 * n**2 + 40 for n in (256, 512, 1024)}
    cpu = total("cpu loop", cubic, "cpu")
    assert verdict("001", "naive-scales", cpu + total("naive", cubic)) == CONFIRMED
    assert verdict("001", "naive-scales", cpu + total("naive", square)) == FAILED
    shared = total("shared tile", {n: t / 9 for n, t in cubic.items()})
    assert verdict("001", "shared-gain", total("naive", cubic) + shared) == CONFIRMED
    assert verdict("001", "shared-gain", total("naive", cubic) * 2) == NOT_MEASURABLE
    near = total("shared tile", {n: t / 2 for n, t in cubic.items()})
    assert verdict("001", "shared-gain", total("naive", cubic) + near) == FAILED
    assert verdict("001", "kernel-1024", total("shared tile", {1024: 900.0})) == CONFIRMED
    assert verdict("001", "kernel-1024", total("shared tile", {1024: 45.0})) == FAILED
    assert verdict("001", "malloc-64", total("shared tile", {64: 900.0})) == FAILED
    assert verdict("001", "malloc-64", total("shared tile", {64: 45.0})) == CONFIRMED


def test_counters_decide() -> None:
    def counted(number: str, name: str, **figures: float) -> StudyRow:
        named = {k.replace("_", " "): v for k, v in figures.items()}
        return study_row(number, "counters", name, temperature="once", figures=named)

    for conflicts, expected in ((0.0, CONFIRMED), (9e3, CONFIRMED), (5e4, FAILED)):
        waves = {"shared load wavefronts": 1e6, "bank conflicts, loads": conflicts}
        waves |= {"shared store wavefronts": 9.0, "bank conflicts, stores": 1.0}
        one = study_row("001", "counters", "shared_tile", temperature="once", figures=waves)
        assert verdict("001", "banks", [one]) == expected
    for memory, expected in ((70.0, CONFIRMED), (30.0, FAILED)):
        busy = {"SM throughput percent": 60.0, "memory throughput percent": memory}
        one = study_row("001", "counters", "shared_tile", temperature="once", figures=busy)
        assert verdict("001", "balanced", [one]) == expected
    assert verdict("001", "barrier", [counted("001", "s", barrier_stall_cycles=13.0)]) == CONFIRMED
    assert verdict("001", "barrier", [counted("001", "s", barrier_stall_cycles=2.0)]) == FAILED
    pairs = [counted("002", "naive", load_requests=6400.0)]
    assert verdict("002", "tile-width", pairs) == NOT_MEASURABLE
    good = [*pairs, counted("002", "shared_tile", load_requests=200.0)]
    assert verdict("002", "tile-width", good) == CONFIRMED
    bad = [*pairs, counted("002", "shared_tile", load_requests=400.0)]
    assert verdict("002", "tile-width", bad) == FAILED
    for requests, expected in ((150.0, CONFIRMED), (199.0, FAILED)):
        wide = [good[-1], counted("002", "rectangular_tile", load_requests=requests)]
        assert verdict("002", "rectangular", wide) == expected
    m, n = document_000.COUNTED["m"], document_000.COUNTED["n"]
    compulsory, of_x = m * n * 4 / 32, m // 32 * n
    for misses, expected in ((compulsory, FAILED), (compulsory + of_x, CONFIRMED)):
        sectors = {"load sectors": 9e9, "load sectors hit in L1": 9e9 - misses}
        one = study_row("000", "counters", "thread_per_row", temperature="once", figures=sectors)
        assert verdict("000", "l2", [one]) == expected
    table = [
        "==PROF== noise",
        '"ID","Kernel Name","sm__throughput.avg.pct_of_peak_sustained_elapsed"',
        '"","","%"',
        '"0","naive","1,081.5"',
    ]
    assert ncu.parse(table, METRICS) == [("naive", {"SM throughput percent": 1081.5})]
    assert ncu.parse(["==ERROR== no permission"], METRICS) == []


def test_ceilings_decide() -> None:
    kernel = study_row("001", "kernels", "shared tile 32", 9.0, figures={"gflops": 900.0}, n=1024)
    assert verdict("001", "computing", [kernel], fma=1000.0) == CONFIRMED
    assert verdict("001", "computing", [kernel], fma=9000.0) == FAILED
    assert verdict("001", "computing", [kernel]) == NOT_MEASURABLE
    size = {"m": 4096, "n": 4096}
    three = [
        study_row(
            "002", "rows x columns", name, 9.0, figures={"gflops": 900.0, "gbs": 10.0}, **size
        )
        for name in ("naive", "shared_tile", "rectangular_tile")
    ]
    assert verdict("002", "compute-bound", three, fma=1000.0, read=4000.0) == CONFIRMED
    assert verdict("002", "compute-bound", three, fma=9000.0, read=4000.0) == FAILED
    fits = {"largest n": 26000.0, "next n refused": 1.0}
    last = study_row(
        "001", "largest", totals.REFUSED, temperature="once", figures=fits, note="no room"
    )
    assert verdict("001", "memory-end", [last]) == CONFIRMED


def widths(best: Mapping[str, int], naive: float = 55.0) -> list[StudyRow]:
    rows = []
    for algorithm in document_004.ALGORITHMS:
        for width in document_004.WIDTHS:
            us = 10.0 + abs(
                document_004.WIDTHS.index(width) - document_004.WIDTHS.index(best[algorithm])
            )
            rows.append(study_row("004", "widths", f"{algorithm} {width}", us, m=64, n=128))
    for name, us in (("naive", naive), ("naive transposed", 73.0)):
        rows.append(study_row("004", "widths", name, us, m=64, n=128))
    return rows


def test_widths_wins_and_ratios_of_004() -> None:
    even = widths(dict.fromkeys(document_004.ALGORITHMS, 64))
    assert verdict("004", "width-64", even) == CONFIRMED
    uneven = dict.fromkeys(document_004.ALGORITHMS, 64) | {"block_multiply_transposed": 8}
    assert verdict("004", "width-64", widths(uneven)) == FAILED
    assert verdict("004", "always-faster", even) == CONFIRMED
    assert verdict("004", "always-faster", widths(uneven, naive=5.0)) == FAILED
    assert verdict("004", "ratio-block", even) == CONFIRMED
    assert verdict("004", "ratio-transposed", even) == FAILED
    assert verdict("004", "ratio-then", even) == CONFIRMED
    assert verdict("004", "transposed-wins", even) == FAILED
    mixed = [
        *even,
        study_row("004", "widths", "naive transposed", 1.0, m=32, n=128),
        study_row("004", "widths", "block_multiply_transposed 64", 5.0, m=32, n=128),
    ]
    assert verdict("004", "transposed-wins", mixed) == CONFIRMED
    name, side = "block_multiply 64", 1 << 14
    products = [study_row("004", "widths", name, 30.0, m=m, n=m) for m in (side, 256, 512)]
    for zero, expected in ((1.0, CONFIRMED), (10.0, FAILED)):
        fixed = [
            study_row("004", "fixed cost", "zeroing and storing y", us, m=m)
            for m, us in ((1 << 7, zero), (side, 0.1))
        ]
        assert verdict("004", "zeroing", [*products, *fixed]) == expected


def test_printed_figures_are_recomputed() -> None:
    assert formula_gbs(8192, 16, 618377.7) == pytest.approx(217.10, abs=0.01)
    assert document("003")["printed"]["P100"]["gbs"]["torch"][4] == 202.083
    wrong = {(device, column, n) for device, column, n, *_ in document_003.deviations()}
    assert ("P100", "torch", 8192) in wrong
    assert ("P100", "fp16", 8192) not in wrong
    averages = document("004")["printed"]["average_ms"]
    for name in document_004.ALGORITHMS:
        width_64 = document("004")["printed"]["width_ms"][name][document_004.WIDTHS.index(64)]
        assert width_64 == averages[name]


def sizes_of(name: str) -> set[int]:
    """Return the sizes that document 001's full grid times an implementation at."""
    return {
        int(step.filed["n"])
        for step in document_001.steps("cuda", True)
        if isinstance(step, Task) and step.experiment == document_001.TOTAL and name in step.names
    }


def test_full_grids_are_the_documents() -> None:
    assert len(document_004.shapes()) == 84
    assert (2, 128) in document_004.shapes()
    assert (1 << 14, 1 << 14) in document_004.shapes()
    own, cublas = (sizes_of(name) for name in ("shared tile", "cublas"))
    assert own == {*range(1, 992, 10), *range(1000, 4001, 100), *(1 << p for p in range(5, 13))}
    assert {1, 5001, 10000, 26000} <= cublas
    assert {*range(1, 5002, 10), *range(5000, 10001, 1000)} <= sizes_of("eigen")
    assert max(sizes_of("cpu loop")) == 1024
    assert max(sizes_of("naive")) == 2048
    cells = [s for s in document_000.steps("cuda", True) if s.experiment == "rows x columns"]
    assert {(s.m, s.n) for s in cells} == {
        (m, n) for m in document_000.SIZES for n in document_000.SIZES
    }
    cells = [s for s in document_002.steps("cuda", True) if s.experiment == "rows x columns"]
    assert len({(s.m, s.n) for s in cells}) == 25
    runs = [s for s in document_004.steps("cuda", True) if s.experiment == "five algorithms"]
    assert sum(len(s.lanes) for s in runs) == 5 * 420
    assert all(s.uniform for s in runs)
    assert {s.m for s in document_003.steps("cuda", False)} == set(document_003.SIZES)
    for number in NUMBERS:
        study = studies.load(number)
        for backend in ("cpu", "cuda"):
            thin = {
                runner.key_in(s, backend, "d", n)
                for s in study.steps(backend, False)
                for n in s.names
            }
            full = {
                runner.key_in(s, backend, "d", n)
                for s in study.steps(backend, True)
                for n in s.names
            }
            assert thin
            assert thin <= full
        assert document(number)["study"]["left_out"]


def test_what_a_usual_grid_leaves_out_is_said_in_the_documents_own_file() -> None:
    words = {number: document(number)["study"]["thin"] for number in NUMBERS}
    every = {*document_001.OWN_SIZES, *document_001.CUBLAS_SIZES}
    assert f"all but {len(document_001.THIN_SIZES)} of {len(every)} sizes" in words["001"]
    for number, sizes in (
        ("000", document_000.THIN),
        ("000", document_000.CPU_THIN),
        ("002", document_002.THIN),
        ("003", [n for n in document_003.SIZES if n not in document_003.CPU_SIZES]),
    ):
        joined = " and " if number == "003" else ", "
        assert joined.join(map(str, sizes)) in words[number]
    skipped = [p for p in document_004.EXPONENTS if p not in document_004.THIN_EXPONENTS]
    assert ", ".join(f"2^{p}" for p in skipped) in words["004"]


def test_products_are_judged() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((40, 40)).astype(np.float32) for _ in "ab")
    judge(a, b, a @ b)
    for wrong in (b @ a, (a @ b).T, a @ b + np.float32(1e-3), np.full_like(a, np.nan)):
        with pytest.raises(ArithmeticError):
            judge(a, b, wrong)


def test_the_cpu_bench_times_rungs_and_peers() -> None:
    lanes = (
        Lane("loop", "scalar_loop"),
        Lane("loop, transposed", "scalar_loop", flip=True),
        Lane("codes", "auto", form="int4 codes"),
        Lane("numpy", None, peer="numpy"),
        Lane("none", None, peer="nobody"),
    )
    found = CpuBench(seconds=0.01).measure(
        Cell("test", "matvec", 24, 56, lanes, "warm", layout="col"), lanes
    )
    assert set(found) == {lane.name for lane in lanes}
    assert found["none"].times_us is None
    assert "nobody" in found["none"].note
    for name in ("loop", "loop, transposed", "codes", "numpy"):
        assert found[name].times_us is not None, found[name].note
        assert found[name].figures["gbs"] > 0


class Faulty(CellBench):
    """A bench whose lanes called "full" find no memory, and those called "lost" no device."""

    backend, max_blocks, block_s, lane_s = "cuda", 8, 1e-3, 1.0

    def __init__(self, clock: FakeClock) -> None:
        self.bench, self.made = SimpleNamespace(clock=clock), []
        super().__init__("X", 1.0)

    def sets(self, cell: Cell, lane: Lane) -> list[int]:
        self.made.append(lane.matrix)
        return [lane.matrix]

    def bind(self, cell: Cell, lane: Lane, sets: list[int]) -> Entry:
        if lane.name in ("full", "lost"):
            raise DeviceError(f"it is {lane.name}", restart=lane.name == "lost")
        facts = Facts(
            make_problem("matvec", cell.m, cell.n, 1, ("float32",) * 3),
            "rung",
            "warm",
            {"set": sets[0]},
        )
        return Entry(lane.name, lambda i: None, about=facts)


def test_a_full_device_ends_one_lane_and_a_lost_one_the_study() -> None:
    clock = FakeClock({"a": 1e-3, "b": 2e-3, "c": 4e-3})
    lanes = (Lane("a", "r"), Lane("full", "r"), Lane("b", "r"), Lane("c", "r", matrix=1))
    bench, cell = Faulty(clock), Cell("test", "matvec", 64, 64, lanes, "warm")
    found = bench.measure(cell, lanes)
    assert found["full"] == Measured(note="it is full")
    assert [found[n].times_us.median for n in "abc"] == pytest.approx([1e3, 2e3, 4e3])
    assert found["c"].params == {"set": 1}
    assert found["a"].figures["gbs"] == pytest.approx(4 * (64 * 64 + 128) * 1e-6)
    assert bench.made == [0, 1], "lanes of one form share their operands"
    assert set(bench.measure(cell, lanes[1:2])) == {"full"}, "nobody is left to be timed"
    with pytest.raises(DeviceError, match="it is lost"):
        bench.measure(cell, (Lane("lost", "r"),))


def test_a_peer_beside_which_nothing_of_ours_is_proved_takes_no_part() -> None:
    class Unproved(Faulty):
        def bind(self, cell: Cell, lane: Lane, sets: list[int]) -> Entry | str:
            return CellBench.bind(self, cell, lane, sets)

    def theirs(sets: list[int], peers: list[object]) -> None:
        raise TypeError("no proved rung computes this")

    bench = Unproved(FakeClock({}))
    bench.bench.theirs = theirs
    lanes = (Lane("torch", None, peer="torch"),)
    found = bench.measure(Cell("test", "matvec", 8, 8, lanes, "warm"), lanes)
    assert found["torch"].note == "no proved rung computes this"


@pytest.mark.parametrize("number", NUMBERS)
def test_tables_and_plots_of_a_whole_grid(number: str, tmp_path: Path) -> None:
    study, rows = studies.load(number), []
    for step in study.steps("cuda", False):
        if isinstance(step, Cell):
            rows += [
                study_row(
                    number,
                    step.experiment,
                    lane.name,
                    7.0,
                    temperature=step.temperature,
                    figures={"gbs": 5.0, "gflops": 6.0},
                    **step.filed,
                )
                for lane in step.lanes
            ]
    here = dataclasses.replace(machine(), backend="cuda")
    whole = Rows(rows, {here.id: here})
    assert show.comparison_table(number, whole).rows
    assert len(show.verdict_table(number, whole).rows) == len(CLAIMS[number])
    drawn = dict(charted.pictures(study, whole))
    assert drawn
    assert not any(" " in name for name in drawn)
    by_size = sorted(drawn.values(), key=lambda chart: -len(repr(chart)))
    smallest = {type(chart): chart for chart in by_size}
    for chart in smallest.values() if number in DRAWN_OF else ():
        assert ET.fromstring(draw(chart)).tag.endswith("svg")


def test_the_command_shows_verdicts_without_measuring(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        command,
        ["003", "--device", "cpu", "--show", "--out", str(tmp_path)],
        env={"COLUMNS": "200"},
    )
    assert result.exit_code == 0, result.output
    assert "left out" not in result.output
    assert "differs on this device" in result.output
    assert "How fast can a matrix-vector product be" in result.output
    assert "217.10 by formula" in result.output


def test_pages_are_up_to_date(tmp_path: Path, limit: Callable[..., None]) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "evidence", tmp_path / "evidence")
    assert study_pages.update(tmp_path) == [], "run `make docs`"
    limit(study_pages, DOCUMENTS=("003",))  # the one that changes
    page = tmp_path / "docs" / "studies" / "003.md"
    page.write_text(page.read_text().replace("217.10", "200.00"))
    assert page in study_pages.update(tmp_path)
    here = dataclasses.replace(machine(), backend="cuda", device="Test device")
    one = study_row("003", "sizes", "torch", 5.0, figures={"gbs": 9.0}, n=512)
    one = dataclasses.replace(one, environment=here.id)
    store.append(tmp_path / "evidence" / "aaa" / "study-003.jsonl", [here, one])
    changed = study_pages.update(tmp_path)
    assert tmp_path / "docs" / "img" / "study-003-devices.svg" in changed
    assert "on Test device" in page.read_text(), "another device stands beside the first"


def test_codes_are_not_read_between_warm_halves() -> None:
    for step in studies.load("003").steps("cuda", False):
        assert len({lane.form == "float16" for lane in step.lanes}) == 1, step


def tuned(ours: float, cold: float | None = None) -> list[StudyRow]:
    rows = []
    for temperature, us in (("warm", ours), ("cold", ours if cold is None else cold)):
        for n in document_003.SIZES:
            rows.append(
                study_row("003", "sizes", document_003.TUNED, us, temperature=temperature, n=n)
            )
            rows.append(study_row("003", "sizes", "torch", 10.0, temperature=temperature, n=n))
    return rows


def test_the_tuned_kernel_has_to_win_by_a_tenth_warm_and_cold() -> None:
    claim = "fp16-tuned-over-torch"
    assert verdict("003", claim, tuned(9.0)) == CONFIRMED
    assert verdict("003", claim, tuned(9.2)) == FAILED
    assert verdict("003", claim, tuned(9.0, cold=9.2)) == FAILED
    judge = next(c.judge for c in document_003.CLAIMS.all() if c.id == claim)
    words = judge(Rows(tuned(9.0, cold=9.2))).figure
    assert "1.087 at 16384, cold" in words
    assert "warm" not in words


def race(algorithm: str, ours: float, naive: float, **case: int) -> list[StudyRow]:
    rows = [study_row("004", "widths", document_004.NAIVE[algorithm], naive, **case)]
    for width in document_004.WIDTHS:
        us = 1.0 if width == 8 else ours
        rows.append(study_row("004", "widths", f"{algorithm} {width}", us, **case))
    return rows


def test_where_block_and_multiply_loses_above_a_megabyte_is_said() -> None:
    big, small = {"m": 64, "n": 8192}, {"m": 64, "n": 128}
    won = race("block_multiply", 5.0, 50.0, **big)
    assert verdict("004", "above-1-mb", won) == CONFIRMED
    assert verdict("004", "above-1-mb", race("block_multiply", 5.0, 4.0, **big)) == FAILED
    assert verdict("004", "above-1-mb", race("block_multiply", 5.0, 4.0, **small)) == NOT_MEASURABLE
    slower = race("block_multiply_transposed", 38.0, 10.0, **big)
    judge = next(c.judge for c in document_004.CLAIMS.all() if c.id == "above-1-mb")
    finding = judge(Rows([*won, *slower]))
    assert finding.outcome == CONFIRMED  # the transposed form is another algorithm
    assert "block_multiply_transposed in 0 of 1 cases (1 at its best width)" in finding.figure


def test_what_has_no_size_is_not_compared_between_devices() -> None:
    here, there = (
        Rows(study_row("001", what, "whole", us, **case) for what, case in parts)
        for us, parts in ((1.0, (("largest", {}), ("sizes", {"n": 8}))),) * 2
    )
    table = show.device_times("001", {"A": here, "B": there})
    assert [line[0] for line in table.rows] == ["sizes"]
