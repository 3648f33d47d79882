"""``gemmule tune``: what is asked for, what is shown, what is stored."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.core.problem import numpy_dtype
from gemmule.storage import tuned as tuned_store
from gemmule.timing.sampler import Ratio
from gemmule.tuning.outcomes import Candidate, CompileFailed, Skipped, TuneReport, Wrong
from gemmule_lab import cli
from gemmule_lab.tune import compare as tune_compare
from gemmule_lab.tune import requests


@pytest.fixture(autouse=True)
def _own_cache(own_cache: Path) -> None:
    pass


def _array(shape: tuple[int, ...], dtype: str, layout: str = "row") -> Any:
    return np.ones(shape, numpy_dtype(dtype), order="F" if layout == "col" else "C")


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_the_problem_is_the_one_that_a_call_meets(op: str, dtype: str, layout: str) -> None:
    sizes = {"matvec": (6, 10), "vecmat": (6, 10), "matmul": (6, 10, 4)}[op]
    A = _array((6, 10), dtype, layout)
    other = _array({"matvec": (10,), "vecmat": (6,), "matmul": (10, 4)}[op], dtype)
    pair = (other, A) if op == "vecmat" else (A, other)
    assert (
        requests.problem_of(op, sizes, dtype, requests.Matrix(layout=layout))
        == gm.plan(op, *pair).problem
    )


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_problem_is_the_one_that_a_call_meets(op: str, bits: int) -> None:
    Q = gm.quantize(np.random.default_rng(0).standard_normal((6, 64), np.float32), bits, 32)
    sizes = {"matvec": (6, 64), "vecmat": (6, 64), "matmul": (6, 64, 3)}[op]
    other = _array({"matvec": (64,), "vecmat": (6,), "matmul": (64, 3)}[op], "float16")
    pair = (other, Q) if op == "vecmat" else (Q, other)
    mine = requests.problem_of(op, sizes, "float16", requests.Matrix(bits=bits, group_size=32))
    assert mine == gm.plan(op, *pair).problem


def test_alignment_on_a_device_is_that_of_packed_rows() -> None:
    assert requests.problem_of("matvec", (6, 10), "float16", requests.Matrix("cuda")).alignment == 4
    assert (
        requests.problem_of("matvec", (6, 64), "float16", requests.Matrix("cuda")).alignment == 16
    )


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("4096", "matvec"),
        ("4x4x4", "vecmat"),
        ("4x4", "matmul"),
        ("0x4", "matvec"),
        ("", "matvec"),
        ("-1x4", "matvec"),
        ("4x4x", "matmul"),
        ("1e3x4", "matvec"),
        ("99999999999x4", "matvec"),
        ("4000000000x4", "matvec"),
        ("٤x4", "matvec"),
        ("4x4\n", "matvec"),
    ],
)
def test_sizes_that_are_none(text: str, op: str) -> None:
    with pytest.raises(ValueError, match="sizes are"):
        requests.sizes_of(text, op)


def test_shapes_of_a_file_the_commonest_first(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "model.safetensors"
    parts = {f"w{i}": np.zeros((4, 8), np.float32) for i in range(3)}
    save_file({**parts, "v": np.zeros((2, 3), np.float32), "bias": np.zeros(8, np.float32)}, path)
    assert requests.shapes_in(path) == [(4, 8), (2, 3)]
    save_file({"bias": np.zeros(8, np.float32)}, path)
    with pytest.raises(ValueError, match="no matrix"):
        requests.shapes_in(path)


def _report(**changes: Any) -> TuneReport:
    plan = gm.plan("matvec", np.ones((3, 4)), np.ones(4))
    default = Candidate(plan.rung, {"block": 1})
    other = Candidate(plan.rung, {"block": 2})
    fields: dict[str, Any] = {
        "winner": other,
        "default_s": 2e-6,
        "winner_s": 1e-6,
        "gain": Ratio(2, 1.9, 2.1, 20, 0.95),
        "outcomes": (
            Wrong(other, "[0] is 1, must be 2"),
            Wrong(default, "[1] is [bold]1"),
            CompileFailed(other, "line 3"),
            Skipped(other, "no time was left to verify it"),
        ),
    }
    return TuneReport(plan.problem, plan.choice.machine, default, **{**fields, **changes})


def test_the_table_shows_default_winner_gain_and_failures(
    capfd: pytest.CaptureFixture[str],
) -> None:
    requests.show([_report(), _report(winner=None, stopped="lost [it]", gain=None)])
    text = capfd.readouterr().out
    for part in (
        "(block=1): 2.0 us",
        "(block=2): 1.0 us",
        "2.000x",
        "1.900 to 2.100",
        "2 Wrong",
        "1 CompileFailed",
        "[0] is 1, must be 2",
        "[1] is [bold]1",
        "line 3",
        "none ran right",
        "no challenger",
        "stopped early: lost [it]",
        "1 configurations were not tried",
    ):
        assert part in text, part


def test_the_command_tunes_and_stores_into_a_folder(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    fault: Callable[..., Any],
    limit: Callable[..., None],
) -> None:
    from gemmule.tuning import tuner

    # Whatever is faster wins, so that there is something to store however the clock falls.
    fault(tuner, "decisive", lambda sound, share: True)
    limit(tuner, MOST_DISTURBED=1.0)
    arguments = [
        "tune",
        "--sizes",
        "64x48",
        "--dtype",
        "float32",
        "--op",
        "matvec",
        "--seconds",
        "2",
        "--into",
        str(tmp_path / "table"),
    ]
    assert cli.run(arguments) == 0
    out = capfd.readouterr().out
    assert "1 products tuned, 1 new choices stored" in out
    (path,) = (tmp_path / "table").iterdir()
    assert json.loads(path.read_bytes())["problem"].startswith("matvec A 64 x 48 row, float32")
    assert tuned_store.shipped_fault(path) == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to tune"),
        (["--sizes", "4"], "as in 4096x4096"),
        (["--sizes", "4x4", "--device", "gpu"], "--device is 'gpu'"),
        (["--sizes", "4x4", "--dtype", "float31"], "float31"),
        (["--shapes-from", "no/such/file"], "does not exist"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["tune", *arguments]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words in line


def test_tuning_turned_off_says_so(
    capfd: pytest.CaptureFixture[str], setting: Callable[..., None]
) -> None:
    setting(GEMMULE_TUNE="0")
    assert cli.run(["tune", "--sizes", "64x64"]) == 0
    assert "nothing was tuned" in capfd.readouterr().out


def test_products_without_a_right_configuration_are_a_failure(
    capfd: pytest.CaptureFixture[str], fault: Callable[..., Any]
) -> None:
    from gemmule.tuning import tuner

    fault(tuner, "tune_problem", lambda *_, **__: _report(winner=None))
    assert cli.run(["tune", "--sizes", "64x64"]) == 1
    captured = capfd.readouterr()
    assert "none ran right" in captured.out
    assert "no configuration that ran right" in captured.err


def test_ctrl_c_shows_what_is_done(
    capfd: pytest.CaptureFixture[str], fault: Callable[..., Any]
) -> None:
    from gemmule.tuning import tuner

    def tuned(*_: Any, **__: Any) -> TuneReport:
        if len(calls) == 2:
            raise KeyboardInterrupt
        return _report()

    calls = fault(tuner, "tune_problem", tuned)
    assert cli.run(["tune", "--sizes", "64x64", "--sizes", "32x32", "--sizes", "16x16"]) == 130
    assert "1 products tuned" in capfd.readouterr().out
    assert len(calls) == 2


def test_a_comparison_counts_gains_beyond_the_noise_only() -> None:
    default = _report().default
    sure, kept = _report(), _report(winner=default, gain=Ratio(1.5, 0.9, 2, 20, 0.95))
    slower = _report(gain=Ratio(0.5, 0.4, 0.6, 20, 0.95))
    assert [tune_compare.off(one) for one in (sure, kept, slower)] == [2, 1, 1]
    names = [tune_compare.tuned(one) for one in (sure, kept)]
    assert names == [_report().winner.name, "the default"]  # type: ignore[union-attr]
    assert tune_compare.table([sure, kept]).rows[-1][5] == "1.414"


def test_comparing_stores_nothing_and_ignores_what_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: Callable[..., Any]
) -> None:
    asked: list[str | None] = []

    def tune(sound: Any, *arguments: Any, **options: Any) -> TuneReport:
        asked.append(os.environ.get("GEMMULE_TUNE"))
        return sound(*arguments, **options)

    fault(tune_compare, "tune_problem", tune)
    assert cli.run(["tune", "--compare", "--sizes", "40x70", "--seconds", "0.3"]) == 0
    captured = capsys.readouterr()
    assert "geometric mean" in captured.out
    assert "matvec" in captured.err
    assert asked == ["0"]
    assert "GEMMULE_TUNE" not in os.environ
    assert not (tmp_path / "cache" / "tuned").exists()


def test_the_representative_products_are_of_every_kind() -> None:
    problems = tune_compare.representative()
    assert len(set(problems)) == len(problems) >= 20
    assert {p.op for p in problems} == {"matvec", "matmul"}
    assert {p.quant.bits for p in problems if p.quant is not None} == {4, 8}
