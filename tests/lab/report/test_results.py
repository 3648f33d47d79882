"""Results files: what is written is read back, and nothing hostile or torn gets through."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import multiprocessing
import re
import threading

import pytest

from gemmule.core.problem import Problem
from gemmule.storage.decode import decode
from gemmule.timing.sampler import ratio
from gemmule_lab.ceilings.best import above_ceiling, enforce
from gemmule_lab.records.log import MAX_LINE_BYTES
from gemmule_lab.records.results import append, geomean, read
from gemmule_lab.records.rows import (
    Ceiling,
    Environment,
    Facts,
    Row,
    Speedup,
    Times,
    bytes_saved,
    make_row,
    speedup_of,
)
from lab_rows import QUANT, machine, samples


def row(environment: Environment, us: float = 100.0, **changes: object) -> Row:
    problem = Problem("matvec", 1000, 1000)
    made = make_row(
        environment,
        Facts(problem, "rung", "cold", params={"rows": 4}, error_ratio=0.25, proof="ab12"),
        samples("threads", us),
    )
    return dataclasses.replace(made, **changes)


def test_what_is_written_is_read_back(tmp_path) -> None:
    path, here = tmp_path / "new" / "results.jsonl", machine()
    ours, theirs = samples("threads", 100, spread=0.01), samples("numpy", 120, spread=0.01)
    problem = Problem("matvec", 512, 1024, a="uint4", b="float16", out="float16", quant=QUANT)
    quantised = make_row(
        here,
        Facts(problem, "rung", "cold"),
        ours,
        speedups={"numpy": speedup_of(ratio(ours, theirs))},
    )
    append(path, [here, row(here)])
    append(path, [quantised, row(here, kind="peer", flags=("a flag",), percent_of_ceiling=None)])
    results = read(path)
    assert results.environments == {here.id: here}
    assert results.rows == (
        row(here),
        quantised,
        row(here, kind="peer", flags=("a flag",), percent_of_ceiling=None),
    )
    assert not results.torn
    assert quantised.speedups["numpy"].value == pytest.approx(1.2)
    assert quantised.speedups["numpy"].verdict == "faster"


def test_figures_of_a_row() -> None:
    made = row(machine(read_gbs=50), us=200)
    assert made.gbs == pytest.approx((1000 * 1000 + 2000) * 4 / 200e-6 * 1e-9)
    assert made.tflops == pytest.approx(2e6 / 200e-6 * 1e-12)
    assert made.percent_of_ceiling == pytest.approx(100 * made.gbs / 50)
    facts = Facts(Problem("matvec", 8, 8), "rung", "warm")
    warm = make_row(machine(), facts, samples("a", 1))
    assert warm.percent_of_ceiling is None
    half = Problem("matvec", 100, 64, a="float16", b="float16", out="float16")
    assert bytes_saved(half) == 100 * 64 * 2


def test_busy_machine_is_flagged() -> None:
    quiet = samples("a", 100)
    busy = dataclasses.replace(quiet, notes=({"preempted": 1},) * 7 + ({"preempted": 0},) * 5)
    facts = Facts(Problem("matvec", 8, 8), "rung", "cold")
    assert make_row(machine(), facts, quiet).flags == ()
    assert "7 of 12 blocks" in make_row(machine(), facts, busy).flags[0]
    throttled = dataclasses.replace(quiet, notes=({"throttle": 0x44}, {"throttle": 5}) * 6)
    assert make_row(machine(), facts, throttled).flags == ("clocks lowered (NVML reasons 0x44)",)


@pytest.mark.parametrize("cut", [(), (0,), (1,), (0, 1)])
def test_a_page_of_several_files_says_that_one_was_cut_off(tmp_path, cut, capsys) -> None:
    from gemmule_lab.cli import run

    files = [tmp_path / f"{number}.jsonl" for number in range(2)]
    for number, path in enumerate(files):
        here = machine(device=f"CPU {number}")
        append(path, [here, row(here), row(here, us=50)])
        if number in cut:
            path.write_bytes(path.read_bytes()[:-20])
    page = tmp_path / "page.html"
    assert run(["report", *map(str, files), "-o", str(page)]) == 0
    assert ("was cut off" in page.read_text()) == bool(cut)
    assert run(["report", *map(str, files)]) == 0
    assert {"CPU 0", "CPU 1"} <= set(re.findall(r"CPU \d", capsys.readouterr().out))


def test_torn_last_line_is_overlooked_then_dropped(tmp_path) -> None:
    path, here = tmp_path / "r.jsonl", machine()
    append(path, [here, row(here)])
    whole = path.read_bytes()
    append(path, [row(here, us=50)])
    path.write_bytes(path.read_bytes()[:-20])
    results = read(path)
    assert results.torn
    assert len(results.rows) == 1
    append(path, [row(here, us=70)])
    assert path.read_bytes().startswith(whole)
    assert [r.times_us.median for r in read(path).rows] == pytest.approx([100, 70])


def test_a_writer_waits_for_another(tmp_path) -> None:
    path, here = tmp_path / "r.jsonl", machine()
    append(path, [here])
    other = threading.Thread(target=append, args=(path, [row(here)]), daemon=True)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        other.start()
        other.join(0.1)
        assert read(path).rows == ()
    other.join(10)
    assert len(read(path).rows) == 1


def _append_many(path, start: int) -> None:
    here = machine()
    for i in range(20):
        append(path, [row(here, us=start + i)])


def test_two_writers_do_not_mix_their_lines(tmp_path) -> None:
    path, here = tmp_path / "r.jsonl", machine()
    append(path, [here])
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append_many, args=(path, s)) for s in (100, 200)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    written = sorted(round(r.times_us.median) for r in read(path).rows)
    assert written == [*range(100, 120), *range(200, 220)]


def change(name: str, value: object):
    def apply(record: dict) -> None:
        *path, last = name.split(".")
        for step in path:
            record = record[step]
        record[last] = value

    return apply


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (change("schema", 2), "schema 2"),
        (change("line", "code"), "'environment' or 'row'"),
        (change("environment", "0" * 16), "does not come before"),
        (change("gbs", "fast"), "row.gbs is of type str"),
        (change("gbs", True), "row.gbs is of type bool"),
        (change("gbs", 1e999), "Infinity"),
        (change("times_us.n", 1.5), "times_us.n"),
        (change("times_us.min", -1.0), "not in the order"),
        (change("times_us.q3", 1.0), "not in the order"),
        (change("problem.op", "rm -rf"), "op is"),
        (change("problem.a", "float31"), "unknown dtypes"),
        (change("problem.a", "uint4"), "quantisation"),
        (change("problem.m", -1), "negative"),
        (change("problem.layout_a", "diagonal"), "layout"),
        (change("problem.quant", {"bits": 4}), "lacks the field"),
        (change("temperature", "hot"), "temperature 'hot'"),
        (change("flags", "one"), "must be an array"),
        (change("flags", [["nested"]]), r"row.flags\[0\]"),
        (change("speedups", {"numpy": {"value": 1.0}}), "lacks the field"),
        (change("params", {"a": {"b": 1}}), "row.params.a"),
        (change("name", "x" * 20_000), "20,000 characters"),
        (change("surprise", 1), "unknown field 'surprise'"),
        (lambda record: record.pop("tflops"), "lacks the field 'tflops'"),
    ],
)
def test_wrong_lines_are_refused(tmp_path, spoil, words: str) -> None:
    path, here = tmp_path / "r.jsonl", machine()
    append(path, [here, row(here)])
    first, second = path.read_text().splitlines()
    record = json.loads(second)
    spoil(record)
    path.write_text(first + "\n" + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=words) as caught:
        read(path)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not json", "line 1"),
        (b"[1, 2]", "not a JSON object"),
        (b"[" * 100_000, "line 1"),
        (b'"' + b"x" * (MAX_LINE_BYTES + 1) + b'"', "a line has at most"),
        (b"\xff\xfe", "line 1"),
    ],
)
def test_hostile_bytes_are_refused(tmp_path, line: bytes, words: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(ValueError, match=words):
        read(path)


def test_edited_environment_is_refused(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    append(path, [machine()])
    path.write_text(path.read_text().replace("Test CPU", "Best CPU"))
    with pytest.raises(ValueError, match="digest"):
        read(path)


def test_numbers_that_json_overflows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"here\.median is not a finite number"):
        decode(Times, {"median": 1e999, "q1": 1.0, "q3": 2.0, "min": 1.0, "n": 1}, "here")


def test_file_too_large_is_not_read(tmp_path, monkeypatch) -> None:
    path = tmp_path / "r.jsonl"
    append(path, [machine()])
    monkeypatch.setattr("gemmule_lab.records.log.MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read(path)


def test_row_above_the_ceiling_is_kept_flagged_and_measured_again() -> None:
    here = machine(read_gbs=40.0)
    fine, above = row(here, us=100), row(here, us=85)  # 40.1 and 47.2 GB/s
    assert above_ceiling(fine, here.ceilings, "cpu") is None
    assert above_ceiling(above, here.ceilings, "cpu") == "above the read ceiling by 18 %"
    assert above_ceiling(row(here, us=95), here.ceilings, "cpu") is None
    assert above_ceiling(row(here, us=95), here.ceilings, "cuda") is not None
    warm = dataclasses.replace(above, temperature="warm")
    assert above_ceiling(warm, here.ceilings, "cpu") is None

    calls: list[int] = []

    def again() -> dict[str, Ceiling]:
        calls.append(1)
        return {"read": dataclasses.replace(here.ceilings["read"], value=45.0)}

    rows, held = enforce([fine], here.ceilings, "cpu", again)
    assert (calls, rows, held) == ([], (fine,), here.ceilings)
    rows, held = enforce([fine, above], here.ceilings, "cpu", again)
    assert calls == [1]
    assert held["read"].value == 45.0
    assert held["read"].measured == 2
    assert rows[1].flags == ()  # 47.2 is within 10 % of 45
    assert rows[1].percent_of_ceiling == pytest.approx(100 * above.gbs / 45)
    lower = {"read": dataclasses.replace(here.ceilings["read"], value=39.0)}
    for given, value, measured in (({}, 40.0, 1), (lower, 40.0, 2)):  # nothing, and a lower one
        rows, held = enforce([above], here.ceilings, "cpu", lambda given=given: given)
        assert (held["read"].value, held["read"].measured) == (value, measured)
        assert rows[0].flags == ("above the read ceiling by 18 %",)
    rows, _ = enforce([row(here, us=50)], here.ceilings, "cpu", again)
    assert rows[0].flags == ("above the read ceiling by 78 %",)


def test_means() -> None:
    assert geomean([0.5, 2.0, 1.0]) == pytest.approx(1.0)
    for bad in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="positive"):
            geomean(bad)


def test_speedup_of_inverts_a_ratio_of_times() -> None:
    speedup = speedup_of(ratio(samples("a", 50, spread=0.01), samples("b", 100)))
    assert isinstance(speedup, Speedup)
    assert (speedup.value, speedup.verdict) == (pytest.approx(2.0, rel=1e-3), "faster")
    assert speedup.low < 2.0 < speedup.high
