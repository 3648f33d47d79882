"""The tuner on planted rungs and made-up clocks: what it finds, refuses, keeps, and survives."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from fake_driver import FakeDriver, driver_of
from forks import start_fork
from gemmule.backends.cpu import launch as cpu
from gemmule.choose import choose
from gemmule.core import registry
from gemmule.core.problem import Problem, QuantSpec
from gemmule.core.rung import Arithmetic, Constraint, CpuRung, Machine, Rung, Suggestion, same
from gemmule.errors import CompileError, DeviceError
from gemmule.storage import sources
from gemmule.storage import tuned as tuned_store
from gemmule.timing.clock import Entry, Timing
from gemmule.timing.sampler import Ratio
from gemmule.tuning import isolated, space, tuner
from gemmule.tuning.operands import HostPlace
from gemmule.tuning.outcomes import (
    Candidate,
    CompileFailed,
    LaunchFailed,
    Measured,
    Skipped,
    Timeout,
    TuneReport,
    Wrong,
)
from gemmule.tuning.session import Session
from planted import planted

PROBLEM = Problem("matvec", 70, 96, alignment=4)
DEFAULT, FASTER = "matvec/usual(block=1)", "matvec/usual(block=4)"


# --- planted rungs, and a clock whose truth is known ----------------------------------------------


def _product(A: Any, x: Any, y: Any) -> None:
    np.matmul(A, x, out=y)


def _planted(fault: str) -> Callable[[Problem, Mapping[str, Any]], Callable[..., None]]:
    """Return a `bind` whose kernels have the fault, at block 4 only."""

    def bind(problem: Problem, params: Mapping[str, Any]) -> Callable[..., None]:
        if params["block"] != 4:
            return _product
        if fault == "does not compile":
            raise CompileError("no such instruction", log="line 1")
        calls = [0]

        def run(A: Any, x: Any, y: Any) -> None:
            calls[0] += 1
            _product(A, x, y)
            if fault == "last element":
                y[-1] += 1
            elif fault == "forgets a product":
                y[:] -= A[:, 17] * x[17]
            elif fault == "unwritten":
                y[3] = np.nan
            elif fault == "writes beside":
                np.lib.stride_tricks.as_strided(y, (y.size + 1,))[-1] = 0
            elif fault == "changes an input":
                A[0, 0] = 3 - A[0, 0]
            elif fault == "large only" and problem.m > 50_000:
                y[4096:] = 0
            elif fault == "raises":
                raise ArithmeticError("planted")
            elif fault == "out of memory":
                raise MemoryError
            elif fault == "refused":
                raise DeviceError("launching it: the driver answered INVALID_VALUE")
            elif fault == "loses the device":
                raise DeviceError("illegal address", restart=True)
            elif fault == "raises later" and calls[0] > 3:
                raise DeviceError("launching it: the driver answered OUT_OF_RESOURCES")

        return run

    return bind


def made_rung(name: str, fault: str = "", expected_s: float | None = 1e-5, **changes: Any) -> Rung:
    def suggest(problem: Problem, machine: Machine) -> Suggestion | None:
        return None if expected_s is None else Suggestion({"block": 1}, expected_s)

    made = CpuRung(
        title="title",
        idea="idea",
        source="source",
        op="matvec",
        signatures=same("float32"),
        arithmetic=lambda problem: Arithmetic("float32", lambda p, q: p.reduction),
        params={"block": (1, 2, 4)},
        bind=_planted(fault),
        suggest=suggest,
        name=name,
        folder="matvec",
    )
    return replace(made, **changes)


@dataclass
class FakeClock:
    """Blocks take made-up times by the entry's name; the host's own time does not count."""

    costs: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    seed: int = 0
    preempted: int = 0
    overhead_s: float = 1e-7
    name: str = "synthetic"
    time_s: float = 0.0
    on_block: Callable[[str], None] = lambda name: None

    def now(self) -> float:
        return self.time_s

    def prepare(self, entry: Entry) -> Callable[[int, int], Timing]:
        rng = np.random.default_rng([self.seed, *entry.name.encode()])
        entry.call(0)
        entry.call(entry.sets - 1)

        def run(first: int, calls: int) -> Timing:
            self.on_block(entry.name)
            jitter = math.exp(self.noise * rng.standard_normal())
            seconds = calls * self.costs.get(entry.name, 1e-4) * jitter
            self.time_s += seconds
            return Timing(seconds, calls, {"preempted": self.preempted})

        return run


class FakePlace(HostPlace):
    """Host memory under a made-up clock, with caches so small that three sets rotate past them."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock, self.caches = clock, 60_000

    def wall(self) -> float:
        return 0.0  # first calls show nothing: the clock alone decides


Plant = Callable[..., tuple[Rung, ...]]


@pytest.fixture(autouse=True)
def _nothing_tuned(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_store, "SHIPPED", tmp_path / "shipped")


@pytest.fixture
def plant(tmp_path: Path, only_rungs: Callable[..., None]) -> Plant:
    """What makes some rungs the only ones there are, and returns them."""

    def make_only(*rungs: Rung) -> tuple[Rung, ...]:
        only_rungs(tmp_path / "rungs", *rungs)
        return rungs

    return make_only


def tuned(clock: FakeClock | None = None, problem: Problem = PROBLEM, **options: Any) -> TuneReport:
    options.setdefault("max_seconds", 20.0)
    place = FakePlace(FakeClock() if clock is None else clock)
    told = {"progress": options.pop("progress")} if "progress" in options else {}
    return tuner.tune_problem(problem, tuner.Request(**options), place=place, **told)


def entries() -> list[Path]:
    folder = tuned_store.cache_folder() / "tuned"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def outcome_of(report: TuneReport, name: str) -> Any:
    (found,) = [o for o in report.outcomes if o.candidate.name == name]
    return found


# --- what is chosen -------------------------------------------------------------------------------


def test_a_planted_faster_candidate_is_found_stored_and_used(plant: Plant) -> None:
    plant(made_rung("usual"), made_rung("other"))
    A, x = np.ones((70, 96), np.float32), np.ones(96, np.float32)
    assert gm.plan("matvec", A, x).params == {"block": 1}
    report = tuned(FakeClock({"matvec/other(block=2)": 0.9e-4}, noise=0.01))
    assert report.winner is not None
    assert (report.default.name, report.winner.name) == (DEFAULT, "matvec/other(block=2)")
    assert report.gain is not None
    assert report.gain.low < 1 / 0.9 < report.gain.high
    assert report.gain.value == pytest.approx(1 / 0.9, rel=0.01)
    assert report.winner_s == pytest.approx(0.9e-4, rel=0.02)
    assert report.cold
    assert entries() == [report.path]
    later = gm.plan("matvec", A, x)  # forget_plans() was called, and the store is asked
    assert (later.rung.name, later.params) == ("other", {"block": 2})
    assert later.reason.startswith("tuned on this device, 20")
    assert report.counts() == {"Measured": 5}


def test_noise_does_not_dethrone_the_default(plant: Plant) -> None:
    plant(made_rung("usual"), made_rung("other"))

    def dethroned() -> int:
        runs = [tuned(FakeClock(noise=0.05, seed=seed), max_seconds=1.0) for seed in range(10)]
        return sum(run.changed for run in runs)

    assert dethroned() == 0
    assert entries() == []
    # Taking whatever was faster in the duel, however little, dethrones equals all the time.
    with planted(tuner, "decisive", lambda sound, share: share.value < 1):
        assert dethroned() >= 3


@pytest.mark.parametrize(("cost", "wins"), [(0.99e-4, False), (0.97e-4, True), (1.3e-4, False)])
def test_a_winner_is_faster_by_more_than_two_percent(plant: Plant, cost: float, wins: bool) -> None:
    plant(made_rung("usual"))
    costs = {FASTER: cost, "matvec/usual(block=2)": 2e-4}
    report = tuned(FakeClock(costs, noise=0.003))
    assert report.changed == wins
    assert (report.path is not None) == wins
    assert report.gain is not None  # the duel is reported whoever wins it
    assert report.gain.value == pytest.approx(1e-4 / cost, rel=0.01)


@pytest.mark.parametrize(
    ("share", "wins"),
    [
        (Ratio(0.9, 0.88, 0.92, 30, 0.95), True),
        (Ratio(0.9, 0.80, 1.001, 30, 0.95), False),
        (Ratio(0.985, 0.98, 0.99, 30, 0.95), False),
        (Ratio(0.5, 0.4, 0.6, 4, 0.875), False),
    ],
)
def test_what_is_decisive(share: Ratio, wins: bool) -> None:
    assert tuner.decisive(share) == wins


FULL_SIZE = Problem("matvec", 70_001, 96, alignment=4)


@pytest.mark.parametrize(
    ("fault", "problem", "words"),
    [
        ("last element", PROBLEM, "elements wrong"),
        ("forgets a product", PROBLEM, "elements wrong"),
        ("unwritten", PROBLEM, "nan"),
        ("writes beside", PROBLEM, "outside the output"),
        ("changes an input", PROBLEM, "an input was modified"),
        ("large only", FULL_SIZE, "at the full size"),
    ],
)
def test_a_wrong_candidate_is_never_chosen(
    plant: Plant, fault: str, problem: Problem, words: str
) -> None:
    plant(made_rung("usual"), made_rung("wrong", fault, expected_s=1.1e-5))
    name = "matvec/wrong(block=4)"
    report = tuned(FakeClock({name: 1e-6, "matvec/wrong(block=2)": 0.8e-4}), problem)
    found = outcome_of(report, name)
    assert type(found) is Wrong
    assert words in found.text
    assert report.winner is not None
    assert report.winner.name == "matvec/wrong(block=2)"


def test_without_the_fault_the_same_candidate_wins(plant: Plant) -> None:
    plant(made_rung("usual"), made_rung("wrong", "", expected_s=1.1e-5))
    report = tuned(FakeClock({"matvec/wrong(block=4)": 5e-5}), FULL_SIZE)
    assert report.winner is not None
    assert report.winner.name == "matvec/wrong(block=4)"


# --- failures are values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("does not compile", CompileFailed, "CompileError: no such instruction"),
        ("raises", LaunchFailed, "ArithmeticError: planted"),
        ("out of memory", LaunchFailed, "MemoryError"),
        ("refused", LaunchFailed, "INVALID_VALUE"),
        ("raises later", LaunchFailed, "OUT_OF_RESOURCES"),
    ],
)
def test_a_failure_is_a_value(plant: Plant, fault: str, kind: type, words: str) -> None:
    plant(made_rung("usual"), made_rung("bad", fault))
    report = tuned(FakeClock({"matvec/bad(block=2)": 5e-5}))
    found = outcome_of(report, "matvec/bad(block=4)")
    assert type(found) is kind
    assert words in found.text
    assert report.failures == (found,)
    assert report.winner is not None
    assert report.winner.name == "matvec/bad(block=2)"


def test_a_lost_device_ends_the_run(plant: Plant) -> None:
    plant(made_rung("bad", "loses the device"), made_rung("usual", expected_s=2e-5))
    report = tuned(FakeClock({"matvec/usual(block=4)": 1e-6}))
    assert "lost the device" in report.stopped
    assert report.winner is None
    assert entries() == []
    assert any(type(o) is Skipped and "before its turn" in o.text for o in report.outcomes)


def test_a_fault_in_the_middle_of_the_timing_leaves_the_default(plant: Plant) -> None:
    plant(made_rung("usual"))
    blocks: list[str] = []

    def fault(name: str) -> None:
        blocks.append(name)
        if len(blocks) == 20:
            raise DeviceError("running it: the driver answered LAUNCH_TIMEOUT", restart=True)

    report = tuned(FakeClock({FASTER: 1e-6}, on_block=fault))
    assert report.winner is None
    assert "LAUNCH_TIMEOUT" in report.stopped
    assert entries() == []


def test_a_default_that_fails_is_replaced(plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    usual = made_rung("usual", "raises", params={"block": (4,)})
    usual = replace(usual, suggest=lambda problem, machine: Suggestion({"block": 4}, 9e-6))
    plant(usual, made_rung("other"))
    with caplog.at_level(logging.WARNING, "gemmule"):
        report = tuned()
    assert "goes on without it" in caplog.text
    assert type(outcome_of(report, "matvec/usual(block=4)")) is LaunchFailed
    assert report.winner is not None
    assert report.winner.rung.name == "other"
    assert report.path is not None


def test_hopelessly_slow_candidates_are_not_timed(plant: Plant) -> None:
    plant(made_rung("usual"))
    blocks: list[str] = []
    report = tuned(FakeClock({FASTER: 1e-3}, on_block=blocks.append))
    found = outcome_of(report, FASTER)
    assert type(found) is Skipped
    assert "10 times the default's" in found.text
    assert 1 <= blocks.count(FASTER) <= 4


def test_a_candidate_hopeless_in_its_first_calls_never_meets_the_clock(plant: Plant) -> None:
    plant(made_rung("usual"))
    place = FakePlace(FakeClock())
    waits = [0.0]
    calls = {"wall": 0}

    def wall() -> float:  # from the third configuration on, a call takes a second
        calls["wall"] += 1
        waits[0] += 1.0 if calls["wall"] > 8 else 1e-6
        return waits[0]

    place.wall = wall  # type: ignore[method-assign]
    blocks: list[str] = []
    place.clock.on_block = blocks.append  # type: ignore[attr-defined]
    report = tuner.tune_problem(PROBLEM, tuner.Request(max_seconds=20.0), place=place)
    (found,) = [o for o in report.outcomes if isinstance(o, Skipped)]
    assert "on a smaller problem" in found.text
    assert found.candidate.name not in blocks


def test_every_copy_of_a_quantised_matrix_is_met_before_any_is_timed() -> None:
    Q = gm.quantize(np.ones((16, 64), np.float32), 8, 32)
    clock, met, first = FakeClock(), list[int](), list[set[int]]()
    clock.on_block = lambda name: first.append(set(met))
    place = FakePlace(clock)
    place.caches = 8_000
    problem = gm.plan("matvec", Q, np.ones(64, np.float32)).problem
    session = Session(problem, cpu.machine(), place)
    prepare = session.backend.prepare

    def recorded(choice: Any) -> Any:
        run = prepare(choice)
        return lambda A, *rest: met.append(id(A)) or run(A, *rest)

    session.backend = SimpleNamespace(prepare=recorded)  # type: ignore[assignment]
    chosen = session.default()
    assert isinstance(session.admit(Candidate(chosen.rung, chosen.params), chosen), Entry)
    copies = {id(operands[0]) for operands in session._sets}
    assert len(copies) > 3
    assert copies <= first[0]


def test_time_runs_out_and_what_was_not_tried_says_so(plant: Plant) -> None:
    plant(made_rung("usual"), made_rung("other"))
    report = tuned(FakeClock({DEFAULT: 1.0}), max_seconds=1.0)
    assert {type(o) for o in report.outcomes} == {Skipped}
    assert all("no time" in o.text for o in report.outcomes if isinstance(o, Skipped))
    assert report.winner is not None
    assert not report.changed


# --- the space ------------------------------------------------------------------------------------


def _cpu() -> Machine:
    return gm.plan("matvec", np.ones((2, 2), "f4"), np.ones(2, "f4")).choice.machine


def test_the_most_promising_come_first_and_rungs_take_turns(plant: Plant) -> None:
    block = {"block": tuple(range(1, 200))}
    a = made_rung("a", expected_s=2e-5, params=block)
    b = made_rung("b", expected_s=1e-5, params=block)
    late, hopeless = made_rung("late", expected_s=None, params=block), made_rung("far", "", 1e-3)
    machine = _cpu()
    plant(a, b, late, hopeless)
    default = Candidate(b, {"block": 1}, 1e-5)
    found, skipped = space.candidates(PROBLEM, machine, default)
    names = [one.name for one in found]
    assert [one.rung.name for one in found[:6]] == ["b", "a", "late"] * 2
    assert names[1] == "matvec/a(block=1)"  # its suggested point
    assert default.name not in names
    assert len(names) == len(set(names)) <= space.MOST_CANDIDATES
    assert sum(one.rung is late for one in found) == space.MOST_WITHOUT_HEURISTIC
    assert sum(one.rung is a for one in found) == space.MOST_OF_ONE_RUNG
    assert [one.candidate.rung for one in skipped] == [hopeless] * 3
    assert "more than 4 times" in skipped[0].text


def test_only_declared_allowed_and_proved_configurations_are_tried(
    plant: Plant, only_proved: Callable[..., None]
) -> None:
    limit = Constraint("block below 4", lambda p, q: q["block"] < 4)
    rungs = plant(made_rung("usual", constraints=(limit,)), made_rung("new"))
    only_proved("cpu", {"usual"})
    machine = Machine("cpu", "Test CPU", "x86_64", 2, 1e10, 2**25)
    default = Candidate(rungs[0], {"block": 1}, 1e-5)
    found, _ = space.candidates(PROBLEM, machine, default)
    assert [one.name for one in found] == ["matvec/usual(block=2)"]
    more, _ = space.candidates(PROBLEM, machine, default, include_unproved=True)
    assert {one.rung.name: one.proved for one in more} == {"usual": True, "new": False}


def test_unproved_configurations_run_apart_and_are_never_chosen(
    plant: Plant, only_proved: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(made_rung("usual"), made_rung("new"))
    only_proved("cpu", {"usual"})
    tried: list[str] = []

    def apart(problem: Problem, device: str, candidate: Candidate, seed: int, **_: Any) -> Any:
        tried.append(candidate.name)
        return Measured(candidate, 1e-6, Ratio(0.01 * len(tried), 0.01, 0.04, 20, 0.95))

    monkeypatch.setattr(tuner, "measure_apart", apart)
    here: list[str] = []
    report = tuned(FakeClock(on_block=here.append), include_unproved=True)
    assert sorted(tried) == [f"matvec/new(block={n})" for n in (1, 2, 4)]
    assert not any("new" in name for name in here)
    assert report.fastest_unproved is not None
    assert report.fastest_unproved.candidate.name == tried[0]
    assert not report.changed
    assert tuned(include_unproved=False).fastest_unproved is None
    assert len(tried) == 3


# --- processes of their own -----------------------------------------------------------------------


def _apart(code: str, **options: Any) -> Any:
    candidate = Candidate(made_rung("usual"), {"block": 1})
    command = [sys.executable, "-c", code]
    return isolated.measure_apart(PROBLEM, "cpu", candidate, 0, command=command, **options)


RATIO = {"value": 0.5, "low": 0.4, "high": 0.6, "pairs": 30, "confidence": 0.95}
TOLD: dict[str, Any] = {"kind": "Measured", "seconds": 1e-5, "ratio": RATIO}


def test_a_process_that_tells_times_is_believed() -> None:
    found = _apart(f"print({json.dumps(TOLD)!r})")
    assert isinstance(found, Measured)
    assert (found.seconds, found.ratio.high) == (1e-5, 0.6)


def test_a_hanging_process_is_a_timeout() -> None:
    start = time.monotonic()
    found = _apart("import time; time.sleep(60)", timeout_s=0.5)
    assert type(found) is Timeout
    assert "not done after 0.5 s" in found.text
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("import os; os.abort()", LaunchFailed, "status -6"),
        ("raise SystemExit('no driver')", LaunchFailed, "no driver"),
        ("print('hello')", LaunchFailed, "ended with status 0"),
        ("print('[1]')", LaunchFailed, "ended with status 0"),
        ("""print('{"kind": "Measured"}')""", LaunchFailed, "nonsense"),
        ("""print('{"kind": "Measured", "seconds": NaN, "ratio": {}}')""", LaunchFailed, "nonsen"),
        *(
            (f"print({json.dumps(told)!r})", LaunchFailed, "nonsense")
            for told in (
                TOLD | {"seconds": 0.0},
                TOLD | {"seconds": -1e-5},
                TOLD | {"seconds": float("inf")},
                TOLD | {"ratio": TOLD["ratio"] | {"value": 0.0}},
                TOLD | {"ratio": TOLD["ratio"] | {"low": -0.5}},
            )
        ),
        ("""print('{"kind": "Timeout", "text": "made up"}')""", LaunchFailed, "nonsense"),
        ("""print('x'); print('{"kind": "Wrong", "text": "[3] is 5"}')""", Wrong, "[3] is 5"),
        (
            "import sys, json; assert json.load(sys.stdin)['rung'] == 'usual'; "
            """print('{"kind": "CompileFailed", "text": "line 1"}')""",
            CompileFailed,
            "line 1",
        ),
    ],
)
def test_what_a_process_says_or_does_is_an_outcome(code: str, kind: type, words: str) -> None:
    found = _apart(code)
    assert type(found) is kind
    assert words in found.text


def test_a_real_process_verifies_and_times_a_real_rung() -> None:
    rung = next(r for r in registry.all_rungs("cpu") if r.name == "scalar_loop")
    candidate = Candidate(rung, rung.check_params(PROBLEM, None), None, proved=False)
    found = isolated.measure_apart(PROBLEM, "cpu", candidate, 1, timeout_s=120)
    assert isinstance(found, Measured), found
    assert found.candidate is candidate
    assert found.ratio.pairs >= 1


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
        assert tuned_store.lookup(_cpu(), PROBLEM) is not None


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
    machine, problems = _cpu(), [replace(PROBLEM, m=70 + i) for i in range(16)]
    children, end = [], time.monotonic() + 60
    for i in range(16):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                while time.monotonic() < end:
                    for problem in (problems[i], problems[0]):
                        entry = tuned_store.Tuned(usual, {"block": 4}, 1e-4, "2026-11-21")
                        assert tuned_store.save(machine, problem, entry) is not None
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    reads = torn = 0
    time.sleep(1.0)
    while time.monotonic() < end - 1:
        torn += sum(tuned_store.lookup(machine, problem) is None for problem in problems)
        reads += len(problems)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 16
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
    shipped = sorted(SHIPPED.glob("*"))
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


# --- plans ----------------------------------------------------------------------------------------


def test_tuning_turned_off_is_a_no_op(setting: Callable[..., None]) -> None:
    plan = gm.plan("matvec", np.ones((3, 4)), np.ones(4))
    setting(GEMMULE_TUNE="0")
    assert plan.tune() is plan
    assert entries() == []


def test_an_empty_product_has_nothing_to_tune() -> None:
    plan = gm.plan("matvec", np.ones((0, 4)), np.ones(4))
    assert plan.tune() is plan
    with pytest.raises(ValueError, match="is empty"):
        tuner.tune_problem(plan.problem)
    with pytest.raises(ValueError, match="must be positive"):
        tuner.tune_problem(PROBLEM, tuner.Request(max_seconds=0))


def _with_clock(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    monkeypatch.setattr(tuner, "place_of", lambda device, cache_bytes: FakePlace(clock))


def test_a_tuned_plan_computes_the_same(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(made_rung("usual"), made_rung("other"))
    _with_clock(monkeypatch, FakeClock({"matvec/other(block=4)": 5e-5}))
    A = np.arange(70 * 96, dtype=np.float32).reshape(70, 96) % 7
    x = np.arange(96, dtype=np.float32) % 5
    plan = gm.plan("matvec", A, x)
    better = plan.tune(max_seconds=5)
    assert plan.rung.name == "usual"  # a plan is frozen
    assert (better.rung.name, better.params) == ("other", {"block": 4})
    assert better.choice.expected_s == pytest.approx(5e-5)
    assert f"runner-up  {DEFAULT}" in better.explain()
    np.testing.assert_array_equal(better(A, x), A @ x)
    out = np.empty(70, np.float32)
    assert better(A[:, ::-1][:, ::-1], x, out=out) is out
    np.testing.assert_array_equal(out, A @ x)
    assert better.tune(max_seconds=5) is better  # and beats whatever else there is


def test_a_named_rung_tunes_its_parameters_and_stores_nothing(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(made_rung("usual"), made_rung("other"))
    _with_clock(monkeypatch, FakeClock({"matvec/other(block=2)": 5e-5, FASTER: 1e-6}))
    A, x = np.ones((70, 96), np.float32), np.ones(96, np.float32)
    better = gm.plan("matvec", A, x, rung="other").tune(max_seconds=5)
    assert (better.rung.name, better.params) == ("other", {"block": 2})
    assert entries() == []
    assert gm.plan("matvec", A, x).rung.name == "usual"
    worst = gm.plan("matvec", A, x, rung="other", params={"block": 4})
    assert worst.tune(max_seconds=5).params == {"block": 2}  # not only where the heuristic loses


def test_a_batch_invariant_plan_is_tuned_as_if_alone(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(made_rung("usual"))
    _with_clock(monkeypatch, FakeClock({FASTER: 5e-5}))
    A, x = np.ones((3, 70, 96), np.float32), np.ones((3, 96), np.float32)
    plan = gm.plan("matvec", A, x, batch_invariant=True)
    assert plan.tune(max_seconds=5).params == {"block": 4}
    one = gm.plan("matvec", A[0], x[0], batch_invariant=True)
    assert (one.params, plan.problem.batch) == ({"block": 4}, 3)
    assert gm.plan("matvec", A, x, batch_invariant=True).params == {"block": 4}


INT4 = QuantSpec(4, 32, True, "row", "float32", False)
REAL = {
    "row": Problem("matvec", 130, 260, alignment=4),
    "col": Problem("matvec", 130, 260, layout_a="col", alignment=4),
    "strided": Problem("matvec", 30, 26, layout_a="strided", alignment=4),
    "float16": Problem("matvec", 130, 260, a="float16", b="float16", out="float16", alignment=2),
    "bfloat16": Problem("matvec", 65, 33, a="bfloat16", b="float32", out="float32", alignment=2),
    "int8": Problem("matvec", 65, 130, a="int8", b="int8", out="int32", alignment=1),
    "int64": Problem("matvec", 9, 13, a="int64", b="int64", out="int64", alignment=8),
    "complex": Problem("matvec", 9, 13, a="complex64", b="complex64", out="complex64", alignment=8),
    "batch": Problem("matvec", 9, 13, batch=5, alignment=4),
    "shared": Problem("matvec", 9, 13, batch=5, shared_a=True, alignment=4),
    "matmul": Problem("matmul", 33, 17, 65, a="float16", b="float16", out="float16", alignment=2),
    "many": Problem("matmul", 9, 5, 7, batch=3, shared_b=True, layout_b="col", alignment=4),
    "int4": Problem("matvec", 64, 96, a="uint4", b="float32", out="float32", alignment=4,
                    quant=INT4),
    "int4 transposed": Problem("matvec", 64, 96, a="uint4", b="float32", out="float32", alignment=4,
                               quant=replace(INT4, transposed=True)),
    "int4 matmul": Problem("matmul", 64, 5, 96, a="uint4", b="float32", out="float32", alignment=4,
                           quant=replace(INT4, has_perm=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_rungs_on_every_kind_of_problem(name: str, limit: Callable[..., None]) -> None:
    """All that a run needs of operands, views and truths, for the default and two others."""
    limit(space, MOST_CANDIDATES=2)
    report = tuned(FakeClock({}), REAL[name], max_seconds=0.01)
    assert report.winner is not None, report.outcomes
    assert not report.failures, report.failures


def test_real_rungs_on_the_real_clock() -> None:
    A, x = np.ones((300, 200), np.float32), np.ones(200, np.float32)
    plan = gm.plan("matvec", A, x).tune(max_seconds=1.0)
    np.testing.assert_array_equal(plan(A, x), A @ x)


# --- the device's memory, on a stand-in for the driver --------------------------------------------


@pytest.fixture
def _fake_device() -> Iterator[None]:
    with driver_of(FakeDriver()):
        yield


@pytest.mark.usefixtures("_fake_device")
def test_device_memory_is_filled_and_fetched_as_the_host_laid_it_out() -> None:
    import ctypes

    from gemmule.oracle.inputs import make_inputs
    from gemmule.tuning.operands import DevicePlace, of_inputs, put_all

    place = DevicePlace.__new__(DevicePlace)  # without its clock, which times on a device
    place.ordinal = 0
    for problem, view in (
        (PROBLEM, "sliced"),
        (REAL["col"], "padded"),
        (REAL["batch"], "reversed"),
    ):
        inputs = make_inputs(problem, "integers", 3, view)
        host = of_inputs(inputs)
        operands = put_all(place, host, copy=True)
        for operand, frame in zip(operands, (host.a, host.b, host.out), strict=True):
            address = frame.array.__array_interface__["data"][0]
            assert (operand.pointer - address) % 256 == 0
            there = (ctypes.c_char * frame.array.itemsize).from_address(operand.pointer).raw
            assert there == frame.array.flat[0].tobytes()
            assert operand.form.strides == tuple(s // 4 for s in frame.array.strides)
        before = host.b.buffer.copy()
        host.b.buffer[:] = 0
        place.fetch(operands[1], host.b)
        assert (host.b.buffer == before).all()
        ctypes.memset(operands[2].pointer, 0, 4)
        place.fetch(operands[2], host.out)
        assert (host.out.array == 0).sum() == 1
        inputs.poison()
        place.send(host.out, operands[2])
        place.fetch(operands[2], host.out)
        assert np.isnan(host.out.array).all()


# --- samples of large results ---------------------------------------------------------------------


def test_a_sample_meets_every_tile(limit: Callable[..., None]) -> None:
    from gemmule.tuning import trials
    from gemmule.tuning.operands import canonical_call, random_operands

    k, tile = 8, 32
    problem = Problem("matmul", 1024, 768, k, alignment=4)
    limit(trials, SAMPLED_ELEMENTS=k * 32)
    host = random_operands(problem, 1)
    sample = trials.sampled(problem, host, 1)
    assert len(sample.parts[0].rows) == 32
    rung = next(r for r in registry.all_rungs("cpu") if (r.folder, r.name) == ("matmul", "blas"))
    choice = plan_choice(canonical_call(problem, host), rung)
    right = host.a.array @ host.b.array  # type: ignore[union-attr]
    assert sample.complaint(choice, right) == ""
    for row in range(0, 1024, tile):
        wrong = right.copy()
        wrong[row : row + tile, 64 : 64 + tile] = np.nan
        assert "at the full size" in sample.complaint(choice, wrong), row


def plan_choice(call: Any, rung: Rung) -> Any:
    return choose(call, _cpu(), rung.name)


@pytest.mark.parametrize(
    "problem",
    [
        Problem("matvec", 10**6, 4099),
        Problem("matvec", 5, 10**7),
        Problem("matvec", 3, 4),
        Problem("matmul", 5000, 4097, 10**5, batch=9),
        Problem("matvec", 0, 10**6),
    ],
)
def test_the_smaller_problem_keeps_remainders(problem: Problem) -> None:
    from gemmule.tuning.trials import smaller

    small = smaller(problem)
    for name in ("m", "n", "k"):
        size, kept = getattr(problem, name), getattr(small, name)
        assert kept <= size
        assert kept == size or (kept % 128 == size % 128 and kept >= 128)
    assert small.m * small.reduction <= 2**25
    assert small.batch <= 3
    assert smaller(small) == small or small.op == "matvec"
