"""The order of the ladders: a main line of steps that each gain, by the record, and branches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmule.core import registry
from gemmule.core.registry import OPS, Ladder, ladder
from gemmule.core.rung import BACKENDS, Rung
from gemmule_lab.report.ladder_gains import Gain, before, gains, newest

RUNG = next(r for r in ladder("matvec", "cpu") if r.name == "scalar_loop")
RUNS = {backend: newest(backend) for backend in BACKENDS}


def make(name: str, after: str | None = None, branch: str = "", folder: str = "matvec") -> Rung:
    return replace(RUNG, name=name, folder=folder, after=after, branch=branch)


def numbered(*rungs: Rung) -> list[str]:
    return [f"{number} {rung.name}" for number, rung in registry.in_order(rungs, "matvec")]


def on_record(op: str, backend: str) -> dict[str, Gain]:
    run = RUNS[backend]
    assert run is not None
    return gains(op, backend, run.rows)


def test_branches_stand_beside_the_step_that_they_leave() -> None:
    rungs = [
        make("z"),
        make("y", "z"),
        make("a", "y"),
        make("b", "z", "another order"),
        make("c", "b"),
        make("d", "b", "rows that are short"),
        make("e", "z", "losing"),
        make("library", None, "the vendor's"),
        make("other", None, folder="vecmat"),
    ]
    assert numbered(*reversed(rungs)) == [
        "1 z", "1a1 b", "1a1a d", "1a2 c", "1b e", "1c library", "1d other", "2 y", "3 a",
    ]  # fmt: skip
    held = Ladder(registry.in_order(rungs, "matvec"))
    assert [rung.name for rung in held.steps] == ["z", "y", "a"]
    told = {rung.name: held.branch(rung) for rung in held}
    assert told["y"] == told["c"] == ""
    assert told["b"] == "another order"
    assert "vecmat ladder" in told["other"]
    assert str(held).splitlines()[1].split()[:2] == ["1a1", "b"]


def test_circles_unknown_predecessors_and_forks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"circle: a, b"):
        numbered(make("z"), make("a", "b"), make("b", "a"))
    with pytest.raises(ValueError, match="after unknown 'q'"):
        numbered(make("z"), make("a", "q"))
    with pytest.raises(ValueError, match="b and c both continue z; say of one why"):
        numbered(make("z"), make("b", "z"), make("c", "z"))
    with pytest.raises(ValueError, match="q and z both begin the ladder"):
        numbered(make("z"), make("q"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_each_step_of_a_main_line_is_faster_on_record(op: str, backend: str) -> None:
    gained = on_record(op, backend)
    first, *steps = ladder(op, backend).steps
    assert first.after is None
    assert steps
    for step, earlier in zip(steps, (first, *steps), strict=False):
        assert step.after == earlier.name
        gain = gained.get(step.name)
        assert gain, f"{step.name} is not on record"
        assert gain.times > 1, f"{step.name} is slower on record: {gain}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_the_last_step_is_the_fastest_of_its_line_at_its_product(op: str, backend: str) -> None:
    run, rungs = RUNS[backend], ladder(op, backend)
    assert run is not None
    last = rungs.steps[-1]
    product = on_record(op, backend)[last.name].product
    names = {rung.name for rung in rungs.steps}
    times = {r.name: r.times_us.median for r in run.rows if r.group == product and r.name in names}
    assert min(times, key=times.__getitem__) == last.name


def test_a_gain_is_over_the_nearest_step_that_was_timed() -> None:
    steps = ladder("matmul", "cuda").steps
    names = [step.name for step in steps]
    assert before(steps[3], steps, names) == names[2]
    assert before(steps[3], steps, [names[0]]) == names[0]
    assert before(steps[3], steps, []) is None
