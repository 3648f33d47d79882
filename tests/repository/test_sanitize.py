"""compute-sanitizer's logs are read right, and only clean runs are recorded."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from gemmule.core.registry import cuda_rungs
from gemmule.core.rung import Rung
from gemmule.errors import DeviceError
from gemmule_lab.cli import run
from proofs import device as verify_device
from proofs import proof_lines
from proofs.device import Outcome
from sanitizer import sanitize
from sanitizer.__main__ import COMMAND

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
DIRTY = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void thread_per_row<float, float, float, (int)128>(GemvArgs)+0x120
========= ERROR SUMMARY: 1 error
"""
RUNG = next(r for r in cuda_rungs() if r.name == "thread_per_row")


@pytest.mark.parametrize(
    ("log", "count"),
    [
        (CLEAN, 0),
        (DIRTY, 1),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n", 3),
        (CLEAN + DIRTY, 1),
        ("========= COMPUTE-SANITIZER\n", None),
        ("prose: ERROR SUMMARY: 0 errors\n", None),
        ("", None),
    ],
)
def test_summaries_are_counted(log: str, count: int | None) -> None:
    assert sanitize.errors_in(log) == count


def stand_in(folder: Path, log: str, *, code: int = 0, outcome: bool = True) -> None:
    """Put a compute-sanitizer into folder/bin that writes `log` and one result."""
    (folder / "bin").mkdir()
    (folder / "bin" / "log").write_text(log)
    line = (
        '{"schema": 1, "folder": "matvec", "rung": "thread_per_row", '
        '"variant": "float32,float32,float32", '
        '"key": "k", "cases": 4, "worst_ratio": 0.1, "failures": [], "device": "NVIDIA X"}'
    )
    program = folder / "bin" / "compute-sanitizer"
    # Arguments: --tool T --log-file LOG --print-limit 20 PYTHON -P -m MODULE ORDINAL RESULTS RUNG
    program.write_text(
        '#!/bin/sh\ncat "$(dirname "$0")/log" > "$4"\n'
        + (f"echo '{line}' > \"${{12}}\"\n" if outcome else "")
        + f"exit {code}\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("log", "code", "outcome", "errors", "clean"),
    [
        (CLEAN, 0, True, 0, True),
        (DIRTY, 0, True, 1, False),
        (CLEAN, 1, True, None, False),  # the program itself failed
        (CLEAN, 0, False, 0, False),  # nothing ran
        ("", 0, True, None, False),  # the tool gave no summary
    ],
)
def test_only_finished_runs_without_errors_are_clean(
    tmp_path: Path,
    setting: Callable[..., None],
    fault: Callable[..., Any],
    log: str,
    code: int,
    outcome: bool,
    errors: int | None,
    clean: bool,
) -> None:
    stand_in(tmp_path, log, code=code, outcome=outcome)
    setting(CUDA_HOME=tmp_path)
    one = frozenset({"float32,float32,float32"})
    fault(sanitize, "chunks", lambda sound, rung, size: [one])
    (report,) = sanitize.sanitize([RUNG], ["memcheck"])
    assert (report.errors, report.clean) == (errors, clean)
    written = sanitize.write(tmp_path / "evidence", [report])
    if outcome:
        assert written is not None
        assert len(proof_lines.read(written)) == clean
    else:
        assert written is None


def test_a_tool_that_now_finds_errors_loses_its_record(tmp_path: Path) -> None:
    one = Outcome("matvec", "thread_per_row", "v", "k", 3, 0.1, [], "NVIDIA X")
    name = "matvec/thread_per_row"
    good = [sanitize.Report(tool, name, 0, (one,), "") for tool in ("memcheck", "racecheck")]
    path = sanitize.write(tmp_path, good)
    assert path is not None
    assert [record["tool"] for record in proof_lines.read(path)] == ["memcheck", "racecheck"]
    sanitize.write(tmp_path, [sanitize.Report("memcheck", name, 2, (one,), "bad")])
    assert [record["tool"] for record in proof_lines.read(path)] == ["racecheck"]


def test_variants_are_watched_a_few_at_a_time_and_told_at_once(
    tmp_path: Path, setting: Callable[..., None]
) -> None:
    stand_in(tmp_path, CLEAN)
    setting(CUDA_HOME=tmp_path)
    seen: list[tuple[str, str]] = []
    other = next(r for r in cuda_rungs() if r.name == "two_step")
    sanitize.sanitize(
        [RUNG, other],
        ["memcheck", "initcheck"],
        workers=2,
        report=lambda found: seen.append((found.tool, found.rung)),
    )
    assert sorted(set(seen)) == [
        (tool, f"matvec/{name}")
        for tool in ("initcheck", "memcheck")
        for name in ("thread_per_row", "two_step")
    ]
    pieces = sum(len(list(verify_device.chunks(rung))) for rung in (RUNG, other))
    assert len(seen) == 2 * pieces
    seen.clear()
    every = len(RUNG.signatures)
    sanitize.sanitize([RUNG], ["memcheck"], workers=every, report=lambda f: seen.append(("", "")))
    assert len(seen) == every > len(list(verify_device.chunks(RUNG))), "no process is left idle"


@pytest.mark.parametrize("rung", cuda_rungs(), ids=lambda rung: f"{rung.folder}-{rung.name}")
def test_the_sample_has_forty_shapes_of_each_rung_and_every_number_in_every_view(
    rung: Rung,
) -> None:
    trials = [t for one in rung.signatures for t in verify_device.trials(rung, one, few=True)]
    assert len({(t.problem.m, t.problem.n, t.problem.k, t.problem.batch) for t in trials}) >= 40
    edges = [(t.kind, t.view) for t in trials if t.seed < 1000 and t.kind != "nonfinite"]
    kinds, views = (set(one) for one in zip(*edges, strict=True))
    assert set(edges) == set(itertools.product(kinds, views))


def test_an_unsupported_device_is_said(tmp_path: Path, setting: Callable[..., None]) -> None:
    stand_in(tmp_path, "========= Error: Device not supported.\n", code=1, outcome=False)
    setting(CUDA_HOME=tmp_path)
    with pytest.raises(DeviceError, match="does not support this device"):
        sanitize.sanitize([RUNG], ["memcheck"])


def test_an_absent_sanitizer_is_said(
    setting: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        setting(**{name: None})
    setting(PATH="/nonexistent")
    if os.access("/usr/local/cuda/bin/compute-sanitizer", os.X_OK):
        pytest.skip("compute-sanitizer is installed here")
    assert run([], COMMAND) == 2
    assert "comes with the CUDA toolkit" in capsys.readouterr().err


def test_the_command_offers_the_engines_tools() -> None:
    (offered,) = [option for option in COMMAND.params if option.name == "tools"]
    assert isinstance(offered.type, click.Choice)
    assert tuple(offered.type.choices) == sanitize.TOOLS
