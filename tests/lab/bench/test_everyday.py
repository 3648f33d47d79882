"""What is measured of everyday products: cases judged and raced, late calls counted."""

from __future__ import annotations

import collections
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.backends.cpu.threads import thread_count
from gemmule_lab.bench import everyday
from gemmule_lab.harness.host import HostBench
from gemmule_lab.records import results
from gemmule_lab.records.rows import Facts


@pytest.mark.usefixtures("quick_bench")
def test_every_kind_of_case_has_its_rows_on_disk(
    monkeypatch: pytest.MonkeyPatch,
    limit: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = (("vecmat", "float32", 20), ("matmul", "bfloat16", 17))
    limit(everyday, SMALL=small, SIDES=(16,), BUSY=(40,), CODED=(16, 128), COLUMNS=3, CALLS=40)
    children: list[Any] = []
    start = subprocess.Popen

    def started(*given: Any, **named: Any) -> Any:
        children.append(start(*given, **named))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", started)
    path = everyday.start(HostBench(), 0.05, tmp_path)
    rows = results.read(path).rows
    assert [row.name for row in rows[:4]] == ["unplanned", "planned"] * 2
    assert all((row.error_ratio or 0) <= 1 for row in rows)
    coded = [row for row in rows if "codes" in row.group]
    assert len(coded) == 4 * (len(everyday.GROUPS) - 1)
    alike = collections.Counter((row.group, row.name.split(": ")[0]) for row in rows)
    assert set(alike.values()) == {1}, "no two rows are of one product and of one way"
    late = rows[-1]
    assert set(late.speedups) == {
        words for one in (everyday.BARE, "numpy") for words in (one, everyday.LATE.format(one))
    }
    assert children
    assert all(child.returncode is not None for child in children)
    busy = [child for child in children if child.args[0] == sys.executable]
    assert len(busy) == thread_count() * len(everyday.BUSY)
    assert "99th percentile" in capsys.readouterr().out


def test_ratios_are_of_medians_and_of_late_calls() -> None:
    problem = gm.plan("matvec", np.ones((2, 2)), np.ones(2)).problem
    facts = Facts(problem, "rung", "warm")
    environment: Any = type("E", (), {"id": "e"})
    row = everyday.busy_row(environment, facts, "x", [1.0] * 98 + [50, 60], {"b": [2.0] * 100})
    assert row.speedups["b"].value == 2
    assert row.speedups[everyday.LATE.format("b")].value < 0.1


def test_a_bare_loop_takes_longer_for_more_steps() -> None:
    short, long = (min(everyday.bare_times(2, 20, steps)) for steps in (1000, 100_000))
    assert 0 < short < long / 10
