"""The paired sampler on clocks whose truth is known: drift, noise, order, rotation, stop rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fake_clock import FakeClock, entries_on
from gemmule.timing.clock import Entry, Host, HostClock
from gemmule.timing.machine import Rotation, last_level_cache_bytes, rotation
from gemmule.timing.sampler import CONFIDENCE, Budget, Samples, ratio, sample


def test_planted_drift_does_not_fool_the_paired_ratio() -> None:
    clock = FakeClock({"a": 1.00e-3, "b": 1.03e-3}, noise=0.002, pace=lambda t: 1 + t)
    run = sample(entries_on(clock), clock, Budget(max_seconds=8, max_blocks=40, precision=1e-9))
    a, b = run["a"], run["b"]
    assert max(a.seconds) > 1.3 * min(a.seconds), "the drift has to be there to be resisted"
    paired = ratio(b, a)
    assert paired.value == pytest.approx(1.03, rel=0.01)
    assert paired.low <= 1.03 <= paired.high
    assert paired.verdict == "slower"
    # The mutant: first all of b, then all of a, on the same drifting machine, says the opposite.
    half = a.n // 2
    assert np.median(b.seconds[:half]) < np.median(a.seconds[half:])


def test_interval_covers_the_truth() -> None:
    rng = np.random.default_rng(5)
    truth, trials, covered = 0.97, 300, 0
    for trial in range(trials):
        logs = math.log(truth) + 0.03 * rng.standard_t(3, 25)
        base = made_samples("base", np.ones(25))
        other = made_samples("other", np.exp(logs))
        interval = ratio(other, base, seed=trial)
        covered += interval.low <= truth <= interval.high
    assert 0.90 <= covered / trials <= 0.995


def test_order_is_random_and_balanced() -> None:
    clock = FakeClock({"a": 1e-3, "b": 1e-3, "c": 1e-3})
    sample(entries_on(clock), clock, Budget(min_blocks=300, max_blocks=300, max_seconds=1e6))
    rounds = [name for name, _, _ in clock.blocks[-900:]]
    orders = [tuple(rounds[i : i + 3]) for i in range(0, 900, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    counts = {order: orders.count(order) for order in itertools.permutations("abc")}
    assert min(counts.values()) > 25, counts  # 50 expected of each of the six


def test_seed_repeats_the_order_and_another_seed_does_not() -> None:
    def order(seed: int) -> list[str]:
        clock = FakeClock({"a": 1e-3, "b": 1e-3, "c": 1e-3})
        sample(entries_on(clock), clock, Budget(min_blocks=20, max_blocks=20), seed=seed)
        return [name for name, _, _ in clock.blocks]

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_rotation_goes_on_across_contestants() -> None:
    clock = FakeClock({"a": 0.02, "b": 0.03, "c": 0.04})  # one call fills a block
    sets = 7
    sample(entries_on(clock, sets), clock, Budget(min_blocks=12, max_blocks=12, max_seconds=1e6))
    expected = 0
    for _, first, calls in clock.blocks:
        assert first == expected % sets, "a set came up again before the rotation was round"
        expected += calls


def test_what_the_clock_has_prepared_is_not_prepared_again(fault: Callable[..., Any]) -> None:
    clock, asked = FakeClock({"a": 0.02, "b": 0.03}), []
    entries = entries_on(clock, 2)
    runners = {"a": clock.prepare(entries[0])}
    fault(clock, "prepare", lambda sound, one: asked.append(one.name) or sound(one))
    budget = Budget(min_blocks=3, max_blocks=3, max_seconds=1e6)
    assert set(sample(entries, clock, budget, runners=runners)) == {"a", "b"}
    assert asked == ["b"]


def test_host_clock_walks_the_sets_in_order() -> None:
    seen: list[int] = []
    run = HostClock(settled_s=0.0).prepare(Entry("walk", seen.append, sets=3))
    timing = run(2, 7)
    assert seen == [1, 2, 0, 1, 2, 0, 1, 2], "the first call is the untimed one"
    assert timing.calls == 7
    seen.clear()
    run(0, 2)
    assert seen == [0, 1], "no other entry came between, so nothing has to be woken"
    assert timing.seconds > 0


@dataclass
class TwoPools:
    """A machine of two cores and two libraries, each with a pool whose threads spin after a call.

    A call takes `costs[name]`, and `stall_s` more while the other library's threads spin. One
    spinning thread uses one core; the caller's own core is used by calls only.
    """

    costs: dict[str, float]
    spin_s: float = 0.02
    stall_s: float = 0.008
    wall_s: float = 0.0
    cpu_s: float = 0.0
    spins_until: dict[str, float] = field(default_factory=dict)
    sets: list[tuple[str, int]] = field(default_factory=list)

    def host(self) -> Host:
        return Host(lambda: round(self.wall_s * 1e9), lambda: round(self.cpu_s * 1e9), self.sleep)

    def sleep(self, seconds: float) -> None:
        for until in self.spins_until.values():
            self.cpu_s += min(seconds, max(0.0, until - self.wall_s))
        self.wall_s += seconds

    def call(self, name: str) -> Callable[[int], None]:
        def run(index: int) -> None:
            self.sets.append((name, index))
            others = [until for pool, until in self.spins_until.items() if pool != name]
            stalled = any(until > self.wall_s for until in others)
            seconds = self.costs[name] + self.stall_s * stalled
            self.wall_s += seconds
            self.cpu_s += 2 * seconds
            self.spins_until[name] = self.wall_s + self.spin_s

        return run

    def entries_on(self, sets: int = 1) -> list[Entry]:
        return [Entry(name, self.call(name), sets) for name in self.costs]


@pytest.mark.parametrize("cost", [1e-4, 3e-3, 0.05])
def test_spinning_pools_do_not_fool_the_host_clock(cost: float) -> None:
    costs = {"a": cost, "b": 0.8 * cost}
    machine = TwoPools(costs)
    run = sample(
        machine.entries_on(), HostClock(machine.host()), Budget(max_seconds=60, max_blocks=30)
    )
    for name, truth in costs.items():
        assert run[name].seconds == pytest.approx([truth] * run[name].n, rel=1e-3)
    assert ratio(run["b"], run["a"]).value == pytest.approx(0.8, rel=1e-3)
    assert max(note.get("rest_ms", 0.0) for note in run["a"].notes) >= 19
    assert not any("restless" in note for s in run.values() for note in s.notes)


def test_without_the_rest_the_pools_would_fool_it() -> None:
    machine = TwoPools({"a": 1e-3, "b": 0.8e-3})
    clock = HostClock(machine.host(), longest_rest_s=0.0, settled_s=0.0)
    run = sample(machine.entries_on(), clock, Budget(max_seconds=60, max_blocks=30))
    assert ratio(run["b"], run["a"]).value != pytest.approx(0.8, rel=0.02)
    assert run["a"].median > 1.2e-3


def test_threads_that_share_a_core_for_a_while_do_not_fool_the_host_clock() -> None:
    """Woken on one core, the threads take turns by the scheduler's tick until one is moved."""
    time_s = 0.0
    latest, moved_at = "", 0.0

    def call(name: str) -> Callable[[int], None]:
        def run(index: int) -> None:
            nonlocal time_s, latest, moved_at
            if name != latest:
                latest, moved_at = name, time_s + 0.08
            time_s += 0.008 if time_s < moved_at else 5e-4

        return run

    def sleep(seconds: float) -> None:
        nonlocal time_s
        time_s += seconds

    host = Host(lambda: round(time_s * 1e9), lambda: 0, sleep)
    both = [Entry(name, call(name)) for name in "ab"]
    for settled_s, right in ((0.03, True), (0.0, False)):
        clock = HostClock(host, settled_s=settled_s)
        run = sample(both, clock, Budget(max_seconds=60, max_blocks=30))
        assert (run["a"].median == pytest.approx(5e-4)) is right


def test_what_never_settles_is_waited_for_ever_less() -> None:
    """Another program takes the processor every fifth call; and then it ends."""
    time_s, calls, waits, busy = 0.0, 0, list[float](), False

    def call(index: int) -> None:
        nonlocal time_s, calls
        calls += 1
        time_s += 0.008 if busy and calls % 5 == 0 else 5e-4

    host = Host(lambda: round(time_s * 1e9), lambda: 0, lambda seconds: None)
    clock = HostClock(host)
    runners = [clock.prepare(Entry(name, call)) for name in "ab"]
    for now in (False, True, True, True, False, True):
        busy = now
        for run in runners:
            before = time_s
            run(0, 1)
            waits.append(time_s - before)
    assert waits == pytest.approx(
        [0.01, 0.01, *[0.6, 0.3], *[0.15] * 4, 0.01, 0.01, 0.6, 0.3], abs=0.02
    )


def test_a_process_that_never_rests_is_marked_and_not_waited_for() -> None:
    machine = TwoPools({"a": 1e-3, "b": 1e-3}, spin_s=1e9)
    run = sample(
        machine.entries_on(), HostClock(machine.host()), Budget(max_seconds=30, max_blocks=12)
    )
    notes = [note for s in run.values() for note in s.notes]
    switched = [note for note in notes if "rest_ms" in note]
    assert len(switched) >= 12
    assert all(note["restless"] == 1 and note["rest_ms"] <= 102 for note in switched)


def test_the_untimed_call_brings_no_new_sets_into_the_cache() -> None:
    machine = TwoPools({"a": 0.02, "b": 0.03})
    run = sample(
        machine.entries_on(7), HostClock(machine.host()), Budget(max_blocks=12, max_seconds=1e6)
    )
    walk = [index for _, index in machine.sets]
    steps = [(after - before) % 7 for before, after in itertools.pairwise(walk)]
    assert set(steps) == {0, 1}, "each call goes on to the next set, or repeats the latest"
    assert run["a"].n >= 10


def test_blocks_dwarf_the_timer() -> None:
    clock = FakeClock({"tiny": 1e-7}, overhead_s=2e-5)
    run = sample(
        entries_on(clock), clock, Budget(min_block_s=0.001, max_seconds=1e6, max_blocks=12)
    )
    assert run["tiny"].calls_per_block * 1e-7 >= 0.99 * 1000 * 2e-5


@pytest.mark.parametrize(
    ("noise", "limits", "rule"),
    [
        (1e-4, {"max_seconds": 1e6}, "precise"),
        (0.3, {"max_seconds": 1.0}, "time"),
        (0.3, {"max_seconds": 1e6, "max_blocks": 30}, "blocks"),
    ],
)
def test_the_rule_that_fired_is_recorded(noise: float, limits: dict[str, float], rule: str) -> None:
    clock = FakeClock({"a": 1e-3, "b": 2e-3}, noise=noise)
    run = sample(entries_on(clock), clock, Budget(**limits))
    assert {s.stopped for s in run.values()} == {rule}
    if rule == "precise":
        assert ratio(run["b"], run["a"]).half_width < 0.005
        assert run["a"].n >= 10
    if rule == "blocks":
        assert run["a"].n == 30


def test_a_slow_contestant_still_gets_one_whole_round() -> None:
    clock = FakeClock({"a": 10.0, "b": 20.0})
    run = sample(entries_on(clock), clock, Budget(max_seconds=1.0))
    assert run["a"].n == run["b"].n == 1
    only = ratio(run["b"], run["a"])
    assert only.value == pytest.approx(2.0)
    assert only.verdict == "undecided"
    assert only.confidence == 0.0


@pytest.mark.parametrize(("patience", "rounds"), [(1.0, 1), (4.0, 3), (20.0, 6), (1000.0, 6)])
def test_patience_waits_for_the_rounds_of_an_interval_and_no_longer(
    patience: float, rounds: int
) -> None:
    clock = FakeClock({"a": 0.5, "b": 1.0})
    run = sample(entries_on(clock), clock, Budget(max_seconds=1.5, patience=patience))
    assert run["a"].n == run["b"].n == rounds
    assert (ratio(run["b"], run["a"]).confidence == CONFIDENCE) is (rounds == 6)


def test_warm_up_waits_for_a_settling_clock() -> None:
    def settling(t: float) -> float:
        return 1 + 3 * math.exp(-t / 0.5)

    clock = FakeClock({"a": 1e-3}, pace=settling)
    run = sample(entries_on(clock), clock, Budget(max_seconds=60, max_blocks=20))
    assert run["a"].seconds[0] < 1.3e-3
    assert run["a"].warmup_s > 0.5


@pytest.mark.parametrize(("factor", "verdict"), [(0.9, "faster"), (1.1, "slower"), (1.002, "same")])
def test_verdicts(factor: float, verdict: str) -> None:
    rng = np.random.default_rng(2)
    base = made_samples("base", np.exp(0.002 * rng.standard_normal(40)))
    other = made_samples("other", factor * np.exp(0.002 * rng.standard_normal(40)))
    forth = ratio(other, base)
    assert forth.verdict == verdict
    back = ratio(base, other)
    assert back.value == pytest.approx(1 / forth.value)
    assert forth.inverse().low == pytest.approx(1 / forth.high)


def test_noise_leaves_it_undecided() -> None:
    rng = np.random.default_rng(3)
    a = made_samples("a", np.exp(0.2 * rng.standard_normal(20)))
    b = made_samples("b", np.exp(0.2 * rng.standard_normal(20)))
    assert ratio(a, b).verdict == "undecided"


def test_quartiles_and_notes_are_kept_whole() -> None:
    clock = FakeClock({"a": 1e-3}, noise=0.1)
    kept = sample(entries_on(clock), clock, Budget(max_seconds=1e6, max_blocks=25, min_blocks=25))[
        "a"
    ]
    assert kept.n == len(kept.notes) == 25
    assert kept.best <= kept.q1 <= kept.median <= kept.q3 <= max(kept.seconds)
    assert kept.notes[0] == {"clock_mhz": 1980}
    assert kept.clock == "synthetic"


def test_unpaired_samples_are_refused() -> None:
    a = made_samples("a", np.ones(8))
    with pytest.raises(ValueError, match="different runs"):
        ratio(a, replace(a, run=2))


def test_misuse_is_refused() -> None:
    clock = FakeClock({"a": 1e-3})
    one = entries_on(clock)
    with pytest.raises(ValueError, match="its own name"):
        sample(one * 2, clock)
    with pytest.raises(ValueError, match="max_seconds"):
        sample(one, clock, Budget(max_seconds=0))
    with pytest.raises(ValueError, match="at least one set"):
        Entry("a", lambda i: None, sets=0)
    with pytest.raises(ValueError, match="takes time"):
        sample(one, FakeClock({"a": 0.0}))


def test_rotation_flushes_the_cache_or_says_that_it_cannot() -> None:
    for size in (1000, 1 << 20, 40 << 20, 500 << 20):
        plan = rotation(size, 32 << 20, memory_bytes=4 << 30)
        if plan.cold:
            assert (plan.sets - 1) * size >= 64 << 20
            assert (plan.sets - 2) * size < 64 << 20 or plan.sets == 2
        assert plan.bytes == plan.sets * size
    assert rotation(1 << 30, 32 << 20, memory_bytes=4 << 30) == Rotation(2, 2 << 30, cold=True)
    assert rotation(1 << 30, 32 << 20, memory_bytes=1 << 30) == Rotation(1, 1 << 30, cold=False)
    assert rotation(100, 32 << 20, memory_bytes=4 << 30).cold is False  # too many sets to hold
    assert rotation(1 << 20, 50 << 20, factor=4, memory_bytes=4 << 30).sets == 201


def test_cache_size_is_read_from_sysfs(tmp_path) -> None:
    import os

    cpus = sorted(os.sched_getaffinity(0))
    for cpu in cpus:
        for index, (level, kind, size, shared) in enumerate(
            [
                (1, "Data", "48K", f"{cpu}"),
                (1, "Instruction", "900M", f"{cpu}"),
                (3, "Unified", "32M", "0-63"),
            ]
        ):
            entry = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            entry.mkdir(parents=True)
            for name, text in (
                ("level", str(level)),
                ("type", kind),
                ("size", size),
                ("shared_cpu_list", shared),
            ):
                (entry / name).write_text(text + "\n")
    assert last_level_cache_bytes(tmp_path) == 32 << 20
    for size in tmp_path.glob("cpu*/cache/index2/size"):
        size.write_text("33792K\n")
    assert last_level_cache_bytes(tmp_path) == 33 << 20
    assert last_level_cache_bytes(tmp_path / "nowhere") is None


def made_samples(name: str, seconds: np.ndarray) -> Samples:
    times = tuple(float(s) for s in seconds)
    return Samples(name, times, 1, ({},) * len(times), 0.0, "blocks", "synthetic", 1)
