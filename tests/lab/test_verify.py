"""Volume runs: trials follow from their number, wrong kernels are found, snippets repeat them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmule as gm
from emulated_driver import emulated
from gemmule.oracle import relations
from gemmule.oracle.inputs import VIEWS
from gemmule.oracle.problems import make_problem
from gemmule_lab.verify import on_device, random_products, workers
from gemmule_lab.verify.random_products import (
    DRAWS,
    Case,
    Choice,
    Problem,
    Trial,
    draw,
    run,
    snippet,
)
from gemmule_lab.verify.workers import Tally, run_trials
from proofs.apart import each_apart


def test_trials_follow_from_seed_and_number() -> None:
    first = [draw(Choice(), 5, number) for number in range(40)]
    assert first == [draw(Choice(), 5, number) for number in range(40)]
    assert first != [draw(Choice(), 6, number) for number in range(40)]
    assert len({repr(trial) for trial in first}) == 40


def test_a_trial_s_repr_makes_it_again() -> None:
    for number in range(60):
        trial = draw(Choice(), 0, number)
        source = snippet(trial)
        names: dict[str, Any] = {}
        exec(source.replace(f"print(run({trial!r}))", f"again = {trial!r}"), names)
        assert names["again"] == trial


def test_every_op_and_kind_comes_up() -> None:
    trials = [draw(Choice(), 1, number) for number in range(400)]
    assert {trial.op for trial in trials} == {"matvec", "vecmat", "matmul"}
    assert any(trial.case.problem.quant for trial in trials)
    assert {trial.case.kind for trial in trials} >= {"integers", "normal", "cancel", "nonfinite"}
    assert {trial.into_out for trial in trials} == {True, False}
    assert {t.op for t in (draw(Choice("vecmat"), 1, n) for n in range(9))} == {"vecmat"}


@pytest.mark.parametrize("op", ["matvec", "vecmat", "matmul"])
def test_right_products_pass(op: str) -> None:
    problem = Problem("matmul" if op == "matmul" else "matvec", 5, 7, 6 if op == "matmul" else 1)
    for seed, into_out in ((1, True), (2, False)):
        for kind in ("integers", "normal"):
            outcome = run(Trial(op, Case(problem, kind, seed), into_out))
            assert outcome.status == "ok", outcome


def test_a_single_float64_product_is_allowed_its_rounding() -> None:
    problem = Problem("matvec", 64, 1, a="float64", b="float64", out="float64", alignment=8)
    for rung in ("blas", "scalar_loop"):
        outcome = run(Trial("matvec", Case(problem, "normal", 3), rung=rung))
        assert outcome.status == "ok", outcome
        assert outcome.ratio > 0.1, "the products are exact, so the bound was not tried"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_infinity_times_a_single_zero_is_nan(dtype: str) -> None:
    A, x = np.full((3, 1), np.inf, dtype), np.zeros(1, dtype)
    with np.errstate(invalid="ignore"):
        assert np.isnan(gm.matvec(A, x)).all()
        assert np.isnan(gm.matvec(A, x, rung="blas")).all()
        assert np.isnan(gm.vecmat(x, A.T)).all()


def _last_element_off(sound: Any, a: Any, b: Any, /, **options: Any) -> Any:
    result = sound(a, b, **options)
    if result.size:
        result[..., -1] += 1
    return result


def test_a_planted_bug_is_found_and_counted(fault: Callable[..., Any]) -> None:
    fault(gm, "matvec", _last_element_off)
    problem = Problem("matvec", 6, 9)
    assert run(Trial("matvec", Case(problem, "integers", 1))).status == "wrong"
    assert run(Trial("matvec", Case(problem, "integers", 1), into_out=True)).status == "wrong"
    tally = Tally()
    for number in range(8):
        trial = Trial("matvec", Case(problem, "integers", number))
        tally.count(number, trial, run(trial))
    assert (tally.done, tally.wrong, tally.ok) == (8, 8, False)


def test_a_result_kept_from_the_trial_before_is_found(fault: Callable[..., Any]) -> None:
    trials = [draw(Choice("matvec", "scalar_loop"), 5, number) for number in range(DRAWS)]
    assert len({trial.case.problem for trial in trials}) == 1
    assert 0 not in (trials[0].case.problem.m, trials[0].case.problem.n)
    kept: list[Any] = []

    def stale(sound: Any, a: Any, b: Any, /, **options: Any) -> Any:
        kept.append(sound(a, b, **options))
        return kept[0].copy()

    fault(gm, "matvec", stale)
    planned: dict[Trial, gm.Plan] = {}
    assert [run(trial, planned).status for trial in trials] == ["ok", *["wrong"] * (DRAWS - 1)]
    assert len(planned) == 1


LARGE = Problem("matmul", 210, 220, 230)


@pytest.mark.parametrize("kind", ["integers", "normal"])
def test_large_products_are_judged_by_rows_and_by_freivalds(
    kind: str, fault: Callable[..., Any]
) -> None:
    trial = Trial("matmul", Case(LARGE, kind, 3))
    assert relations.too_large(LARGE)
    assert run(trial).status == "ok"
    full = set(relations.some_rows(LARGE.m, 3).tolist())
    other = next(row for row in range(LARGE.m) if row not in full)

    change_of: list[tuple[int, float]] = []

    def damaged(sound: Any, a: Any, b: Any, /, **options: Any) -> Any:
        result = sound(a, b, **options)
        ((row, change),) = change_of
        result[row, 7] += change
        return result

    fault(gm, "matmul", damaged)
    # Among the bounds of a whole row a unit would be lost: full rows are for what is smaller.
    for one in ((other, 1 if kind == "integers" else 50), (LARGE.m - 1, 1)):
        change_of[:] = [one]
        outcome = run(trial)
        assert outcome.status == "wrong", (one, outcome)
        assert (f"row {other} of C v" if one[0] == other else "of rows") in outcome.text


@pytest.mark.parametrize("seed", [0, 260])
def test_large_products_of_nan_and_infinities_are_judged_in_full(
    seed: int, fault: Callable[..., Any]
) -> None:
    trial = Trial("matmul", Case(LARGE, "nonfinite", seed))
    assert run(trial).status == "ok"

    def damaged(sound: Any, a: Any, b: Any, /, **options: Any) -> Any:
        result = sound(a, b, **options)
        result[np.isnan(result) | np.isinf(result)] = 0
        return result

    fault(gm, "matmul", damaged)
    assert run(trial).status == "wrong"


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        ("matvec", Problem("matvec", 6, 9, batch=3)),
        ("vecmat", Problem("matvec", 6, 9, layout_a="col")),
        ("matmul", Problem("matmul", 6, 7, 9)),
        ("matmul", Problem("matmul", 5, 4, 3, a="int8", b="int8", out="int32")),
    ],
)
def test_products_are_repeated_rearranged(
    op: str, problem: Problem, fault: Callable[..., Any]
) -> None:
    """A product that is right at first, and wrong the second time or with operands rearranged."""
    for drawn in range(5):
        trial = Trial(op, Case(problem, "integers", drawn * relations.REPEATED))
        assert run(trial).status == "ok"
    calls: list[int] = []

    def wrong_from_the_second_call(sound: Any, a: Any, b: Any, /, **options: Any) -> Any:
        result = sound(a, b, **options)
        calls.append(1)
        if len(calls) == wrong:  # the first two are judged by their truth, others by each other
            result.flat[0] += 1
        return result

    fault(gm, op, wrong_from_the_second_call)
    for wrong, drawn in itertools.product((2, 4), range(5)):
        calls.clear()
        outcome = run(Trial(op, Case(problem, "integers", drawn * relations.REPEATED)))
        assert outcome.status == "wrong", outcome
        assert len(calls) >= wrong
    calls.clear()
    assert run(Trial(op, Case(problem, "integers", 1))).status == "ok"
    assert len(calls) == 3  # none to repeat it; the last is with more axes


def test_a_rung_that_refuses_the_rearranged_operands_is_not_blamed() -> None:
    problem = Problem("matvec", 6, 9, layout_a="col")
    for drawn in range(5):
        case = Case(problem, "integers", drawn * relations.REPEATED)
        assert run(Trial("matvec", case, rung="panels")).status == "ok"


def test_large_products_come_up() -> None:
    number = random_products.LARGE_EVERY // 2 * DRAWS
    for choice in (Choice(), Choice("matmul"), Choice(rung="packed")):
        trials = [draw(choice, seed, number) for seed in range(6)]
        assert any(relations.too_large(trial.case.problem) for trial in trials)
    assert draw(Choice("vecmat"), 0, number).op == "vecmat"
    assert draw(Choice(rung="four_rows"), 0, number).case.problem.op == "matvec"


def test_a_forgotten_out_is_found(fault: Callable[..., Any]) -> None:
    def ignores_out(sound: Any, a: Any, b: Any, /, out: Any = None, **options: Any) -> Any:
        return sound(a, b, **options)

    fault(gm, "matvec", ignores_out)
    outcome = run(Trial("matvec", Case(Problem("matvec", 3, 4), "integers", 1), into_out=True))
    assert outcome.status == "wrong"
    assert "not the out" in outcome.text


def test_what_is_raised_is_an_outcome() -> None:
    outcome = run(Trial("matvec", Case(Problem("matvec", 3, 4)), rung="no_such_rung"))
    assert outcome.status == "raised"
    assert "no_such_rung" in outcome.text


def test_named_rungs_meet_only_problems_they_take() -> None:
    trials = [draw(Choice(rung="four_rows"), 0, number) for number in range(30)]
    assert {trial.rung for trial in trials} == {"four_rows"}
    assert {trial.case.problem.layout_a for trial in trials} == {"row"}
    with pytest.raises(ValueError, match=r"no cpu rung is called 'nope'.*four_rows"):
        run_trials(Choice(rung="nope"), 1, 0, 1)


def test_the_second_of_two_products_of_a_batch_is_looked_at(fault: Callable[..., Any]) -> None:
    def spoiled(sound: Any, trial: Trial, left: Any, right: Any, out: Any) -> Any:
        found = sound(trial, left, right, out)
        if out is None and np.shape(found)[:2] == (2, 1):
            found = np.array(found)
            found[1] += 1
        return found

    fault(random_products, "_call", spoiled)
    assert not run_trials(Choice("matvec"), 400, 0, 1).ok


def test_workers_do_the_same_trials_as_one_process() -> None:
    choice = Choice("matvec", rung="scalar_loop")
    alone = run_trials(choice, 24, 0, 1)
    together = run_trials(choice, 24, 0, 2)
    assert alone.ok
    assert (alone.done, alone.worst_ratio) == (together.done, together.worst_ratio)
    assert together.ok


def _dies(
    choice: Choice, seed: int, starts: range, cases: int, seconds: float, channel: Any, place: Any
) -> None:
    place.value = starts[0]
    os.kill(os.getpid(), 9)


def test_no_trial_begins_after_the_time() -> None:
    assert run_trials(Choice("matvec"), 10**9, 0, 1, seconds=0.2).done < 10**6
    assert run_trials(Choice("matvec"), 2, 0, 1, seconds=60).done == 2


def test_a_dead_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_work", _dies)
    fork = multiprocessing.get_context("fork")  # so that the patched function reaches the child
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda name: fork)
    tally = run_trials(Choice("matvec"), 2 * DRAWS, 0, 2)
    assert not tally.ok
    assert tally.deaths
    assert "exit code -9" in tally.deaths[0]


def _task(name: str, folder: str) -> str:
    """Return a name; kill the process for one, and once, for another, where nothing stands yet."""
    mark = Path(folder) / name
    if name == "dies" or (name == "dies once" and not mark.exists()):
        mark.touch()
        os.kill(os.getpid(), 9)
    if name == "raises":
        raise ValueError(name)
    return name


def test_a_task_whose_process_dies_is_told_and_takes_no_other_along(tmp_path: Path) -> None:
    names = ("dies once", "dies", "raises", "works")
    kept: dict[str, list[object]] = {name: [] for name in names}
    tasks = [(name, str(tmp_path)) for name in names]
    each_apart(_task, tasks, 1, lambda task, found: kept[task[0]].append(found))  # one: in order
    assert [len(found) for found in kept.values()] == [1, 1, 1, 1]
    assert isinstance(kept["dies"][0], BrokenProcessPool)
    assert isinstance(kept["raises"][0], ValueError)
    assert (kept["dies once"], kept["works"]) == (["dies once"], ["works"])


@pytest.mark.parametrize("problem", [384, 640, 896, 1152])
def test_products_too_large_for_their_truth_are_judged(problem: int) -> None:
    trial = random_products.draw(Choice("matmul"), 0, problem * DRAWS)
    assert relations.too_large(trial.case.problem)
    outcome = random_products.run(trial)
    assert outcome.status == "ok", outcome


OPS = ("matvec", "vecmat", "matmul")


def test_operands_lie_on_a_device_as_they_lie_on_the_host() -> None:
    """Every view, into a given out or a fresh result, under a driver whose kernels are emulated."""
    rungs = ["thread_per_row", "naive"]  # which take every stride
    with emulated():
        for view, into_out, op in itertools.product(VIEWS, (True, False), OPS):
            layout = "row" if op == "vecmat" else "strided" if view == "strided" else "col"
            kind = "matmul" if op == "matmul" else "matvec"
            problem = make_problem(kind, 3, 7, 5, ("float32",) * 3, layout_a=layout, batch=2)
            case = Case(problem, "integers", 5, view)
            trial = Trial(op, case, into_out, rungs[op == "matmul"], None, "cuda")
            outcome = run(trial)
            assert outcome.status == "ok", (trial, outcome)


def test_a_device_result_written_beside_its_place_is_seen(fault: Callable[..., Any]) -> None:
    problem = make_problem("matvec", 3, 7, 1, ("float32",) * 3)
    trial = Trial(
        "matvec", Case(problem, "integers", 5, "strided"), True, "thread_per_row", None, "cuda"
    )

    def damaged(sound: Any, place: Any, operand: Any, frame: Any) -> None:
        sound(place, operand, frame)
        frame.buffer[3] ^= 1

    with emulated():
        assert run(trial).status == "ok"
        fault(on_device.DeviceMemory, "fetch", damaged)
        assert run(trial).status == "wrong"


def test_the_tally_keeps_the_first_bad_trials() -> None:
    total = Tally()
    trial = Trial("matvec", Case(Problem("matvec", 1, 1)))
    bad = random_products.Outcome("wrong", np.inf, "off", "x")
    for number in range(50):
        part = Tally()
        part.count(number, trial, bad)
        total.add(part)
    assert total.wrong == 50
    assert [number for number, _, _ in total.bad] == list(range(workers.MOST_SHOWN))


@pytest.mark.parametrize("rung", ["panels", "unpack_loop"])
def test_named_rungs_of_either_kind_run_or_refuse(rung: str) -> None:
    """`panels` is a dense and a quantised rung; reversed views of a dense matrix it refuses."""
    tally = run_trials(Choice(rung=rung), 40, 0, 1)
    assert tally.ok, tally.bad
    assert tally.done == 40
    assert tally.refused < 20
    assert (tally.refused > 0) == (rung == "panels")


def test_what_drawn_problems_permit_is_asked_for(fault: Callable[..., Any]) -> None:
    asked: list[Any] = []

    def noted(sound: Any, *given: Any, **named: Any) -> Any:
        asked.append(named.get("activations"))
        return sound(*given, **named)

    fault(gm, "matvec", noted)
    assert run_trials(Choice("quantized"), 60, 0, 1).ok
    assert set(asked) == {"float", "int8"}


def test_a_rung_that_refuses_everything_is_not_right() -> None:
    assert not Tally(done=3, refused=3).ok
    assert Tally(done=3, refused=2).ok
