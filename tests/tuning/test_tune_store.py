"""What the tuner stores: whole or not at all, whatever ends it; and the shipped entries."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forks import start_fork, status_of
from gemmule.core.problem import Problem, QuantSpec
from gemmule.storage import sources
from gemmule.storage import tuned as tuned_store
from made_rungs import (
    DEFAULT,
    FASTER,
    PROBLEM,
    FakeClock,
    Plant,
    cpu_machine,
    entries,
    made_rung,
    tuned,
)
from planted import planted

# --- interruptions and the store ------------------------------------------------------------------


def test_ctrl_c_leaves_a_valid_store(plant: Plant) -> None:
    plant(made_rung("usual"), made_rung("other"))
    first = tuned(FakeClock({"matvec/other(block=2)": 5e-5}))
    before = [(path, path.read_bytes()) for path in entries()]
    assert [path for path, _ in before] == [first.path]
    for stop_at in (1, 5, 12, 40):
        blocks: list[str] = []

        def stop(name: str, blocks: list[str] = blocks, stop_at: int = stop_at) -> None:
            blocks.append(name)
            if len(blocks) == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tuned(FakeClock({FASTER: 1e-6}, on_block=stop))
        assert [(path, path.read_bytes()) for path in entries()] == before


def test_ctrl_c_in_the_middle_of_writing(plant: Plant) -> None:
    plant(made_rung("usual"))

    def stop(sound: Any, path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with planted(Path, "replace", stop), pytest.raises(KeyboardInterrupt):
        tuned(FakeClock({FASTER: 5e-5}))
    assert entries() == []


def test_a_cache_that_cannot_be_written(
    plant: Plant, tmp_path: Path, setting: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    plant(made_rung("usual"))
    (tmp_path / "file").write_text("")
    setting(GEMMULE_CACHE=tmp_path / "file")
    with caplog.at_level(logging.WARNING, "gemmule"):
        report = tuned(FakeClock({FASTER: 5e-5}))
    assert report.changed
    assert report.path is None
    assert "cannot be stored" in caplog.text


def test_on_a_busy_machine_nothing_is_stored(
    plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    plant(made_rung("usual"))
    with caplog.at_level(logging.WARNING, "gemmule"):
        report = tuned(FakeClock({FASTER: 5e-5}, preempted=3))
    assert report.changed
    assert (report.disturbed, report.path, entries()) == (1.0, None, [])
    assert "quiet machine" in caplog.text


def test_a_corrupt_entry_is_tuned_anew(plant: Plant) -> None:
    plant(made_rung("usual"))
    clock = functools.partial(FakeClock, {FASTER: 5e-5})
    path = tuned(clock()).path
    assert path is not None
    whole = path.read_bytes()
    for damage in (b"", whole[:40], whole.replace(b'"block": 4', b'"block": 3'), b"[" * 60_000):
        path.write_bytes(damage)
        report = tuned(clock())
        assert report.default.name == DEFAULT, "a damaged entry was believed"
        assert report.path == path
        assert json.loads(path.read_bytes())["params"] == {"block": 4}


def test_an_entry_that_is_no_longer_best_is_replaced(plant: Plant) -> None:
    plant(made_rung("usual"), made_rung("other"))
    assert tuned(FakeClock({FASTER: 5e-5})).changed
    again = tuned(FakeClock({FASTER: 5e-5}))
    assert again.default.name == FASTER  # the stored choice is now the one to beat
    assert not again.changed
    back = tuned(FakeClock({DEFAULT: 5e-5}))
    assert back.winner is not None
    assert back.winner.name == DEFAULT


def _write_for_ever(path: Path, payloads: list[bytes]) -> None:
    while True:
        for payload in payloads:
            tuned_store.write_atomically(path, payload)


def _killed_writers(kills: int) -> None:
    """Kill a writer at random moments; after each the entry is one that was written whole."""
    A = {DEFAULT: 1e-3, FASTER: 5e-5}
    path = tuned(FakeClock(A)).path
    assert path is not None
    whole = json.loads(path.read_bytes())
    payloads = [json.dumps({**whole, "params": {"block": n}}).encode() for n in (1, 2, 4)]
    rng = random.Random(5)
    for _ in range(kills):
        child = start_fork(lambda: _write_for_ever(path, payloads))
        time.sleep(rng.uniform(0.002, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert path.read_bytes() in payloads
        assert tuned_store.lookup(cpu_machine(), PROBLEM) is not None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_writers_killed_at_random_never_damage_an_entry(plant: Plant) -> None:
    plant(made_rung("usual"))
    _killed_writers(25)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_thousand_killed_writers(plant: Plant) -> None:
    plant(made_rung("usual"))
    _killed_writers(1000)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_sixteen_writers_for_a_minute_lose_nothing(plant: Plant, tmp_path: Path) -> None:
    usual = plant(made_rung("usual"))[0]
    machine, problems = cpu_machine(), [replace(PROBLEM, m=70 + i) for i in range(16)]
    end = time.monotonic() + 60

    def write(i: int) -> None:
        while time.monotonic() < end:
            for problem in (problems[i], problems[0]):
                entry = tuned_store.Tuned(usual, {"block": 4}, 1e-4, "2026-11-21")
                assert tuned_store.save(machine, problem, entry) is not None

    children = [start_fork(functools.partial(write, i)) for i in range(16)]
    reads = torn = 0
    time.sleep(1.0)
    while time.monotonic() < end - 1:
        torn += sum(tuned_store.lookup(machine, problem) is None for problem in problems)
        reads += len(problems)
    assert [status_of(child) for child in children] == [0] * 16
    assert reads > 1000
    assert torn == 0
    assert len(entries()) == 16


def test_what_killed_writers_left_is_swept_after_an_hour(plant: Plant) -> None:
    plant(made_rung("usual"))
    path = tuned(FakeClock({FASTER: 5e-5})).path
    assert path is not None
    old, fresh = path.parent / ".new-old", path.parent / ".new-fresh"
    for left in (old, fresh):
        left.write_text("{")
    os.utime(old, (time.time() - 4000,) * 2)
    assert tuned(FakeClock({DEFAULT: 5e-5})).path == path
    assert entries() == [fresh, path]


# --- shipped entries ------------------------------------------------------------------------------


SHIPPED = tuned_store.SHIPPED


def test_every_shipped_entry_would_be_accepted() -> None:
    shipped = sorted(SHIPPED.glob("*.json"))
    assert shipped, f"nothing lies in {SHIPPED}"
    faults = [fault for path in shipped if (fault := tuned_store.shipped_fault(path))]
    assert not faults, "\n".join(faults)


def test_a_faulty_shipped_entry_is_seen(plant: Plant, tmp_path: Path) -> None:
    usual = plant(made_rung("usual"))[0]
    path = tuned(FakeClock({FASTER: 5e-5}), root=tmp_path / "table").path
    assert path is not None
    assert path.parent == tmp_path / "table"
    assert entries() == []
    assert tuned_store.shipped_fault(path) == ""
    whole = json.loads(path.read_bytes())
    fields = whole["fields"]
    for change in (
        {"params": {"block": 3}},
        {"digest": "0" * 64},
        {"rung": "gone"},
        {"time_s": 0.0},
        {"date": "\x1b[31mnow"},
        {"schema": 2},
        {"fields": None},
        {"device": {}},
        {"fields": {**fields, "m": 71}},
        {"fields": {**fields, "m": "70"}},
        {"fields": {**fields, "a": "float31"}},
        {"fields": {**fields, "more": 1}},
        {"fields": {**fields, "quant": {"bits": 4}}},
        {"device": {**whole["device"], "units": 99}},
        {"device": {**whole["device"], "backend": "../cpu"}},
    ):
        path.write_text(json.dumps({**whole, **change}))
        assert tuned_store.shipped_fault(path), change
    path.write_text(json.dumps(whole))
    moved = path.rename(path.with_name(f"{'0' * 64}.json"))
    assert "holds the entry of" in tuned_store.shipped_fault(moved)
    moved.rename(path)
    usual.path.write_text("# edited")
    sources.forget_digests()
    assert "changed" in tuned_store.shipped_fault(path)


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        Problem("matmul", 3, 4, 5, batch=7, shared_b=True, a="int8", b="int8", out="int32"),
        Problem(
            "matvec", 8, 256, a="uint4", quant=QuantSpec(4, None, True, "row", "float16", True)
        ),
        Problem("matvec", 1, 1, accumulate="float16", a="float16", b="float16", out="float16"),
    ],
)
def test_a_problem_comes_back_from_its_fields(problem: Problem) -> None:
    from dataclasses import asdict

    assert tuned_store.problem_of(json.loads(json.dumps(asdict(problem)))) == problem
