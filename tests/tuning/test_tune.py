"""The tuner on planted rungs and made-up clocks: what it finds, what it refuses, and why."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from gemmule.backends.cpu import launch as cpu
from gemmule.core import registry
from gemmule.core.problem import Problem
from gemmule.core.rung import Constraint, Machine, Suggestion
from gemmule.errors import DeviceError
from gemmule.oracle.problems import make_problem
from gemmule.timing.clock import Entry
from gemmule.timing.sampler import Ratio
from gemmule.tuning import isolated, space, tuner
from gemmule.tuning.outcomes import (
    Candidate,
    CompileFailed,
    LaunchFailed,
    Measured,
    Skipped,
    Timeout,
    Wrong,
)
from gemmule.tuning.session import Session
from made_rungs import (
    DEFAULT,
    FASTER,
    PROBLEM,
    FakeClock,
    FakePlace,
    Plant,
    cpu_machine,
    entries,
    made_rung,
    outcome_of,
    tuned,
)
from planted import planted

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
    copies = {id(operands[0]) for operands in session.sets}
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


def test_the_most_promising_come_first_and_rungs_take_turns(plant: Plant) -> None:
    block = {"block": tuple(range(1, 200))}
    a = made_rung("a", expected_s=2e-5, params=block)
    b = made_rung("b", expected_s=1e-5, params=block)
    late, hopeless = made_rung("late", expected_s=None, params=block), made_rung("far", "", 1e-3)
    machine = cpu_machine()
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


def test_where_rungs_tell_of_all_parameters_the_quickest_expected_come_first() -> None:
    machine = Machine("cuda", "NVIDIA H200", "sm_90a", 132, 4.7e12, 60 << 20, 227 << 10)
    problem = make_problem("matmul", 700, 300, 5000, ("float16",) * 3)
    cublas = registry.rung_in("matmul", "cuda", "cublas")
    found, _ = space.candidates(problem, machine, Candidate(cublas, {"rank": 0}, 1e-5))
    told = [one for one in found if one.rung.seconds is not None]
    assert found[: len(told)] == told
    assert len({one.rung.name for one in told}) > 2
    for one in told:
        assert one.rung.seconds is not None
        assert one.expected_s == one.rung.seconds(problem, one.params, machine)
    times = [one.expected_s or 0.0 for one in told]
    assert times == sorted(times)


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


def test_a_process_that_tells_times_and_dies_is_not_believed() -> None:
    found = _apart(f"import os; print({json.dumps(TOLD)!r}, flush=True); os._exit(7)")
    assert isinstance(found, LaunchFailed)
    assert "ended with status 7" in found.text


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
