"""Nsight Compute's output is read right, given to the right rungs, and absent tools are told."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT, TESTS
from counters import counters
from counters.__main__ import COMMAND, kept
from counters.counters import METRICS, Counted, Mark
from gemmule_lab.cli import run
from gemmule_lab.profile import ncu
from gemmule_lab.records import results
from pages import newest

SAMPLE = TESTS / "data" / "ncu_raw.csv"  # recorded on an H200, columns thinned
MARKS = [
    Mark("matvec", "thread_per_row", "t", {"block": 128}, ("thread_per_row",)),
    Mark("matvec", "col_transposed", "t", {"block": 128}, ("col_transposed",)),
    Mark(
        "matvec",
        "block_multiply_transposed",
        "t",
        {"width": 16},
        ("zero_sums", "block_multiply_transposed", "store_sums"),
    ),
    Mark("matvec", "warp_per_row", "t", {"warps": 4}, ("warp_per_row",)),
]


def test_the_recorded_page_is_read() -> None:
    rows = ncu.parse(SAMPLE.read_text().splitlines(), METRICS)
    assert [name for name, _ in rows][:3] == ["thread_per_row", "col_transposed", "zero_sums"]
    first = rows[0][1]
    assert set(first) == set(METRICS)
    assert first["DRAM bytes read"] == 33_570_816
    assert first["load sectors"] / first["load requests"] == 16.5
    assert first["occupancy %"] == 6.23


@pytest.mark.parametrize(
    "text", ["", "==ERROR== No kernels were profiled.", '"ID","Kernel Name"\n', "x,y\n1,2\n"]
)
def test_pages_without_kernels_give_nothing(text: str) -> None:
    assert ncu.parse(text.splitlines(), METRICS) == []


def test_missing_counters_are_left_out() -> None:
    lines = [
        '"ID","Kernel Name","smsp__inst_executed.sum","dram__bytes_read.sum"',
        '"","","inst","byte"',
        '"0","k","n/a","64"',
    ]
    assert ncu.parse(lines, METRICS) == [("k", {"DRAM bytes read": 64.0})]


def test_kernels_go_to_the_rungs_that_launched_them() -> None:
    rows = ncu.parse(SAMPLE.read_text().splitlines(), METRICS)
    found = list(counters.assign(MARKS, rows, "NVIDIA H200", "2026-11-21"))
    assert [one.rung for one in found] == [mark.rung for mark in MARKS]
    parts = rows[2:5]
    summed = found[2].counters
    assert summed["warp instructions"] == sum(c["warp instructions"] for _, c in parts)
    spans = [c["time ns"] for _, c in parts]
    mean = sum(c["occupancy %"] * t for (_, c), t in zip(parts, spans, strict=True)) / sum(spans)
    assert summed["occupancy %"] == pytest.approx(mean, abs=1e-3)
    assert found[3].counters == rows[5][1]


def test_a_kernel_out_of_place_ends_the_assignment() -> None:
    rows = ncu.parse(SAMPLE.read_text().splitlines(), METRICS)
    shifted = [rows[0], *rows[2:]]
    assert [one.rung for one in counters.assign(MARKS, shifted, "X", "d")] == ["thread_per_row"]
    assert list(counters.assign(MARKS, [], "X", "d")) == []


def stand_in(folder: Path, body: str) -> None:
    """Put an ncu into `folder`; its last argument is the file of marks."""
    program = folder / "ncu"
    program.write_text(f"#!/bin/sh\nfor last; do :; done\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_a_stand_in_for_the_tool_is_run_and_read(
    tmp_path: Path, setting: Callable[..., None]
) -> None:
    lines = [
        json.dumps(
            {
                "schema": counters.SCHEMA,
                "op": m.op,
                "rung": m.rung,
                "title": m.title,
                "params": dict(m.params),
                "kernels": m.kernels,
            }
        )
        for m in MARKS
    ]
    (tmp_path / "marks").write_text("".join(f"{line}\n" for line in lines))
    stand_in(tmp_path, f'/bin/cp "{tmp_path}/marks" "$last"; /bin/cat "{SAMPLE}"')
    setting(PATH=tmp_path)
    found = counters.count("NVIDIA H200", "2026-11-21", ["matvec"], seconds=1)
    assert [one.rung for one in found] == [mark.rung for mark in MARKS]
    path = tmp_path / "evidence" / "nvidia-h200" / counters.FILE
    counters.write(path, found)
    assert newest.counters(tmp_path / "evidence") == found


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM: no permission'; exit 1", "no permission"),
        ("exit 3", "no output"),
    ],
)
def test_what_the_tool_says_is_told(
    tmp_path: Path, setting: Callable[..., None], body: str, note: str
) -> None:
    stand_in(tmp_path, body)
    setting(PATH=tmp_path)
    (found,) = counters.count("NVIDIA X", "2026-11-21", ["matvec"], seconds=1)
    assert note in found.note
    assert not found.counters


def test_an_absent_tool_is_told(fault: Callable[..., Any]) -> None:
    fault(ncu, "find_ncu", lambda sound: None)
    (found,) = counters.count("NVIDIA X", "2026-11-21", ["matvec"])
    assert "not installed" in found.note


def test_the_tool_is_found_in_cuda_home(tmp_path: Path, setting: Callable[..., None]) -> None:
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path / "bin", "exit 0")
    setting(PATH=tmp_path / "nowhere", CUDA_HOME=tmp_path)
    assert ncu.find_ncu() == str(tmp_path / "bin" / "ncu")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2}',
        '{"schema": 1, "op": "x"}',
        "[" * 5000,
        '{"schema":1,"op":"a","rung":"b","title":"c","device":"d","date":"e","note":"","params":{},'
        '"kernels":[],"counters":{"x":"many"}}',
    ],
)
def test_malformed_lines_are_left_out(line: str, tmp_path: Path) -> None:
    good = Counted("matvec", "naive", "t", "NVIDIA X", "2026-11-21", counters={"time ns": 1.0})
    path = tmp_path / "x" / counters.FILE
    counters.write(path, [good])
    path.write_text(line + "\n" + path.read_text())
    assert newest.counters(tmp_path) == [good]


def test_what_was_not_counted_anew_stays(tmp_path: Path) -> None:
    def one(op: str, rung: str, date: str) -> Counted:
        return Counted(op, rung, "t", "X", date, counters={"time ns": 1.0})

    path = tmp_path / "x" / counters.FILE
    old = [one("matvec", "a", "2026-11-20"), one("matmul", "a", "2026-11-20")]
    counters.write(path, old)
    anew = [one("matmul", "a", "2026-11-21"), one("matmul", "b", "2026-11-21")]
    counters.write(path, anew)
    assert newest.counters(tmp_path) == [old[0], *anew]


def test_ladders_that_are_not_asked_for_keep_their_times(tmp_path: Path) -> None:
    path = next((ROOT / "evidence").glob("*/ladder.jsonl"))
    title = "4096 x 4096, A x, float16"
    items = kept(path, {title})
    results.replace(tmp_path / path.name, items)
    found = results.read(tmp_path / path.name)
    assert {row.group for row in found.rows} == {title}
    assert len(found.rows) == sum(row.group == title for row in results.read(path).rows) > 0
    assert set(found.environments) == {row.environment for row in found.rows}
    assert kept(tmp_path / "nowhere", {title}) == []


def test_the_newest_file_counts(tmp_path: Path) -> None:
    for name, date in (("a", "2026-11-20"), ("b", "2026-11-21"), ("c", "2025-01-01")):
        counters.write(tmp_path / name / counters.FILE, [Counted("o", name, "t", "X", date)])
    assert [one.rung for one in newest.counters(tmp_path)] == ["b"]
    assert newest.counters(tmp_path / "nowhere") == []


def test_the_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--evidence", "nowhere", "--op", "matvecs"], COMMAND) == 2
    assert "is no ladder" in capsys.readouterr().err
