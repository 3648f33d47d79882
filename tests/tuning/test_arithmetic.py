"""What tuning counts, beside references that are computed in another way, on made-up machines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmule.backends.cpu import launch as cpu
from gemmule.backends.cpu import pool as cpu_pool
from gemmule.backends.cpu.jit import unavailable
from gemmule.core.host_rates import DEFAULT_RATES, PLAUSIBLE, HostRates
from gemmule.core.problem import Problem
from gemmule.core.registry import all_rungs
from gemmule.core.rung import Machine
from gemmule.storage import rates as store_rates
from gemmule.timing.clock import Entry
from gemmule.tuning import fit, sample
from gemmule.tuning import rates as tuning_rates
from gemmule.tuning.fit import Timed
from gemmule.tuning.outcomes import Candidate
from gemmule.tuning.rates import measure_rates
from gemmule.tuning.session import Session
from made_rungs import PROBLEM, FakeClock, FakePlace, Plant, cpu_machine, made_rung

# --- rates, on a machine that takes as long as it is told -----------------------------------------

TICK = 2.0**-20  # what each reading of the clock takes; binary, so that differences are exact
CALLS = {"dot": 3 * TICK, "matmul": 5000 * TICK, "widened": 70 * TICK, "alone": TICK}


@dataclass
class Ticking:
    """A clock that others move on. Of each five readings one comes late: the machine was busy."""

    seconds: float = 0.0
    readings: int = 0

    def read(self, sound: Any) -> float:
        self.readings += 1
        self.seconds += TICK if self.readings % 5 else 1000 * TICK
        return self.seconds

    def taking(self, seconds: float) -> Callable[..., None]:
        def call(*given: Any, **named: Any) -> None:
            self.seconds += seconds

        return call


class Pool:
    """Kernels that do nothing: one thread alone, or all with what it takes to wake them."""

    def __init__(self, clock: Ticking, waking: float) -> None:
        self.alone, self.waking = clock.taking(CALLS["alone"]), waking
        self.clock = clock

    def __call__(self, shares: int, word: int) -> None:
        assert shares == cpu.machine().units
        self.clock.seconds += CALLS["alone"] + self.waking


@pytest.mark.skipif(unavailable() is not None, reason="rates are of compiled kernels")
@pytest.mark.parametrize("waking", [40 * TICK, 0.0, -TICK])
def test_rates_are_work_over_the_best_time(
    waking: float, own_cache: Path, fault: Callable[..., Any], limit: Callable[..., None]
) -> None:
    limit(tuning_rates, LARGEST_BYTES=1 << 22, TILES=3)
    clock = Ticking()
    fault(np, "dot", lambda sound, *given, **named: clock.taking(CALLS["dot"])())
    fault(np, "matmul", lambda sound, *given, **named: clock.taking(CALLS["matmul"])())
    fault(tuning_rates, "widened", lambda sound, *given: clock.taking(CALLS["widened"])())
    fault(cpu_pool, "in_pool", lambda sound, *given: Pool(clock, waking))
    cpu.machine()
    fault(time, "perf_counter", clock.read)
    found = measure_rates(fresh=True)
    assert found.read == found.core_read == (1 << 22) / TICK
    assert found.core_cached == found.core_read  # by the time told, not by what fits a cache
    assert found.blas == 2 * 1024**3 / (CALLS["matmul"] + TICK)
    assert found.convert == 1024**2 / (CALLS["widened"] + TICK)
    assert found.blas_call == CALLS["dot"] + TICK
    assert found.call == CALLS["alone"] + TICK
    assert found.spread == max(waking, 1e-7)  # a call with helpers is none that takes less
    adds = found.fma * TICK  # of a tile 256 deep, three times
    assert adds % (3 * 256) == 0
    assert 64 <= adds / (3 * 256) <= 2048
    assert found.asked in (1.0, DEFAULT_RATES.asked)
    assert found.measured == time.strftime("%Y-%m-%d")
    machine = cpu.machine()
    assert machine.rates == found == store_rates.read(machine.name, machine.arch, machine.units)


# --- least squares, beside the sum that they are to make small ------------------------------------


def far_from(
    predict: fit.Predict, start: fit.Floats, at: fit.Floats, measured: fit.Floats, pull: float
) -> float:
    """Return what `least_squares` makes small, as its docstring has it, term by term."""
    total = 0.0
    for modelled, seconds in zip(predict(at)[0].tolist(), measured.tolist(), strict=True):
        apart = math.log(modelled / seconds)
        total += (fit.FAR * math.asinh(apart / fit.FAR)) ** 2
    moved = sum(math.log(one / first) ** 2 for one, first in zip(at, start, strict=True))
    return total + pull**2 * len(measured) * moved


def two_ways(rng: np.random.Generator, rows: int) -> fit.Predict:
    """Return times of which one part comes first and of two others the longer one counts."""
    amounts = rng.lognormal(0, 1.5, (3, rows, 4)) * (rng.random((3, 1, 4)) < 0.7)
    amounts[0] += 0.01

    def predict(at: fit.Floats) -> tuple[fit.Floats, fit.Floats]:
        first, one, other = amounts @ at
        longer = (one >= other)[:, None]
        return first + np.maximum(one, other), amounts[0] + np.where(longer, *amounts[1:])

    return predict


@pytest.mark.parametrize("pull", [1e-4, 0.02, 0.3])
@pytest.mark.parametrize("seed", range(6))
def test_no_coefficients_nearby_fit_better(seed: int, pull: float) -> None:
    rng = np.random.default_rng(seed)
    predict, start = two_ways(rng, 60), rng.lognormal(0, 0.3, 4)
    measured = predict(rng.lognormal(0, 1, 4))[0] * rng.lognormal(0, 0.05, 60)
    measured[:12] *= 40  # the machine was busy with something else
    found = fit.least_squares(predict, start, measured, pull)
    best = far_from(predict, start, found, measured, pull)
    assert best < far_from(predict, start, start, measured, pull)
    for size in (0.3, 0.1, 0.03):
        for _ in range(60):
            other = found * np.exp(rng.uniform(-size, size, 4))
            assert best < far_from(predict, start, other, measured, pull) * 1.003 + 1e-4


# --- rates of a CPU, fitted to whole products -----------------------------------------------------


def everyday(machine: Machine, truth: HostRates, seed: int, products: int) -> Iterator[Timed]:
    """Yield products as a CPU of these rates takes them, by the parameters that each suggests."""
    there = fit.with_rates(machine, truth)
    floats = (one for one in sample.draw("cpu", seed) if one.quant is None)
    for problem in islice(floats, products):
        for rung in all_rungs("cpu", (problem.op,)):
            made = None if rung.refusal(problem) else rung.suggest(problem, there)
            if made is not None:
                params = rung.check_params(problem, made.params)
                yield Timed(problem, rung, params, made.expected_s)


def far_off(machine: Machine, rates: HostRates, rows: list[Timed]) -> float:
    """Return the mean of the logarithms by which rates miss times that others made."""
    told = np.array([fit.suggested(machine, rates, row) for row in rows])
    apart = np.log(told / [row.seconds for row in rows])
    return float(np.abs(apart[~np.isnan(apart)]).mean())


@pytest.mark.parametrize("seed", [1, 2])
def test_rates_of_a_made_up_cpu_are_found_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    machine = replace(cpu_machine(), units=8, rates=DEFAULT_RATES, cache_bytes=32 << 20)
    machine = fit.with_rates(machine, DEFAULT_RATES)
    other = {name: getattr(DEFAULT_RATES, name) * rng.lognormal(0, 0.7) for name in PLAUSIBLE}
    truth = HostRates(**other)
    rows = list(everyday(machine, truth, seed, 60))
    found = fit.judged_rates(machine, rows)
    before, after = (far_off(machine, rates, rows) for rates in (DEFAULT_RATES, found.model))
    assert before > 0.3
    assert after < before / 4
    assert found.after.mean <= found.before.mean
    # And what none of the products says anything of stays.
    assert found.model.measured == DEFAULT_RATES.measured


# --- what choices lose, and how long blocks are ---------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_errors_and_losses_are_those_of_a_table(seed: int) -> None:
    rng, rungs = np.random.default_rng(seed), all_rungs("cpu", ("matvec",))[:3]
    seconds = rng.lognormal(-9, 1, (40, 3))
    expected = seconds * rng.lognormal(0, 0.4, (40, 3))
    expected[rng.random((40, 3)) < 0.2] = 0  # of which a model says nothing
    cells = [(i, j) for i in range(40) for j in range(3)]
    rows = [Timed(Problem("matvec", 8 + i, 8), rungs[j], {}, seconds[i, j]) for i, j in cells]
    told = {id(row): expected[cell] for row, cell in zip(rows, cells, strict=True)}
    lost = []
    for known, times in zip(expected, seconds, strict=True):
        ways = [j for j in range(3) if known[j] > 0]
        if ways:  # the best is that of all, told or not
            chosen = sorted(ways, key=lambda j: known[j])[0]
            lost.append(times[chosen] / sorted(times)[0] - 1)
    found = fit.loss(rows, lambda row: told[id(row)])
    assert found.products == len(lost)
    assert found.mean == pytest.approx(sum(lost) / len(lost))
    assert sorted(lost)[-2] <= found.worst <= sorted(lost)[-1]
    errors = fit.errors(rows, lambda row: told[id(row)])
    assert set(errors) == {f"matvec/{one.name}" for one in rungs}
    for j, rung in enumerate(rungs):
        some = [(k, s) for k, s in zip(expected[:, j], seconds[:, j], strict=True) if k > 0]
        within = sum(max(k / s, s / k) <= 1 + errors[f"matvec/{rung.name}"] for k, s in some)
        assert 0.9 * len(some) - 1 <= within <= 0.9 * len(some) + 1


@pytest.mark.parametrize("costs", [(2e-6, 3e-6), (4e-3, 2e-6), (3e-2, 2e-2)])
def test_blocks_take_a_millisecond_or_the_slowest_call(
    plant: Plant, costs: tuple[float, float]
) -> None:
    rungs = plant(made_rung("usual"), made_rung("other"))
    clock = FakeClock({f"matvec/{r.name}(block=1)": s for r, s in zip(rungs, costs, strict=True)})
    session = Session(PROBLEM, cpu_machine(), FakePlace(clock))
    entries = [session.admit(Candidate(rung, {"block": 1})) for rung in rungs]
    assert all(isinstance(one, Entry) for one in entries)
    runs = session.race(entries, 2.0, min_blocks=6, precision=0.01, seed=0)  # type: ignore[arg-type]
    for name, seconds in clock.costs.items():
        block = runs[name].calls_per_block * seconds
        wanted = min(max(*costs, 1e-3), 1e-2)
        assert wanted <= block * (1 + 1e-9)
        assert block < wanted + seconds
