"""Machines, samples and rows of results and of studies, made up for the tests of the lab."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from checkout import EVIDENCE
from gemmule.core.problem import Problem, QuantSpec
from gemmule.timing.sampler import Samples
from gemmule_lab.records.rows import Ceiling, Environment, Row, Speedup, Times
from gemmule_lab.records.study import Rows, StudyRow
from pages import study_pages

PARTS_OF_THE_WAY = [  # of a product from host arrays to a host array
    "first call",
    *("allocation", "host to device, pageable", "host to device, pinned"),
    *("kernel", "device to host, pageable", "device to host, pinned", "free"),
]
QUANT = QuantSpec(4, 128, False, "row", "float16", False)


def machine(read_gbs: float = 40.0, device: str = "Test CPU") -> Environment:
    ceiling = Ceiling("read", read_gbs, "GB/s", "4 streams, 2 threads", 2, {"1 stream": 33.0})
    return Environment(
        device=device,
        backend="cpu",
        cpu=device,
        gpus=(),
        system="Linux",
        python="3.11",
        versions={"numpy": "2.4"},
        commit=None,
        threads=2,
        clocks={"cpu": "3000 MHz"},
        ceilings={"read": ceiling},
    )


def samples(name: str, microseconds: float, n: int = 12, spread: float = 0.0) -> Samples:
    times = microseconds * 1e-6 * (1 + spread * np.linspace(-1, 1, n))
    return Samples(name, tuple(times), 4, ({},) * n, 0.1, "precise", "synthetic", 7)


def times(us: float) -> Times:
    return Times(us, us, us, us, 8)


def result_row(
    name: str,
    us: float,
    problem: Problem,
    kind: str = "rung",
    *,
    over: Mapping[str, float] | None = None,
    group: str = "64 x 64, matvec, float32",
) -> Row:
    """Return a cold row; over: how many times as fast as each peer."""
    speedups = {k: Speedup(v, v, v, 9, 0.95, "faster") for k, v in (over or {}).items()}
    rest = {"percent_of_ceiling": 50.0, "speedups": speedups, "group": group}
    return Row("e", problem, name, kind, "cold", times(us), 1e3 / us, 1.0, **rest)  # type: ignore[arg-type]


def study_row(
    seed: str,
    experiment: str,
    name: str,
    us: float | None = None,
    *,
    backend: str = "cuda",
    temperature: str = "warm",
    figures: Mapping[str, float] | None = None,
    note: str = "",
    **case: int,
) -> StudyRow:
    return StudyRow(
        seed,
        experiment,
        machine().id,
        "Test device",
        backend,
        case,
        name,
        "rung",
        temperature,
        times_us=None if us is None else times(us),
        figures=figures or {},
        note=note,
    )


@functools.cache
def recorded(seed: str) -> Rows:
    """Return a study's rows of the device with the most of them; to be looked at only."""
    return next(iter(study_pages.devices_on_record(EVIDENCE, seed).values()))
