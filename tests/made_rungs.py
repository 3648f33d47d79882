"""Rungs with planted faults and a clock of made-up times, for tests of the tuner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import gemmule as gm
from gemmule.core.problem import Problem
from gemmule.core.rung import Arithmetic, CpuRung, Machine, Rung, Suggestion, same
from gemmule.errors import CompileError, DeviceError
from gemmule.storage import tuned as tuned_store
from gemmule.timing.clock import Entry, Timing
from gemmule.tuning import tuner
from gemmule.tuning.operands import HostPlace
from gemmule.tuning.outcomes import TuneReport

PROBLEM = Problem("matvec", 70, 96, alignment=4)
DEFAULT, FASTER = "matvec/usual(block=1)", "matvec/usual(block=4)"


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
            before = y[3]
            _product(A, x, y)
            if fault == "last element":
                y[-1] += 1
            elif fault == "forgets a product":
                y[:] -= A[:, 17] * x[17]
            elif fault == "unwritten":
                y[3] = before
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


def cpu_machine() -> Machine:
    return gm.plan("matvec", np.ones((2, 2), "f4"), np.ones(2, "f4")).choice.machine
